"""Traces written down by hand: a small training step whose bytes are known functions of the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from brim.forecasting.events import ConvCall, Event, Target, Trace
from brim.workloads.base import Workload

MIB = 2**20


class Writer:
    """Writes events one after the other, numbering blocks as it goes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._live: dict[int, Event] = {}
        self._next = 0

    def take(self, size: int, category: Any = "activations", op: str = "aten.relu", pool: int = 0) -> int:
        block, self._next = self._next, self._next + 1
        event = Event("alloc", block, size, category, op, pool)
        self._live[block] = event
        self.events.append(event)
        return block

    def give_back(self, *blocks: int) -> None:
        for block in blocks:
            taken = self._live.pop(block)
            self.events.append(Event("free", block, taken.bytes, taken.category, taken.op, taken.pool))

    def trace(self, size: int, step_starts: Sequence[int] = (0,), **facts: Any) -> Trace:
        return Trace(batch_size=size, events=tuple(self.events), step_starts=tuple(step_starts), seconds=0.01, **facts)


def training_trace(
    size: int, *, layers: int = 6, weight: int = 3 * MIB, per_item: int = 700_001, pairs: int = 0, **facts: Any
) -> Trace:
    """Two steps of `layers` products: weights, activations kept for the backward, gradients, an optimizer's state.

    `per_item` bytes of activation a layer and item; `pairs` bytes for each pair of items, as a pairwise loss takes.
    """
    writer = Writer()
    for _ in range(layers):
        writer.take(weight, "weights", "")
    batch = writer.take(size * 1000, "inputs", "")
    starts: list[int] = []
    state: list[int] = []
    for _ in range(2):
        starts.append(len(writer.events))
        kept = [writer.take(size * (per_item + 1024 * layer), op="aten.mm") for layer in range(layers)]
        loss = [writer.take(pairs * size * size, op="aten.softplus")] if pairs else []
        gradients = []
        for block in reversed(kept):
            flow = writer.take(size * per_item, "temporary", "aten.mm_backward")
            gradients.append(writer.take(weight, "gradients", "aten.mm"))
            writer.give_back(block, flow)
        writer.give_back(*loss)
        if not state:
            state = [writer.take(2 * weight, "optimizer", "aten._foreach_add") for _ in range(layers)]
        writer.give_back(*gradients)
    del batch
    return writer.trace(size, starts, gemm_calls=12, backward_gemm_calls=24, **facts)


def convolution(size: int, event: int, **changes: Any) -> ConvCall:
    """A 3×3 convolution of 64 channels over 56×56 pixels."""
    fields: dict[str, Any] = {
        "direction": "forward", "input": (size, 64, 56, 56), "weight": (64, 64, 3, 3), "output": (size, 64, 56, 56),
        "dtype": "bfloat16", "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1,
        "transposed": False, "channels_last": False, "event": event,
    }  # fmt: skip
    return ConvCall(**{**fields, **changes})


class TracedByHand(Workload):
    """A workload that is never run: its traces are `training_trace`, with whatever is given here."""

    mode = "train"
    device = torch.device("cpu")

    def __init__(self, *, smallest: int = 1, largest: int | None = None, **trace: Any) -> None:
        self.traced: list[tuple[int, Target | None]] = []
        self._smallest, self._largest, self._trace = smallest, largest, trace

    def make_batch(self, size: int) -> Any:
        raise AssertionError("never made")

    def step(self, batch: Any) -> Any:
        raise AssertionError("never run")

    def smallest_size(self) -> int:
        return self._smallest

    def largest_size(self) -> int | None:
        return self._largest

    def trace(self, workload: Workload, size: int, target: Target | None) -> Trace:
        assert workload is self
        self.traced.append((size, target))
        return training_trace(size, **self._trace)
