"""Multiple choice: log-likelihoods as a plain loop over the options has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from brim.errors import RequestError
from brim.evaluation.setup import open_setup
from brim.evaluation.workload import workload_to_trace
from brim.settings.eval_settings import EvalRequest
from brim.tasks.choice import ChoiceTask
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


EXAMPLES = "what is w1 ? w2 is w3 ? w4 what is w5 ? w6 "  # before every question


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models on the CPU share contexts too, and short prefixes."""
    monkeypatch.setattr("brim.generation.likelihoods.MIN_CPU_PARAMETERS", 0)
    monkeypatch.setattr("brim.generation.likelihoods.MIN_SHARED_PREFIX", 4)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same questions behind the same examples."""
    records = [
        {"id": f"c{number}", "question": EXAMPLES + question, "choices": options, "answer": right}
        for number, (question, options, right) in enumerate(QUESTIONS)
    ]
    return write_lines(tmp_path_factory.mktemp("examples") / "examples.jsonl", records)


def task_of(model: Path, data: Path) -> ChoiceTask:
    task = open_setup(EvalRequest(model=str(model), data=str(data))).task
    assert isinstance(task, ChoiceTask)
    return task


class TestShared:
    @pytest.mark.parametrize("size", [{"batch_size": 1}, {"batch_size": 4}, {}, {"cost_cap": 20}])
    def test_likelihoods_are_those_without_sharing(
        self, language_model: Path, examples: Path, tmp_path: Path, size: dict[str, int], request: Any
    ) -> None:
        plain = run(language_model, examples, tmp_path / "plain")
        request.getfixturevalue("shared")
        result = run(language_model, examples, tmp_path / "run", **size)
        for found, row in zip(predictions(result), predictions(plain), strict=True):
            assert found == pytest.approx(row, abs=1e-4)
        assert result.summary["padding_fraction"] == 0.0
        assert plain.summary["padding_fraction"] > 0.0

    @pytest.mark.usefixtures("shared")
    def test_a_sample_costs_the_tokens_that_are_read_for_it(self, language_model: Path, examples: Path) -> None:
        """Of "w1" with "w2 w3 w4 w5 w6" and "w7": one of the question, and four of the first option."""
        assert task_of(language_model, examples).cost(1) == 1 + 4

    @pytest.mark.usefixtures("shared")
    def test_batches_keep_to_a_cap_by_the_sum_of_their_samples(
        self, language_model: Path, examples: Path, tmp_path: Path
    ) -> None:
        task = task_of(language_model, examples)
        costs = {sample.id: task.cost(item) for item, sample in enumerate(task.samples)}
        result = run(language_model, examples, tmp_path / "whole", cost_cap=sum(costs.values()))
        assert {sample["batch_size"] for sample in result.samples} == {len(costs)}

    @pytest.mark.usefixtures("shared")
    def test_a_memory_limit_that_one_batch_exceeds_is_survived(
        self, language_model: Path, examples: Path, tmp_path: Path
    ) -> None:
        free = run(language_model, examples, tmp_path / "free", batch_size=5, memory_limit="1GiB")
        one = run(language_model, examples, tmp_path / "one", batch_size=1, memory_limit="1GiB")
        limit = (free.summary["peak_reserved_bytes"] + one.summary["peak_reserved_bytes"]) // 2
        tight = run(language_model, examples, tmp_path / "tight", batch_size=5, memory_limit=f"{limit}B")
        assert tight.summary["oom_events"] > 0
        for found, row in zip(predictions(tight), predictions(free), strict=True):
            assert found == pytest.approx(row, abs=1e-4)

    @pytest.mark.usefixtures("shared")
    def test_a_trace_reads_and_scores_as_many_tokens(self, language_model: Path, examples: Path) -> None:
        setup = open_setup(EvalRequest(model=str(language_model), data=str(examples)))
        workload = workload_to_trace(setup, 1, setup.task.prepare(1))
        assert workload is not None
        module, read, scored = setup.model.module, [], []
        module.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
        module.get_output_embeddings().register_forward_hook(lambda _, __, made: scored.append(made.shape[-2]))
        workload.step(workload.make_batch(3))
        assert read == [3 * (setup.costs[1] + 1)]  # the last token of a padded row is read as well
        assert scored == [3 * min(6, setup.costs[1])]

    @pytest.mark.usefixtures("shared")
    def test_options_that_share_little_are_rows_of_their_own(self, language_model: Path, tmp_path: Path) -> None:
        records = [{"id": "a", "question": "w1", "choices": ["w2 " * 20, "w3 " * 20], "answer": 0}]
        task = task_of(language_model, write_lines(tmp_path / "data.jsonl", records))
        assert not task.packs

    @pytest.mark.usefixtures("shared")
    def test_a_model_that_cannot_share_says_so_once(
        self, language_model: Path, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brim.tasks.choice.shared_contexts_obstacle", lambda *_, **__: "it has a window")
        result = run(language_model, examples, tmp_path / "run")
        assert [note for note in result.notes if note.endswith("it has a window")] != []
        assert result.summary["padding_fraction"] > 0.0
