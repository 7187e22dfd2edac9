"""One window, micro-batch by micro-batch: gradients add up to those of the single big batch, whatever fits at once.

After an out-of-memory error the random generators and buffers are put back, the gradients dropped, and the whole window
runs again in smaller micro-batches: nothing is skipped, nothing counts twice. Nothing here talks to other ranks, so a
rank does this alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from brim.errors import BrimError, DoesNotFitError, LostError
from brim.memory.devices import DeviceMemory, MemoryReading
from brim.memory.failures import Failure, FailureKind, classify, memory_remedies
from brim.records import Probe
from brim.running.retries import wait
from brim.settings.caller import named
from brim.sizing.micro_batches import MicroBatchSizer
from brim.training.listener import say_nothing
from brim.training.objective import Batch, LossSum, Objective
from brim.training.rewind import Rewinder

__all__ = ["MicroBatches", "Part", "WindowDone", "WindowWork", "measured"]

FIRST_WAIT_SECONDS = 1.0  # for other processes to give memory back; then as long as all waits before
MOST_WAIT_SECONDS = 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowWork:
    """One rank's share of a window."""

    items: Sequence[int]  # the dearest first
    costs: Sequence[int]
    samples: int  # of all ranks: what every sum is divided by
    fetch: Callable[[Sequence[int]], Batch]  # on the host, or on the way to the device already
    measure_noise: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """One micro-batch that ran."""

    items: Sequence[int]
    total: torch.Tensor  # the sum of its losses, on the device


