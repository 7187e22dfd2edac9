"""`BrimLM` gives the answers of lm-eval's own `hf` model, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from brim.errors import RequestError
from tests.integrations import lm_eval_tasks
from tests.integrations.lm_eval_tasks import assert_same_answer, assert_same_answers, evaluated, hf, ours, requests

pytestmark = pytest.mark.usefixtures("no_environment")


PAIRS = [
    ("The quick", " brown"), ("The quick ", "brown fox"), ("The quick  \n", " fox"), ("", "The dog"), ("", "<s>dog"),
    ("<s>The quick", " brown"), ("Q: what is it?\nA:", " 42"), ("a" * 150, " dog and fox"), ("x", "y" * 90),
    ("The quick", " brown"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks") / "made")


@pytest.fixture(scope="module", params=["no BOS", "BOS"])
def byte_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "lm"
    return lm_eval_tasks.save_byte_model(folder, adds_bos=request.param == "BOS")


def test_every_kind_of_task_has_the_answers_of_the_hf_model(language_model: Path, tasks: Path) -> None:
    expected = evaluated(hf(language_model), tasks)
    found = evaluated(ours(language_model), tasks)
    assert_same_answers(found, expected)
    assert len({answer for sample in found["samples"]["continued"] for answer in sample["resps"][0]}) > 3
    greedy = {score[1] for sample in found["samples"]["spoken"] for score in sample["resps"][0]}
    assert greedy <= {True, False}


@pytest.mark.parametrize(
    "settings", [{"batch_size": 3}, {"cost_cap": 200}, {"no_auto_batch_size": True, "batch_size": 7}]
)
def test_answers_do_not_depend_on_the_batches(byte_model: Path, settings: dict[str, Any]) -> None:
    scored = requests("loglikelihood", PAIRS)
    written = requests("generate_until", [(pair[0], {"until": ["e"], "max_gen_toks": 12}) for pair in PAIRS])
    one, other = ours(byte_model, batch_size=1), ours(byte_model, **settings)
    for answer, wanted in zip(other.loglikelihood(scored), one.loglikelihood(scored), strict=True):
        assert_same_answer(answer, wanted)
    assert other.generate_until(written) == one.generate_until(written)


@pytest.mark.parametrize("in_turns", [True, False])
def test_few_shot_prompts_in_a_chat_template_are_the_same(chat_model: Path, tasks: Path, in_turns: bool) -> None:
    settings: dict[str, Any] = {
        "num_fewshot": 2,
        "apply_chat_template": True,
        "fewshot_as_multiturn": in_turns,
        "system_instruction": "what is",
        "limit": 4,
    }
    names = ("continued", "chosen")
    found = evaluated(ours(chat_model), tasks, names, **settings)
    assert_same_answers(found, evaluated(hf(chat_model), tasks, names, **settings))
    assert found["samples"]["chosen"][0]["arguments"][0][0].count("assistant:") == (3 if in_turns else 1)


def test_white_space_empty_contexts_and_bos_tokens_are_treated_as_there(byte_model: Path) -> None:
    asked = requests("loglikelihood", PAIRS)
    expected = hf(byte_model).loglikelihood(asked, disable_tqdm=True)
    for answer, wanted in zip(ours(byte_model).loglikelihood(asked), expected, strict=True):
        assert_same_answer(answer, wanted)


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_is_as_there(byte_model: Path, adds: bool) -> None:
    asked = requests("loglikelihood", PAIRS[:6])
    expected = hf(byte_model, add_bos_token=adds).loglikelihood(asked, disable_tqdm=True)
    for answer, wanted in zip(ours(byte_model, add_bos_token=adds).loglikelihood(asked), expected, strict=True):
        assert_same_answer(answer, wanted)


def test_a_continuation_that_greedy_decoding_writes_is_marked(byte_model: Path) -> None:
    lm = ours(byte_model)
    prompts = ["The quick", "Q: what", "lazy dog", "fox", "over", "42 more", "jumps", "and"]
    asked = requests("generate_until", [(prompt, {"max_gen_toks": 1, "until": []}) for prompt in prompts])
    pairs = list(zip(prompts, lm.generate_until(asked), strict=True))
    # Read as one more token after the context; other texts are tokenised otherwise together with it.
    whole = [(context, text) for context, text in pairs
             if text and len(lm.tok_encode(context + text)) == len(lm.tok_encode(context)) + 1]  # fmt: skip
    assert whole
    assert all(greedy for _, greedy in lm.loglikelihood(requests("loglikelihood", whole)))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"until": ["e", "\n\n"], "max_gen_toks": 30},
        {"until": "<|done|>", "max_new_tokens": 40},
        {"until": ["o", "ow"], "max_tokens": 24, "temperature": 0.0},
        {"max_gen_toks": 17, "do_sample": False, "temperature": 0.7},
        {"until": ["qqq"], "max_gen_toks": 20, "repetition_penalty": 1.3},
        {"until": [], "max_gen_toks": 16, "no_repeat_ngram_size": 2},
    ],
)  # fmt: skip
def test_stop_strings_and_generation_settings_act_as_there(byte_model: Path, kwargs: dict[str, Any]) -> None:
    contexts = ["The quick", "Q: what is it?\nA:", "<s>lazy", "b" * 200, "dog. ", "the"]
    asked = requests("generate_until", [(context, dict(kwargs)) for context in contexts])
    expected = hf(byte_model).generate_until(asked, disable_tqdm=True)
    assert ours(byte_model).generate_until(asked) == expected


@pytest.mark.parametrize("think_end", ["o", "42"])
def test_what_is_thought_before_an_answer_is_left_out_as_there(byte_model: Path, think_end: str) -> None:
    asked = requests("generate_until", [(text, {"max_gen_toks": 30, "until": []}) for text in ("The", "Q:", "dog")])
    expected = hf(byte_model, think_end_token=think_end).generate_until(asked, disable_tqdm=True)
    assert ours(byte_model, think_end_token=think_end).generate_until(asked) == expected


def test_texts_longer_than_the_model_are_scored_in_the_same_windows(byte_model: Path) -> None:
    texts = ["", "The dog", "The quick brown fox. " * 40, "a" * 97]
    asked = requests("loglikelihood_rolling", [(text,) for text in texts])
    expected = hf(byte_model).loglikelihood_rolling(asked, disable_tqdm=True)
    for answer, wanted in zip(ours(byte_model).loglikelihood_rolling(asked), expected, strict=True):
        assert_same_answer(answer, wanted)


def test_a_shorter_max_length_cuts_contexts_as_there(byte_model: Path) -> None:
    asked = requests("loglikelihood", [(" ".join(["dog"] * 40), " fox"), ("The", " fox")])
    expected = hf(byte_model, max_length=24).loglikelihood(asked, disable_tqdm=True)
    for answer, wanted in zip(ours(byte_model, max_length=24).loglikelihood(asked), expected, strict=True):
        assert_same_answer(answer, wanted)


def test_more_tokens_than_the_model_has_positions_are_noted(byte_model: Path) -> None:
    assert "96 positions" in ours(byte_model, max_length=97).work.notes[0]
    assert not ours(byte_model, max_length=96).work.notes


def test_an_encoder_decoder_scores_and_writes_as_there(seq2seq_model: Path, tasks: Path) -> None:
    lm, other = ours(seq2seq_model), hf(seq2seq_model)
    names = ("spoken", "chosen", "rolled")
    assert_same_answers(evaluated(lm, tasks, names), evaluated(other, tasks, names))
    asked = requests("generate_until", [(f"what is {number} plus", {"max_gen_toks": 8}) for number in range(4)])
    theirs = other.generate_until(asked, disable_tqdm=True)  # up to the context's length longer than asked for
    assert all(wanted.startswith(answer) for answer, wanted in zip(lm.generate_until(asked), theirs, strict=True))


def test_where_hf_depends_on_its_batches_the_answers_are_those_of_batches_of_one(byte_model: Path) -> None:
    """The table of docs/integrations/lm-eval.md."""
    stopped = [
        (text, {"until": ["<|done|>"], "max_gen_toks": 60}) for text in ("Q: what is it?\nA:", "lazy", "the", "a")
    ]
    begun = [(text, {"until": [], "max_gen_toks": 5}) for text in ("<s>The quick brown fox jumps", "lazy dog", "fox")]
    lm = ours(byte_model)
    for asked in (requests("generate_until", stopped), requests("generate_until", begun)):
        assert lm.generate_until(asked) == hf(byte_model).generate_until(asked, disable_tqdm=True)
    split = requests("loglikelihood", [("The quick", " brown fox jumps"), ("The quick brown", " fox jumps")])
    alone = [hf(byte_model).loglikelihood([one], disable_tqdm=True)[0] for one in split]
    for answer, wanted in zip(lm.loglikelihood(split), alone, strict=True):
        assert_same_answer(answer, wanted)


def test_sampled_answers_depend_on_neither_batch_nor_repetition(byte_model: Path) -> None:
    kwargs = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12, "until": []}
    asked = requests("generate_until", [(text, kwargs) for text in ("The", "The", "dog", "The")])
    found = ours(byte_model, seed=3).generate_until(asked)
    assert found == ours(byte_model, seed=3, batch_size=1).generate_until(asked)
    assert found != ours(byte_model, seed=4).generate_until(asked)
    assert len({found[0], found[1], found[3]}) > 1  # a repeated request is drawn again


def test_tokens_are_drawn_from_as_many_as_there(byte_model: Path) -> None:
    """transformers' generate takes the 50 likeliest where neither task nor model says; at this heat all are alike."""
    lm, kwargs = ours(byte_model), {"temperature": 1e4, "max_gen_toks": 1, "until": []}
    drawn = lm.generate_until(requests("generate_until", [("The", kwargs)] * 600))
    of_all = lm.generate_until(requests("generate_until", [("The", {**kwargs, "top_k": 0})] * 600))
    assert 10 < len(set(drawn)) <= 50 < len(set(of_all))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"temprature": 0.5}, "temperature"),
        ({"do_sample": True}, "temperature"),
        ({"max_length": 40}, "max_gen_toks"),
        ({"max_gen_toks": 96}, "max_gen_toks"),
        ({"max_gen_toks": 0}, "at least 1"),
        ({"min_length": 5}, "min_new_tokens"),
        ({"stop_strings": ["e"]}, "until"),
        ({"max_time": 1.0}, "max_time"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"to_dict": 1}, "no such setting"),
        ({"until": 5}, "a list of texts"),
        ({"until": ["w3", 5]}, "a list of texts"),
        ({"max_gen_toks": "many"}, "max_gen_toks.*a number"),
        ({"temperature": "hot"}, "temperature.*a number"),
        ({"temperature": -1}, "gen_kwargs={'temperature'"),
        ({"temperature": 0.5, "top_p": 7.5}, "gen_kwargs={'top_p'"),
    ],
)
def test_a_generation_setting_that_cannot_be_kept_is_an_error(
    byte_model: Path, kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        ours(byte_model).generate_until(requests("generate_until", [("The", kwargs)]))


@pytest.mark.parametrize("context", ["The quick", ""])
def test_a_continuation_without_tokens_is_an_error_that_shows_it(byte_model: Path, context: str) -> None:
    with pytest.raises(RequestError, match=rf"without tokens.*'{context}'"):
        ours(byte_model).loglikelihood(requests("loglikelihood", [(context, "")]))
