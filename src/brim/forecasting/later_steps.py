"""The second step of one size from that of another: the same operations, so the same requests but for their bytes.

The first step of a size says how many bytes every operation asks for; a second step repeats most of them, and which it
does not (an optimizer's state, keys and values that are kept) is seen at the size that was traced in full. So a further
size needs one step, not two. Where the steps do not match request for request, nothing is concluded.

Pure Python: no torch, no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from brim.forecasting.events import ConvCall, Event, ReductionCall, Trace

__all__ = ["repeats_its_first_step", "with_second_step"]

_Call = TypeVar("_Call", ConvCall, ReductionCall)


def repeats_its_first_step(trace: Trace) -> bool:
    """Whether every request of the second step is one of the first, in order; only then is it worth a try."""
    return len(trace.step_starts) == 2 and trace.approximate is None and _repeated(trace) is not None


def with_second_step(first_step: Trace, whole: Trace) -> Trace | None:
    """The trace of two steps at the size of `first_step`, which has one; `whole` has two at another size.

    None where their first steps ask for something else than other bytes. What is given back, and when, is taken from
    `whole`: of several tensors that go at once, the order is not always the same.
    """
    start = whole.step_starts[1]
    repeated = _repeated(whole)
    taken, pattern = _requests(first_step.events), _requests(whole.events[:start])
    if repeated is None or [(one.op, one.pool) for one in taken] != [(one.op, one.pool) for one in pattern]:
        return None
    bytes_of = {event.block: other.bytes for event, other in zip(pattern, taken, strict=True)}
    bytes_of.update({block: bytes_of[of] for block, of in repeated.items()})
    convolutions = _calls(first_step.convolutions, whole.convolutions, start)
    reductions = _calls(first_step.reductions, whole.reductions, start)
    if convolutions is None or reductions is None:
        return None
    return dataclasses.replace(
        whole,
        batch_size=first_step.batch_size,
        events=tuple(
            Event(event.kind, event.block, bytes_of[event.block], event.category, event.op, event.pool, event.module)
            for event in whole.events
        ),
        seconds=first_step.seconds,
        attention=first_step.attention,
        convolutions=convolutions,
        reductions=reductions,
        approximate=first_step.approximate,
    )


def _repeated(trace: Trace) -> dict[int, int] | None:
    """For every block that the second step takes, the block of the first that it repeats.

    None unless its requests are those of the first step but for one stretch: all from the start up to somewhere, and
    all from somewhere to the end. What the first step made for good (keys and values in every layer) may be missing
    besides.
    """
    first, second = trace.step_starts
    earlier, later = _requests(trace.events[first:second]), _requests(trace.events[second:])
    given_back = {event.block for event in trace.events if event.kind == "free"}
    passing = [event for event in earlier if event.block in given_back]
    pairs = _paired(earlier, later) or _paired(passing, later)
    return None if pairs is None else {one.block: other.block for one, other in pairs}


def _paired(earlier: Sequence[Event], later: Sequence[Event]) -> list[tuple[Event, Event]] | None:
    """Every request of a later step beside the one that it repeats."""
    same = 0
    while same < min(len(earlier), len(later)) and _same_request(earlier[same], later[same]):
        same += 1
    rest = len(later) - same
    if len(earlier) < len(later):
        return None
    pairs = [
        *zip(later[:same], earlier[:same], strict=True),
        *zip(later[same:], earlier[len(earlier) - rest :], strict=True),
    ]
    return pairs if all(_same_request(one, other) for one, other in pairs[same:]) else None


def _requests(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == "alloc"]


def _same_request(one: Event, other: Event) -> bool:
    return one.bytes == other.bytes and one.op == other.op and one.pool == other.pool


def _calls(first_step: Sequence[_Call], whole: Sequence[_Call], start: int) -> tuple[_Call, ...] | None:
    """The calls of two steps at the size of the first; None where the second does not begin as the first does."""
    once: list[Any] = [call for call in whole if call.event < start]
    again: list[Any] = [call for call in whole if call.event >= start]
    if len(first_step) != len(once):
        return None
    begun = once[: len(again)]
    if [dataclasses.replace(call, event=0) for call in begun] != [dataclasses.replace(call, event=0) for call in again]:
        return None
    calls: list[Any] = [*first_step, *first_step[: len(again)]]
    return tuple(dataclasses.replace(call, event=at.event) for call, at in zip(calls, [*once, *again], strict=True))