@dataclasses.dataclass(kw_only=True)
class WindowDone:
    """What a window's gradients were made of; sums stay on the device until somebody reads them."""

    parts: list[Part] = dataclasses.field(default_factory=list)
    weight: torch.Tensor | float = 0.0  # of this rank's share: samples or tokens
    small_square: torch.Tensor | None = None  # |gradient|² of the first micro-batch's mean loss
    small_weight: torch.Tensor | float = 0.0

    @property
    def total(self) -> torch.Tensor | float:
        """The sum of the losses of this rank's share."""
        return sum((part.total for part in self.parts), start=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RanOut:
    """A micro-batch that did not fit."""

    length: int
    cost: int
    failure: Failure
    error: Exception


class MicroBatches:
    """Runs windows on one device."""

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: Objective,
        memory: DeviceMemory,
        sizes: MicroBatchSizer,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        resident: Callable[[], Sequence[torch.Tensor]] = tuple,
        reserve: Callable[[], int] = int,
        metered: bool = True,
        fail_on_oom: bool = False,
        together: int = 1,
        remedies: Callable[[int], list[str]] = lambda length: memory_remedies((), batch_size=length),
        tell: Callable[[str], None] = say_nothing,
    ) -> None:
        self.model = model
        self.remedies = remedies  # what to propose where so many samples do not fit
        self.objective = objective
        self.sizes = sizes
        self.rewinder = Rewinder(model)
        self.peak = MemoryReading()
        self._memory = memory
        self._device = memory.device
        self._dtype, self._autocast = dtype, autocast
        self._scaler = scaler
        self._resident = resident
        self._reserve = reserve  # bytes of what does not exist yet, and will
        self._metered = metered
        self._fail_on_oom = fail_on_oom
        self._together = together  # ranks that run every forward in step, and whose gradients the model averages
        self._tell = tell
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._watching = False
        self._doubted = False  # an error that may or may not be memory was survived once
        self._waited_seconds = 0.0  # for other processes, in this window

    def run(self, work: WindowWork) -> WindowDone:
        """The gradients of this rank's share, in `.grad`: the sum of its losses over `work.samples`."""
        self.rewinder.mark()
        live = self.sizes.live
        if live.disturbed and live.return_after_others(self._memory.left_by_others_bytes()):
            self._tell("other processes have given memory back: micro-batches are as large as before again")
        self.sizes.begin_window(work.costs[0] if work.costs else 1)
        while True:
            self.drop_gradients()
            outcome = self._attempt(work)
            if isinstance(outcome, WindowDone):
                self.sizes.end_window()
                self._doubted = False
                self._waited_seconds = 0.0
                return outcome
            left = self._memory.left_by_others_bytes()
            # The except block has ended: nothing pins the failed micro-batch's tensors any more.
            self.rewinder.rewind()
            self.drop_gradients()
            self._memory.release()
            self._after_failure(outcome, left)

    def stepped(self, retries: int) -> None:
        """A whole step is done, with so many retries of the allocator."""
        if self.sizes.stepped(retries, self._memory.left_by_others_bytes() if retries else None):
            self._give_back_cache()

    @property
    def device(self) -> torch.device:
        """Where windows run."""
        return self._device

    def drop_gradients(self) -> None:
        """No gradient at all, as before the first backward."""
        for parameter in self._trainable:
            parameter.grad = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[MemoryReading | None]:
        """Measure what runs inside, under the memory limit if there is one; peaks of the run are kept.

        Inside another such block only the outer one counts, unless the meter is what holds the limit.
        """
        if not self._metered or self._watching:
            yield None
            return
        self._watching = not self._memory.meter_slows
        try:
            with self._memory.metered(self._resident()) as reading:
                yield reading
        finally:
            self._watching = False
        self.peak.peak_allocated_bytes = max(self.peak.peak_allocated_bytes, reading.peak_allocated_bytes)
        self.peak.peak_reserved_bytes = max(self.peak.peak_reserved_bytes, reading.peak_reserved_bytes)
        self.peak.alloc_retries += reading.alloc_retries

    def watched_step(self) -> contextlib.AbstractContextManager[object]:
        """Around a whole step, once the size is settled: one reading is enough, and reading takes a while."""
        whole = self.sizes.settled and not self._memory.meter_slows
        return self.watched() if whole else contextlib.nullcontext()

    def _attempt(self, work: WindowWork) -> WindowDone | _RanOut:
        """Run the share once; a micro-batch that does not fit ends it."""
        done = WindowDone()
        start = length = 0
        ran_out: _RanOut | None = None
        try:
            while start < len(work.items):
                length = self.sizes.next_length(len(work.items) - start, work.costs[start])
                if work.measure_noise and start == 0 and length == len(work.items) >= 2 * self.sizes.request.smallest:
                    length = (length + 1) // 2
                self._run_part(work, start, length, done)
                start += length
        except Exception as error:
            ran_out = self._told_apart(error, length, length * work.costs[start])
        return ran_out if ran_out is not None else done

    def _run_part(self, work: WindowWork, start: int, length: int, done: WindowDone) -> None:
        items = work.items[start : start + length]
        seconds: float | None = None
        settled = self.sizes.settled
        if self.sizes.new:
            self._give_back_cache()  # first: a batch in the midst of a cached block would keep all of it
        fetched = [work.fetch(items)]
        self.sizes.absent_bytes = 0 if settled else self._reserve()
        if not settled:
            self._wait()
        started = time.perf_counter()
        with self.watched() as reading:
            # Taken out, so that what is converted does not outlive its conversion.
            loss = self._backward(fetched.pop().to(self._device, self._dtype), work.samples)
        if not settled:
            self._wait()
            seconds = time.perf_counter() - started
        done.parts.append(Part(items, loss.total))
        done.weight = done.weight + loss.weight
        if start == 0 and work.measure_noise:
            done.small_square = self._gradient_square(work.samples, loss.weight)
            done.small_weight = loss.weight
        retried = reading is not None and reading.alloc_retries > 0
        left = self._memory.left_by_others_bytes() if retried else None
        self.sizes.record(measured(length, length * work.costs[start], seconds, reading), left)
        if not settled and self.sizes.settled:
            self._give_back_cache()

    def _give_back_cache(self) -> None:
        """Blocks that were cut for another size are in the way of this one, and would be taken for its own."""
        if not self._memory.meter_slows:
            self._memory.release(thorough=False)

    def _backward(self, batch: Batch, samples: int) -> LossSum:
        """Forward and backward of the sum over the window's samples; the sum without its graph comes back."""
        autocast = self._autocast is not None
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=autocast):
            loss = self.objective.loss(self.model, batch)
        share = loss.total * (self._together / samples)
        torch.autograd.backward(share if self._scaler is None else self._scaler.scale(share))
        weight = loss.weight.detach() if isinstance(loss.weight, torch.Tensor) else loss.weight
        return LossSum(loss.total.detach(), weight)

    def _gradient_square(self, samples: int, weight: torch.Tensor | float) -> torch.Tensor:
        """|g|² of the mean loss of what has been accumulated so far, which is the first micro-batch."""
        square = gradient_square(self._trainable)
        if self._scaler is not None:
            square = square / self._scaler.get_scale() ** 2
        return square * (samples / weight) ** 2

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def _told_apart(self, error: Exception, length: int, cost: int) -> _RanOut:
        """What is to be survived; everything else is raised as it is."""
        if isinstance(error, BrimError):
            raise error
        failure = classify(error)
        if failure.kind is FailureKind.FATAL:
            raise LostError(
                f"{failure.reason}; the device cannot be used again by this process. The last checkpoint is "
                f"kept: continue with {named('resume')}"
            ) from error
        if self._together > 1 and failure.kind is not FailureKind.OTHER:
            raise LostError(
                f"{failure.reason}, with a micro-batch of {length} of a sharded model: the other ranks wait inside its "
                f"forward and cannot be notified. Give a smaller {named('batch_size')} and continue from the last "
                f"checkpoint with {named('resume')}"
            ) from error
        if failure.kind is FailureKind.OTHER or (failure.kind is FailureKind.AMBIGUOUS and self._doubted):
            raise error
        return _RanOut(length=length, cost=cost, failure=failure, error=error.with_traceback(None))

    def _after_failure(self, ran_out: _RanOut, left_bytes: int | None) -> None:
        """Smaller from here on, or the end: fail as asked, or because nothing smaller is left."""
        length, failure = ran_out.length, ran_out.failure
        self._doubted = failure.kind is FailureKind.AMBIGUOUS
        if self._fail_on_oom and not self._doubted:
            raise DoesNotFitError(f"a micro-batch of {length} does not fit: {failure.reason} ({named('fail_on_oom')})")
        if self.sizes.hopeless(length):
            if self._doubted:
                raise ran_out.error
            if self.sizes.live.evidence.others_hold(left_bytes) and self._waited_seconds < MOST_WAIT_SECONDS:
                self._wait_for_others(length)
                return
            remedies = "\n  - ".join(self.remedies(length))
            raise DoesNotFitError(
                f"not even a micro-batch of {length} fits ({failure.reason}).\nWhat may help:\n  - {remedies}"
            )
        failed = Probe(batch_size=length, cost=ran_out.cost, verdict="oom", detail=failure.reason)
        self.sizes.record(failed, left_bytes)
        self._tell(f"a micro-batch of {length} failed ({failure.reason}): its window runs again in smaller ones")

    def _wait_for_others(self, length: int) -> None:
        """Nothing smaller is left, and other processes hold the memory: the window runs again in a while."""
        seconds = min(max(self._waited_seconds, FIRST_WAIT_SECONDS), MOST_WAIT_SECONDS - self._waited_seconds)
        self.sizes.oom_events += 1
        self._tell(f"not even a micro-batch of {length} fits while others hold the memory: again in {seconds:g} s")
        wait(seconds)
        self._waited_seconds += seconds


def gradient_square(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """|g|² over all gradients, on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() if norm.device.type != "mps" else norm for norm in norms]).square().sum()


def measured(length: int, cost: int, seconds: float | None, reading: MemoryReading | None) -> Probe:
    """The record of a micro-batch that ran."""
    if reading is None:
        return Probe(batch_size=length, cost=cost, verdict="fits", step_seconds=seconds)
    return Probe(
        batch_size=length,
        cost=cost,
        verdict="thrashes" if reading.alloc_retries else "fits",
        peak_allocated_bytes=reading.peak_allocated_bytes,
        peak_reserved_bytes=reading.peak_reserved_bytes,
        alloc_retries=reading.alloc_retries,
        step_seconds=seconds,
    )
