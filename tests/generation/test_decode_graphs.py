"""Where and when a step is captured, and that a replayed step gives the same answers. No GPU: a capture is faked."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brim.generation.graphs import CaptureFailedError, GraphPool, capture, graphs_work_on
from brim.generation.loop import DecodeLoop
from brim.generation.select import make_decoder
from brim.generation.settings import TokenIds
from tests.generation.fake_graphs import FakeGraph, fake_captures
from tests.generation.tiny_models import (
    NO_ENDS,
    PAD,
    answers_of,
    bart,
    ends_met_at_different_times,
    llama,
    make_prompts,
    qwen2,
    settings,
)

TOKENS = 19


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Every graph that was captured, on a device that is said to have them."""
    graphs: list[FakeGraph] = []

    def capture(step: Callable[[], Any]) -> FakeGraph:
        graphs.append(FakeGraph(step))
        return graphs[-1]

    fake_captures(monkeypatch, "brim.generation.loop", capture)
    return graphs


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls = []

    def capture(step: Callable[[], Any]) -> FakeGraph:
        calls.append(1)
        raise error

    fake_captures(monkeypatch, "brim.generation.loop", capture)
    return calls


def eager_answers(model: Any, prompts: list[torch.Tensor], tokens: TokenIds = NO_ENDS, **options: Any) -> Any:
    """What the loop answers when it is told to capture nothing."""
    return answers_of(make_decoder(model, settings(TOKENS, graphs=False, **options), tokens), prompts)


def test_nothing_is_captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not graphs_work_on(torch.device("cpu"))
    assert graphs_work_on(torch.device("cuda", 1))
    works = graphs_work_on
    calls = fail_with(AssertionError("captured on the CPU"), monkeypatch)
    monkeypatch.setattr("brim.generation.loop.graphs_work_on", works)
    loop = DecodeLoop(llama(), settings(TOKENS), NO_ENDS)
    assert [len(answer) for answer in answers_of(loop, make_prompts())] == [TOKENS] * 6
    assert calls == []


def test_nothing_is_captured_without_graphs(captured: list[FakeGraph]) -> None:
    eager_answers(llama(), make_prompts())
    assert captured == []


def test_nothing_is_captured_for_a_few_steps(captured: list[FakeGraph]) -> None:
    answers_of(DecodeLoop(llama(), settings(5), NO_ENDS), make_prompts())
    assert captured == []
    answers_of(DecodeLoop(llama(), settings(6), NO_ENDS), make_prompts())
    assert [graph.replays for graph in captured] == [4]  # the first token is the prompt's, the second a step to warm up


