"""Time on the device: how long it was idle between batches, how long a batch took, and each of its stages.

The stages are vision, prefill and decode. On CUDA the marks are events in the stream, so that nothing waits for them.
Hooks on the model set them, whoever generates: the first forward of a batch is its prefill, what follows is decode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

__all__ = ["DeviceTimeline", "IdleClock", "StageClock", "StageTimes"]


class DeviceTimeline:
    """On CUDA a mark is an event in the stream, so that nothing waits for it; elsewhere it is the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """Here, behind everything that the device has been given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Any) -> bool:
        """Whether the device has come as far as this."""
        return not self._cuda or bool(mark.query())

    def seconds(self, first: Any, second: Any) -> float:
        """From one mark to a later one; waits for the later."""
        if not self._cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000.0


class IdleClock:
    """Marks where batches begin and end on the device's own timeline.

    On CUDA a gap between the end of one batch and the begin of the next is time in which the device had nothing to do.
    Elsewhere work is done when it is called, and the gaps are the host's own. Marks are dropped once they are read: a
    pool makes some at every few steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._timeline = DeviceTimeline(device)
        self._first: Any = None  # where the first batch began
        self._begun: Any = None
        self._ended: Any = None
        self._gaps: deque[tuple[Any, Any]] = deque()  # between two batches, not read yet
        self._idle_seconds = 0.0
        self._batches = 0

    def begin(self) -> None:
        """A batch starts here."""
        self._begun = self._timeline.mark()

    def end(self) -> Callable[[], float]:
        """The whole batch has been queued; returns a function that waits for it and returns its seconds."""
        begun, ended = self._begun, self._timeline.mark()
        if self._batches == 0:
            self._first = begun
        else:
            self._gaps.append((self._ended, begun))
        self._ended = ended
        self._batches += 1
        while self._gaps and self._timeline.reached(self._gaps[0][1]):
            self._read_gap()
        return lambda: self._timeline.seconds(begun, ended)

    def wait_fraction(self) -> float | None:
        """Idle time between batches over the whole time from the first to the last; None before two batches."""
        if self._batches < 2:
            return None
        while self._gaps:
            self._read_gap()
        whole = self._timeline.seconds(self._first, self._ended)
        return min(self._idle_seconds / whole, 1.0) if whole > 0 else None

    def _read_gap(self) -> None:
        self._idle_seconds += max(self._timeline.seconds(*self._gaps.popleft()), 0.0)


_SEES = "get_image_features"  # where transformers' models turn pixels into what the decoder reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One batch, in milliseconds; a stage is None where the model has no such thing."""

    batch_size: int
    settled: bool  # whether the run's size was found by then
    total_ms: float
    vision_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


@dataclasses.dataclass(kw_only=True)
class _Marks:
    batch_size: int
    settled: bool
    begin: Any
    end: Any = None
    read: Any = None  # the prompts have been read
    saw: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


class StageClock:
    """Times the batches of one model while it is open.

    with StageClock(device, model) as clock:
        with clock.batch(32): …launch…
    clock.times()
    """

    def __init__(self, device: torch.device, module: Any, *, generates: bool) -> None:
        self._timeline = DeviceTimeline(device)
        self._module = module if isinstance(module, nn.Module) and generates else None
        self._marks: list[_Marks] = []
        self._open: _Marks | None = None
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        if self._module is not None:
            self._undo.append(self._module.register_forward_hook(self._has_read).remove)
            seer = _innermost_seer(self._module)
            if seer is not None:
                self._watch(seer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    @contextlib.contextmanager
    def batch(self, batch_size: int, *, settled: bool = True) -> Iterator[None]:
        """What runs inside is one batch; one that fails is not counted."""
        self._open = _Marks(batch_size=batch_size, settled=settled, begin=self._timeline.mark())
        try:
            yield
            self._open.end = self._timeline.mark()
            self._marks.append(self._open)
        finally:
            self._open = None

    def times(self) -> list[StageTimes]:
        """Every batch so far; waits for the device."""
        return [self._times(marks) for marks in self._marks]

    def _times(self, marks: _Marks) -> StageTimes:
        vision = sum(self._between(first, last) for first, last in marks.saw) if marks.saw else None
        prefill = decode = None
        if marks.read is not None:
            prefill = max(self._between(marks.begin, marks.read) - (vision or 0.0), 0.0)
            decode = self._between(marks.read, marks.end)
        return StageTimes(
            batch_size=marks.batch_size,
            settled=marks.settled,
            total_ms=self._between(marks.begin, marks.end),
            vision_ms=vision,
            prefill_ms=prefill,
            decode_ms=decode,
        )

    def _has_read(self, *_: Any) -> None:
        """After a forward: the first of a batch has read the prompts. Later ones may be inside a graph's capture."""
        if self._open is not None and self._open.read is None:
            self._open.read = self._timeline.mark()

    def _watch(self, seer: nn.Module) -> None:
        see = getattr(seer, _SEES)

        def watched(*arguments: Any, **named: Any) -> Any:
            if self._open is None or self._open.read is not None:
                return see(*arguments, **named)
            begin = self._timeline.mark()
            result = see(*arguments, **named)
            self._open.saw.append((begin, self._timeline.mark()))
            return result

        setattr(seer, _SEES, watched)
        self._undo.append(lambda: delattr(seer, _SEES))

    def _between(self, first: Any, second: Any) -> float:
        return 1000.0 * self._timeline.seconds(first, second)


def _innermost_seer(module: nn.Module) -> nn.Module | None:
    """The last module that has the method: those around it only pass the call on."""
    seers = [child for child in module.modules() if callable(getattr(child, _SEES, None))]
    return seers[-1] if seers else None
