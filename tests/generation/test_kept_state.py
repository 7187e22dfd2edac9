"""What stays of a batch for the next: its room and its graph where the shape is the same, and never its text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.generation.cache import Slots, make_cache
from brim.generation.loop import DecodeLoop, _EndWatch
from brim.generation.select import make_decoder
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import TokenIds
from brim.generation.state import Answers, DecodeState, round_up
from tests.generation.tiny_models import (
    NO_ENDS,
    answers_of,
    bart,
    batch_of,
    llama,
    make_prompts,
    own_answers,
    qwen2,
    settings,
)

TOKENS = 12
# Before torch 2.8, a tensor without data on a GPU that is not here asks the driver.
FAKE_CUDA = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
CPU = torch.device("cpu")


class StepFailed(Exception):  # noqa: N818  # as an interrupt would come: not an error of ours
    pass


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("make", [qwen2, bart], ids=["loop", "seq2seq"])
@pytest.mark.parametrize("step", [2, 6], ids=["first-segment", "later-segment"])
def test_a_failed_batch_keeps_no_memory_and_the_next_one_works(
    make: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = make(), make_prompts()
    loop = make_decoder(model, settings(TOKENS), NO_ENDS)
    assert isinstance(loop, DecodeLoop)
    usual = loop.decode_one_token
    calls = 0

    def fail_once(state: DecodeState) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == step:
            raise StepFailed
        return usual(state)

    monkeypatch.setattr(loop, "decode_one_token", fail_once)
    with pytest.raises(StepFailed):
        loop.generate(batch_of(loop, prompts))
    assert loop._kept is None
    if isinstance(loop, Seq2SeqLoop):
        assert loop._encoded == {}
        assert loop._cache is None
    assert answers_of(loop, prompts) == own_answers(model, prompts, TOKENS)
    assert calls == step + TOKENS - 1


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(
    "lengths", [(3, 17, 30, 8), (9, 9, 9, 9), (1, 2, 1, 3), (3, 17, 30)], ids=["equal", "level", "shorter", "fewer"]
)
def test_the_next_batch_of_similar_shape_reuses_the_state(
    padding: Any, temperature: float, lengths: tuple[int, ...]
) -> None:
    options = settings(TOKENS, temperature=temperature)
    model, prompts = qwen2(), make_prompts(lengths, seed=5)
    loop = DecodeLoop(model, options, NO_ENDS, padding=padding)
    loop.generate(batch_of(loop, make_prompts((30, 4, 12, 21))))
    kept = loop._kept
    assert kept is not None
    again = answers_of(loop, prompts)
    assert loop._kept is kept
    assert again == answers_of(DecodeLoop(model, options, NO_ENDS, padding=padding), prompts)
    if not temperature:
        assert again == own_answers(model, prompts, TOKENS)


def test_answers_that_end_early_do_not_affect_the_next_batch() -> None:
    model, prompts = llama(), make_prompts((5, 9, 3, 8))
    first, second, *_ = own_answers(model, prompts, TOKENS)
    tokens = TokenIds(ends=(first[1], second[4]), pad=0)
    loop = DecodeLoop(model, settings(TOKENS), tokens)
    expected = own_answers(model, prompts, TOKENS, tokens.ends)
    assert answers_of(loop, prompts) == expected
    assert answers_of(loop, prompts[::-1]) == expected[::-1]


@pytest.mark.parametrize("lengths", [(30, 4), (30, 4, 12, 21, 6), (70, 4, 12, 21)], ids=["half", "more", "longer"])
def test_a_batch_of_another_shape_gets_a_new_state(lengths: tuple[int, ...]) -> None:
    model, prompts = qwen2(), make_prompts(lengths, seed=5)
    loop = DecodeLoop(model, settings(TOKENS), NO_ENDS)
    loop.generate(batch_of(loop, make_prompts((30, 4, 12, 21))))
    kept = loop._kept
    assert answers_of(loop, prompts) == own_answers(model, prompts, TOKENS)
    assert loop._kept is not kept


def test_release_frees_the_state() -> None:
    loop = DecodeLoop(llama(), settings(TOKENS), NO_ENDS)
    loop.generate(batch_of(loop, make_prompts()))
    assert loop._kept is not None
    loop.release()
    assert loop._kept is None


@pytest.mark.usefixtures("short_segments")
def test_a_state_that_had_to_grow_is_not_kept() -> None:
    loop = DecodeLoop(llama(), settings(TOKENS), NO_ENDS)
    loop.generate(batch_of(loop, make_prompts()))
    assert loop._kept is None


def test_an_encoder_decoder_starts_every_batch_afresh() -> None:
    """A graph would hold what the encoder made of the batch before."""
    model = bart()
    loop = Seq2SeqLoop(model, settings(TOKENS), NO_ENDS)
    loop.generate(batch_of(loop, make_prompts((30, 4, 12, 21))))
    kept = loop._kept
    for lengths in ((30, 4, 12, 21), (9, 2, 25)):
        prompts = make_prompts(lengths, seed=5)
        assert answers_of(loop, prompts) == own_answers(model, prompts, TOKENS)
        assert loop._kept is not kept


def test_a_finished_row_gets_padding() -> None:
    state = DecodeState.make(layers=1, rows=3, capacity=64, segment=3, samples=False, device=CPU)
    valid = torch.ones(2, 4, dtype=torch.long)
    state.begin(slot=4, position=torch.tensor([4, 4]), valid=valid)
    for chosen in ([5, 8, 5], [6, 6, 6], [9, 7, 7]):
        state.accept(torch.tensor(chosen), torch.tensor([8, 9]), 1)
    assert state.produced.tolist() == [[5, 6, 9], [8, 1, 1], [1, 1, 1]], "the third row is no prompt's"
    assert state.finished.tolist() == [True, True, True]
    assert state.token.tolist() == [[9], [1], [1]]


def test_a_layer_without_own_keys_is_skipped_when_rows_move() -> None:
    """Some layers read the keys and values of another; their place in the cache stays empty."""

    def state(rows: int, capacity: int) -> DecodeState:
        return DecodeState.make(layers=2, rows=rows, capacity=capacity, segment=4, samples=False, device=CPU)

    old, new = state(3, 64), state(1, 128)
    keys = torch.randn(3, 2, 5, 8)
    old.cache.update(keys, -keys, 0)
    old.begin(slot=5, position=torch.tensor([5, 4, 3]), valid=torch.ones(3, 5, dtype=torch.long))
    old.carry_over(new, torch.tensor([2]))
    assert torch.equal(new.cache.layers[0].keys[:, :, :5], keys[2:])
    assert torch.equal(new.cache.layers[0].values[:, :, :5], -keys[2:])
    assert new.position.tolist() == [[3]]
    assert not new.cache.layers[1].is_initialized


def test_capacity_is_a_multiple_of_64() -> None:
    assert [round_up(count) for count in (1, 64, 65)] == [64, 64, 128]


def test_prefill_sees_the_prompt_and_a_step_sees_every_slot() -> None:
    slots = Slots(8, CPU)
    cache = make_cache(1, 2, slots)
    prompt, step = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 1, 4)
    assert cache.update(prompt, prompt, 0)[0] is prompt
    slots.decoding = True
    slots.next.fill_(3)
    keys, _ = cache.update(step, step, 0)
    assert torch.equal(keys, torch.cat([prompt, step, torch.zeros(2, 1, 4, 4)], dim=2))
    assert (cache.get_seq_length(), cache.get_mask_sizes(1, 0)) == (3, (8, 0))


def test_answers_are_cut_before_the_first_end_token() -> None:
    answers = Answers.empty(3, 5, TokenIds(ends=(8, 9), pad=0), CPU)
    answers.write(torch.tensor([2, 0]), torch.tensor([[1, 9, 8], [1, 2, 3]]), at=0)
    answers.write(torch.tensor([0]), torch.tensor([[0, 5]]), at=3)
    answers.write(torch.tensor([1]), torch.tensor([[8]]), at=0)
    answers.send(5)
    assert answers.token_lists() == [[1, 2, 3, 0, 5], [], [1]]
    assert answers.ended() == [False, True, True]


@pytest.mark.skipif(not FAKE_CUDA, reason="needs torch 2.8")
def test_what_is_read_late_waits_for_the_device_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded on CUDA's current device unless told otherwise, and that one may have nothing to do."""
    recorded: list[Any] = []
    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda on=None: recorded.append(on)))
    with FakeTensorMode():
        Answers.empty(2, 3, NO_ENDS, second).send(2)
        state = DecodeState.make(layers=1, rows=2, capacity=8, segment=3, samples=False, device=second)
        _EndWatch(state).all_ended()
    assert recorded == [second, second]