@pytest.mark.parametrize("segments", [False, True], ids=["one-segment", "segments"])
@pytest.mark.parametrize("make", [qwen2, bart], ids=["loop", "seq2seq"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"temperature": 2.0, "top_p": 0.9}, {}),
        ({}, {"repetition_penalty": 1.5, "min_new_tokens": 3}),
        ({"temperature": 2.0}, {"no_repeat_ngram_size": 2}),
    ],
    ids=["greedy", "sampled", "greedy-with-tokens", "sampled-with-tokens"],
)
def test_replayed_steps_give_the_same_answers(
    make: Any,
    segments: bool,
    options: dict[str, Any],
    asked: dict[str, Any],
    captured: list[FakeGraph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if segments:
        monkeypatch.setattr("brim.generation.loop.FIRST_SEGMENT", 6)
    model, prompts = make(), make_prompts()
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    tokens = TokenIds(ends=ends_met_at_different_times(eager_answers(model, prompts, **options)), pad=PAD)
    expected = eager_answers(model, prompts, tokens, **options)
    assert captured == []
    loop = make_decoder(model, settings(TOKENS, **options), tokens)
    assert answers_of(loop, prompts) == expected
    assert len(captured) == (2 if segments else 1)
    assert sum(graph.replays for graph in captured) > 8
    assert loop.notes == []


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("penalty", [None, 1.5])
def test_the_graph_of_the_last_batch_is_replayed_for_the_next(
    penalty: float | None, temperature: float, captured: list[FakeGraph]
) -> None:
    model = qwen2()
    model.generation_config.repetition_penalty = penalty
    first, second = make_prompts((3, 17, 30, 8)), make_prompts((9, 2, 25), seed=5)
    loop = DecodeLoop(model, settings(TOKENS, temperature=temperature), NO_ENDS)
    answers_of(loop, first)
    assert [graph.replays for graph in captured] == [TOKENS - 2]
    assert answers_of(loop, second) == eager_answers(model, second, temperature=temperature)
    assert [graph.replays for graph in captured] == [TOKENS - 2 + TOKENS - 1]


def test_a_step_that_cannot_be_captured_runs_eagerly_and_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = qwen2(), make_prompts()
    expected = eager_answers(model, prompts)
    calls = fail_with(CaptureFailedError("RuntimeError: operation not permitted"), monkeypatch)
    loop = make_decoder(model, settings(TOKENS), NO_ENDS)
    assert answers_of(loop, prompts) == expected
    assert answers_of(loop, prompts) == expected
    assert calls == [1]
    assert loop.notes == [
        "decode steps run without CUDA graphs: capturing one failed (RuntimeError: operation not permitted)"
    ]


def test_out_of_memory_in_a_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(torch.OutOfMemoryError("CUDA out of memory."), monkeypatch)
    loop = DecodeLoop(llama(), settings(TOKENS), NO_ENDS)
    with pytest.raises(torch.OutOfMemoryError):
        answers_of(loop, make_prompts())
    assert loop._kept is None
    assert loop.notes == []


class Device:
    """What torch keeps of captures, by the rules of its 2.11: the end of a void capture reaches none of it."""

    def __init__(self) -> None:
        self.handles = 0
        self.allocating: set[Any] = set()  # pools, by the device's allocator
        self.allocating_pinned: set[Any] = set()
        self.generator_waits = False
        self.void = False  # the capture under way

    def refuse(self) -> None:
        """A call that waits for the device, inside a capture."""
        self.void = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def end_allocating(self, index: int, pool: Any) -> None:
        assert index == 1
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)


def fake_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Graph:
        def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
            if pool in device.allocating or pool in device.allocating_pinned:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            device.allocating.add(pool)
            device.allocating_pinned.add(pool)
            device.generator_waits, self.pool = True, pool

        def capture_end(self) -> None:
            if device.void:
                device.void = False
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            device.end_allocating(1, self.pool)
            device.allocating_pinned.remove(self.pool)
            device.generator_waits = False

    def new_handle() -> tuple[int, int]:
        device.handles += 1
        return 0, device.handles

    stream = SimpleNamespace(wait_stream=lambda _: None, device_index=1)
    for name, made in (("current_stream", stream), ("Stream", stream)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, made=made: made)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", new_handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: None, raising=False)
    monkeypatch.setattr("brim.generation.graphs._streams", {})
    return device


def test_a_capture_that_becomes_void_leaves_nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else allocations, random numbers and graphs fail from then on in this process, whatever model they are of."""
    device = fake_device(monkeypatch)
    pool = GraphPool(torch.device("cpu"))
    with pytest.raises(CaptureFailedError, match="not permitted when stream is capturing"):
        capture(device.refuse, pool)
    assert not device.allocating
    assert not device.generator_waits
    capture(lambda: None, pool)  # of another model, that holds the same pool
    assert not device.allocating


def test_a_capture_that_only_its_end_shows_to_be_void_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_device(monkeypatch)

    def step() -> None:
        device.void = True

    with pytest.raises(CaptureFailedError, match="previous error during capture"):
        capture(step, GraphPool(torch.device("cpu")))
    assert not device.allocating


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_a_capture_that_fails_keeps_none_of_the_steps_tensors(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a capture is survived: what the step had allocated must be free for the smaller pool."""
    fake_device(monkeypatch)
    kept: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        allocated = torch.zeros(3)
        kept.append(weakref.ref(allocated))
        raise type(error)(*error.args)

    gc.disable()
    try:
        with pytest.raises(CaptureFailedError if isinstance(error, ValueError) else torch.OutOfMemoryError) as raised:
            capture(step, GraphPool(torch.device("cpu")))
        del raised
        assert kept[0]() is None
    finally:
        gc.enable()
