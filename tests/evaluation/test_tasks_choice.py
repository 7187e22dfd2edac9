"""Multiple choice: log-likelihoods as a plain loop over the options has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from brim.errors import RequestError
from tests.evaluation.evaluation_runs import predictions, run, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

QUESTIONS = [
    ("what is 1 plus 1 ?", ["2", "11", "3 plus 4 w7"], 0),
    ("w1", ["w2 w3 w4 w5 w6", "w7"], 1),
    ("what is w9 w10 w11 w12 w13 w14 w15 w16 w17 ?", ["w18", "w19", "w20", "w21"], 3),
    ("is w30 ?", ["w31 w32", "w33 w34"], 1),
    ("w40 w41", ["5", "6"], 0),
]


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [
        {"id": f"c{number}", "question": question, "choices": options, "answer": right}
        for number, (question, options, right) in enumerate(QUESTIONS)
    ]
    return write_lines(tmp_path_factory.mktemp("choice") / "choices.jsonl", records)


def likelihood(logits: torch.Tensor, tokens: list[int]) -> float:
    """Of tokens [t] under logits [t, vocabulary]."""
    table = logits.log_softmax(dim=-1)
    return sum(float(table[step, token]) for step, token in enumerate(tokens))


@torch.no_grad()
def expected(folder: Path, *, seq2seq: bool) -> list[list[float]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    rows = []
    for question, options, _ in QUESTIONS:
        row = []
        for option in options:
            tokens = tokenizer(option)["input_ids"]
            if seq2seq:
                logits = model(**tokenizer(question, return_tensors="pt"), labels=torch.tensor([tokens])).logits[0]
            else:
                whole = tokenizer(f"{question} {option}", return_tensors="pt")["input_ids"]
                logits = model(input_ids=whole).logits[0, -len(tokens) - 1 : -1]
            row.append(likelihood(logits, tokens))
        rows.append(row)
    return rows


@pytest.mark.parametrize("size", [1, 4, "auto"])
@pytest.mark.parametrize("seq2seq", [False, True])
def test_likelihoods_are_those_of_each_option_alone(
    language_model: Path, seq2seq_model: Path, choices: Path, tmp_path: Path, size: Any, seq2seq: bool
) -> None:
    model = seq2seq_model if seq2seq else language_model
    result = run(model, choices, tmp_path / "run", batch_size=size)
    wanted = expected(model, seq2seq=seq2seq)
    for found, row in zip(predictions(result), wanted, strict=True):
        assert found == pytest.approx(row, abs=1e-4)
    best = [row.index(max(row)) for row in wanted]
    right = [answer for _, _, answer in QUESTIONS]
    score = sum(one == other for one, other in zip(best, right, strict=True)) / len(right)
    assert result.metrics["choice_accuracy"]["value"] == pytest.approx(score)
    assert [sample["choice"] for sample in result.samples] == [
        options[place] for place, (_, options, _) in zip(best, QUESTIONS, strict=True)
    ]
    assert [sample["reference"] for sample in result.samples] == right


def test_normalised_accuracy_compensates_for_longer_options(
    language_model: Path, choices: Path, tmp_path: Path
) -> None:
    result = run(language_model, choices, tmp_path / "run")
    right = 0
    for row, (_, options, answer) in zip(expected(language_model, seq2seq=False), QUESTIONS, strict=True):
        scaled = [value / len(option) for value, option in zip(row, options, strict=True)]
        right += scaled.index(max(scaled)) == answer
    assert result.metrics["choice_accuracy_normalised"]["value"] == pytest.approx(right / len(QUESTIONS))


def test_a_classifier_is_refused(text_classifier: Path, choices: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--task choice: .* takes a language model"):
        run(text_classifier, choices, tmp_path / "run", task="choice")


def test_an_option_too_long_for_the_model_fails_only_its_question(language_model: Path, tmp_path: Path) -> None:
    records = [
        {"id": "short", "question": "w1", "choices": ["w2", "w3"], "answer": 0},
        {"id": "long", "question": "w1", "choices": ["w2", "w3 " * 330], "answer": 0},
    ]
    result = run(language_model, write_lines(tmp_path / "data.jsonl", records), tmp_path / "run")
    assert result.samples[0]["error"] is None
    assert "320 positions" in result.samples[1]["error"]["message"]
    assert result.metrics["choice_accuracy"]["count"] == 2
