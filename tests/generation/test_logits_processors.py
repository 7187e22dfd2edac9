"""What a generation configuration asks for, in batches, against transformers' own `generate` with one prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from brim.generation.loop import DecodeLoop
from brim.generation.select import GenerateFallback, make_decoder
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import TokenIds
from tests.generation.tiny_models import (
    NO_ENDS,
    PAD,
    answers_of,
    bart,
    gpt2,
    llama,
    make_prompts,
    own_answers,
    settings,
    t5,
)

TOKENS = 19

pytestmark = pytest.mark.usefixtures("short_segments")  # what came before a segment must not be forgotten


def make(kind: str, tokens: TokenIds, model: Any) -> Any:
    if kind == "fallback":
        return GenerateFallback(model, settings(TOKENS), tokens, why="a test")
    if kind == "seq2seq":
        return Seq2SeqLoop(model, settings(TOKENS), tokens)
    return DecodeLoop(model, settings(TOKENS), tokens, padding="left" if kind == "left" else "right")


@pytest.mark.parametrize("kind", ["right", "left", "fallback", "seq2seq"])
@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"suppress_tokens": list(range(40, 80))},
        {"begin_suppress_tokens": list(range(40, 101))},
        {"bad_words_ids": [[token] for token in range(30, 60)]},
        {"forced_eos_token_id": 4},
    ],
    ids=["repetition", "ngrams", "both", "suppressed", "first-suppressed", "bad-words", "forced-end"],
)
def test_logits_processors_of_the_configuration_apply_in_a_batch(kind: str, asked: dict[str, Any]) -> None:
    model, prompts = (t5 if kind == "seq2seq" else gpt2)(), make_prompts()
    unasked = own_answers(model, prompts, TOKENS)
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    expected = own_answers(model, prompts, TOKENS)
    assert sum(one != other for one, other in zip(expected, unasked, strict=True)) > len(prompts) // 2
    assert answers_of(make(kind, NO_ENDS, model), prompts) == expected


@pytest.mark.parametrize("kind", ["right", "left", "fallback", "seq2seq"])
def test_no_answer_ends_before_the_fewest_new_tokens(kind: str) -> None:
    model, prompts = (t5 if kind == "seq2seq" else llama)(), make_prompts()
    unended = own_answers(model, prompts, TOKENS)
    counts = Counter(token for answer in unended for token in answer)
    ends = tuple(token for token, _ in counts.most_common(4))
    early = own_answers(model, prompts, TOKENS, ends)
    assert min(map(len, early)) < 9
    model.generation_config.min_new_tokens = 9
    expected = own_answers(model, prompts, TOKENS, ends)
    assert 9 <= min(map(len, expected)) < TOKENS
    assert answers_of(make(kind, TokenIds(ends=ends, pad=PAD), model), prompts) == expected


@pytest.mark.parametrize("kind", ["right", "left", "fallback"])
def test_a_repetition_penalty_does_not_apply_to_padding(kind: str) -> None:
    """A token that the answers hold many times stands for padding: no answer may notice."""
    model, prompts = gpt2(), make_prompts()
    model.generation_config.repetition_penalty = 1.2
    expected = own_answers(model, prompts, TOKENS)
    pad = Counter(token for answer in expected for token in answer).most_common(1)[0][0]
    assert answers_of(make(kind, TokenIds(ends=(), pad=pad), model), prompts) == expected


@pytest.mark.parametrize("name", ["min_length", "forced_bos_token_id"])
def test_a_summariser_keeps_its_shortest_length_and_its_first_token(name: str) -> None:
    model, prompts = bart(), make_prompts()
    unended = own_answers(model, prompts, TOKENS)
    ends = (unended[0][2], unended[1][5])
    setattr(model.generation_config, name, 11)
    expected = own_answers(model, prompts, TOKENS, ends)
    assert expected != [answer[: len(other)] for answer, other in zip(unended, expected, strict=True)]
    assert answers_of(make("seq2seq", TokenIds(ends=ends, pad=PAD), model), prompts) == expected


def test_the_end_that_bart_forces_at_the_last_token_is_forced() -> None:
    model, prompts = bart(), make_prompts()
    free = own_answers(model, prompts, TOKENS)
    assert all(4 not in answer for answer in free)
    model.generation_config.forced_eos_token_id = 4
    decoder = make_decoder(model, settings(TOKENS), TokenIds(ends=(4,), pad=PAD))
    assert isinstance(decoder, Seq2SeqLoop)
    assert answers_of(decoder, prompts) == [answer[:-1] for answer in free]


@pytest.mark.parametrize("kind", ["right", "fallback"])
def test_settings_for_beams_and_for_what_generate_returns_do_not_matter(kind: str) -> None:
    model, prompts = llama(), make_prompts()
    expected = own_answers(model, prompts, TOKENS)
    model.generation_config.num_beams = 4
    model.generation_config.num_return_sequences = 3
    model.generation_config.return_dict_in_generate = True
    model.generation_config.do_sample = True
    assert answers_of(make(kind, NO_ENDS, model), prompts) == expected
