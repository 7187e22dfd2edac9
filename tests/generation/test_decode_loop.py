"""The loop against transformers' own `generate` with one prompt at a time: the same tokens, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from brim.generation.loop import DecodeLoop, Padding, _EndWatch
from brim.generation.select import GenerateFallback, make_decoder
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import TokenIds
from brim.generation.state import DecodeState
from tests.generation.tiny_models import (
    END,
    FAMILIES,
    NO_ENDS,
    PAD,
    SINCE_VERSION_5,
    answers_of,
    bart,
    batch_of,
    ends_met_at_different_times,
    gpt2,
    llama,
    make_prompts,
    mamba,
    own_answers,
    qwen2,
    settings,
    t5,
)

TOKENS = 19


@pytest.fixture
def states_made(monkeypatch: pytest.MonkeyPatch) -> list[DecodeState]:
    """Every state that a loop makes, in order."""
    made: list[DecodeState] = []
    usual = DecodeLoop._make_state

    def spy(loop: DecodeLoop, *arguments: Any) -> DecodeState:
        made.append(usual(loop, *arguments))
        return made[-1]

    monkeypatch.setattr(DecodeLoop, "_make_state", spy)
    return made


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_as_each_prompt_does_alone(family: str, states_made: list[DecodeState]) -> None:
    model, prompts = FAMILIES[family](), make_prompts()
    unended = own_answers(model, prompts, TOKENS)
    assert len({tuple(answer) for answer in unended}) == len(prompts), "the answers must differ to mean anything"
    ends = ends_met_at_different_times(unended)
    expected = own_answers(model, prompts, TOKENS, ends)
    decoder = make_decoder(model, settings(TOKENS), TokenIds(ends=ends, pad=PAD))
    assert isinstance(decoder, DecodeLoop)
    assert decoder.padding == "right"
    states_made.clear()
    answers = decoder.generate(batch_of(decoder, prompts))
    assert answers.token_lists() == expected
    assert answers.ended() == [len(answer) < TOKENS for answer in expected]
    assert [len(state.cache.layers) for state in states_made] == [2, 2, 2]
    rows = [state.rows for state in states_made]  # of each segment
    assert len(rows) == 3
    assert rows[0] == len(prompts) > rows[1] > rows[2], "rows that have ended leave between segments"
    assert states_made[0].capacity < states_made[1].capacity < states_made[2].capacity


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gpt_neox", "bloom", "opt"])
def test_prompts_padded_on_the_left_answer_as_each_does_alone(family: str) -> None:
    model, prompts = FAMILIES[family](), make_prompts()
    ends = ends_met_at_different_times(own_answers(model, prompts, TOKENS))
    loop = DecodeLoop(model, settings(TOKENS), TokenIds(ends=ends, pad=PAD), padding="left")
    assert answers_of(loop, prompts) == own_answers(model, prompts, TOKENS, ends)


class LateWatch(_EndWatch):
    """As on a GPU: asked every few steps, it tells how things stood when it was last asked."""

    def __init__(self, state: DecodeState) -> None:
        super().__init__(state)
        self._on_gpu = True
        self._told = False

    def all_ended(self) -> bool:
        before, self._told = self._told, bool(self._state.finished.all())
        return before


@pytest.mark.parametrize("family", ["llama", pytest.param("bart", marks=SINCE_VERSION_5)])
@pytest.mark.parametrize(("late", "steps"), [(False, 7), (True, 11)], ids=["at-once", "two-looks-late"])
def test_the_loop_stops_when_all_answers_have_ended(
    family: str, late: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = FAMILIES[family](), make_prompts((3, 25))
    unended = own_answers(model, prompts, TOKENS)
    ends = (unended[0][7], unended[1][5])
    expected = [answer[: min(answer.index(end) for end in ends if end in answer)] for answer in unended]
    assert max(map(len, expected)) == 7, "the last answer ends with its eighth token, at the seventh step"
    monkeypatch.setattr("brim.generation.loop.CHECK_STEPS", 4)  # ended before token 8, seen at 12
    if late:
        monkeypatch.setattr("brim.generation.loop._EndWatch", LateWatch)
    loop = make_decoder(model, settings(TOKENS), TokenIds(ends=ends, pad=PAD))
    assert isinstance(loop, DecodeLoop)
    taken = []
    usual = loop.decode_one_token

    def counted(state: DecodeState) -> torch.Tensor:
        taken.append(1)
        return usual(state)

    monkeypatch.setattr(loop, "decode_one_token", counted)
    assert answers_of(loop, prompts) == expected
    assert len(taken) == steps


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", ["right", "left", "fallback", "t5"])
def test_no_token_of_a_prompt_is_in_an_answer(kind: str) -> None:
    """The tokens of the prompts may not be generated, so one in an answer must come from the prompt."""
    model = {"fallback": mamba, "t5": t5}.get(kind, llama)()
    prompts = [torch.arange(4, 4 + length) for length in (2, 9, 21)]
    model.generation_config.suppress_tokens = list(range(40))
    decoder = make_decoder(model, settings(TOKENS), NO_ENDS)
    if kind == "left":
        decoder = DecodeLoop(model, settings(TOKENS), NO_ENDS, padding="left")
    assert isinstance(decoder, GenerateFallback if kind == "fallback" else DecodeLoop)
    answers = answers_of(decoder, prompts)
    assert [len(answer) for answer in answers] == [TOKENS] * 3
    assert min(token for answer in answers for token in answer) >= 40


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("make", [llama, mamba, t5], ids=["loop", "fallback", "seq2seq"])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 12, 13])
def test_exactly_max_new_tokens_are_generated(make: Any, count: int) -> None:
    model = make()
    model.generation_config.max_length = 7
    decoder = make_decoder(model, settings(count), NO_ENDS)
    answers = decoder.generate(batch_of(decoder, make_prompts((2, 11))))
    assert [len(answer) for answer in answers.token_lists()] == [count, count]
    assert answers.ended() == [False, False]


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("padding", ["right", "left"])
def test_an_end_token_at_the_last_step_counts_as_ended(padding: Padding) -> None:
    model, prompts = llama(), make_prompts((5, 9), seed=2)
    first, second = own_answers(model, prompts, 6)
    assert first[5] not in (*first[:5], *second)
    loop = DecodeLoop(model, settings(6), TokenIds(ends=(first[5],), pad=PAD), padding=padding)
    answers = loop.generate(batch_of(loop, prompts))
    assert answers.token_lists() == [first[:5], second]
    assert answers.ended() == [True, False]


@pytest.mark.usefixtures("short_segments")
def test_padding_that_is_also_the_end_token_changes_nothing() -> None:
    model, prompts = gpt2(), make_prompts()
    end = ends_met_at_different_times(own_answers(model, prompts, TOKENS))[0]
    loop = DecodeLoop(model, settings(TOKENS), TokenIds(ends=(end,), pad=end))
    assert answers_of(loop, prompts) == own_answers(model, prompts, TOKENS, (end,))


def test_bfloat16_gives_a_batch_of_answers() -> None:
    """Random weights make the tokens a matter of rounding; that it runs, ends and is chosen is what can be told."""
    loop = make_decoder(qwen2().to(torch.bfloat16), settings(6), NO_ENDS)
    assert isinstance(loop, DecodeLoop)
    assert [len(answer) for answer in answers_of(loop, make_prompts())] == [6] * 6


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    "make", [llama, bart, pytest.param(mamba, marks=SINCE_VERSION_5)], ids=["loop", "seq2seq", "fallback"]
)
@pytest.mark.parametrize("penalty", [None, 1.5])
def test_a_sampled_answer_does_not_depend_on_its_batch(make: Any, penalty: float | None) -> None:
    model, prompts = make(), make_prompts()
    model.generation_config.repetition_penalty = penalty
    decoder = make_decoder(
        model, settings(TOKENS, temperature=2.0, seed=3), TokenIds(ends=tuple(range(90, 97)), pad=PAD)
    )
    together = answers_of(decoder, prompts)
    alone = [answers_of(decoder, [prompt], keys=[key])[0] for key, prompt in enumerate(prompts)]
    assert alone == together
    order = [4, 2, 0, 5, 1, 3]
    assert answers_of(decoder, [prompts[key] for key in order], keys=order) == [together[key] for key in order]
    assert len({len(answer) for answer in together}) > 2, "they end at different times"


@pytest.mark.parametrize("make", [llama, bart], ids=["loop", "seq2seq"])
def test_a_sampled_answer_does_not_depend_on_where_segments_begin(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make(), make_prompts()
    decoder = make_decoder(model, settings(TOKENS, temperature=2.0), NO_ENDS)
    whole = answers_of(decoder, prompts)
    monkeypatch.setattr("brim.generation.loop.FIRST_SEGMENT", 4)
    decoder.release()
    assert answers_of(decoder, prompts) == whole


@pytest.mark.parametrize("make", [llama, bart, mamba], ids=["loop", "seq2seq", "fallback"])
def test_a_sampled_answer_depends_on_the_seed_and_on_the_key(make: Any) -> None:
    model, prompts = make(), make_prompts((6, 6, 6))
    greedy = answers_of(make_decoder(model, settings(8), NO_ENDS), prompts)

    def sampled(seed: int, keys: Sequence[int]) -> list[list[int]]:
        decoder = make_decoder(model, settings(8, temperature=2.0, seed=seed), NO_ENDS)
        return answers_of(decoder, prompts, keys=keys)

    first = sampled(0, [0, 1, 2])
    assert first == sampled(0, [0, 1, 2])
    for other in (greedy, sampled(1, [0, 1, 2]), sampled(0, [7, 8, 9])):
        assert all(one != another for one, another in zip(first, other, strict=True))
    same_prompt = answers_of(
        make_decoder(model, settings(8, temperature=2.0), NO_ENDS), [prompts[0]] * 3, keys=[0, 1, 1]
    )
    assert same_prompt[0] != same_prompt[1] == same_prompt[2]


def test_the_fallback_samples_as_the_loop_does() -> None:
    model, prompts = llama(), make_prompts()
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.top_k = 20
    options = settings(TOKENS, temperature=1.5, top_p=0.9, seed=11)
    tokens = TokenIds(ends=(END,), pad=PAD)
    loop, fallback = DecodeLoop(model, options, tokens), GenerateFallback(model, options, tokens, why="a test")
    assert answers_of(loop, prompts) == answers_of(fallback, prompts)


def test_a_seq2seq_model_gets_the_loop_with_an_encoder() -> None:
    assert isinstance(make_decoder(t5(), settings(), NO_ENDS), Seq2SeqLoop)
