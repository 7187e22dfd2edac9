"""One window, micro-batch by micro-batch: gradients add up to those of the single big batch, whatever fits at once.

After an out-of-memory error the random generators and buffers are put back, the gradients dropped, and the whole window
runs again in smaller micro-batches: no sample is skipped, none counts twice. Other ranks are not involved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from brim.errors import BrimError, DoesNotFitError, LostError
from brim.memory.device_waits import DeviceWaits
from brim.memory.devices import DeviceMemory, MemoryReading
from brim.memory.failures import Failure, FailureKind, classify, memory_remedies
from brim.memory.snapshot import StateSnapshot
from brim.models.placement import Precision
from brim.records import Probe
from brim.running.retries import wait
from brim.settings.caller import named
from brim.sizing.micro_batches import MicroBatchSizer
from brim.training.listener import ignore_note
from brim.training.objective import Batch, LossSum, Objective

__all__ = ["FailedMicroBatch", "MicroBatch", "MicroBatches", "Rewinder", "WindowDone", "WindowWork", "measured"]

FLOAT32 = Precision(weights=torch.float32)
FIRST_WAIT_SECONDS = 1.0  # for other processes to give memory back; then as long as all waits before
MOST_WAIT_SECONDS = 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowWork:
    """One rank's share of a window."""

    items: Sequence[int]  # the costliest first
    costs: Sequence[int]
    samples: int  # of all ranks: what every sum is divided by
    fetch: Callable[[Sequence[int]], Batch]  # on the host, or on the way to the device already
    measure_noise: bool = False


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One micro-batch that ran."""

    items: Sequence[int]
    total: torch.Tensor  # the sum of its losses, on the device


@dataclasses.dataclass(kw_only=True)
class WindowDone:
    """What a window's gradients were made of; sums stay on the device until somebody reads them."""

    parts: list[MicroBatch] = dataclasses.field(default_factory=list)
    weight: torch.Tensor | float = 0.0  # of this rank's share: samples or tokens
    small_square: torch.Tensor | None = None  # |gradient|² of the first micro-batch's mean loss
    small_weight: torch.Tensor | float = 0.0

    @property
    def total(self) -> torch.Tensor | float:
        """The sum of the losses of this rank's share."""
        return sum((part.total for part in self.parts), start=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedMicroBatch:
    """A micro-batch that did not fit."""

    length: int
    cost: int
    failure: Failure
    error: Exception


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPass:
    """Forward and backward of one micro-batch: of which model, for which objective, in which precision."""

    model: nn.Module
    objective: Objective
    device: torch.device
    precision: Precision = FLOAT32
    scaler: torch.amp.GradScaler | None = None
    further: Callable[[], Sequence[torch.Tensor]] = tuple  # weights that are trained, perhaps not the model's
    averaging_ranks: int = 1  # ranks that run every forward together, and over which the model averages gradients

    def backward(self, batch: Batch, samples: int) -> LossSum:
        """Add the gradients of the losses' sum over `samples` to `.grad`; gives the sum without its graph."""
        autocast = self.precision.autocast  # None: as the caller has it
        with contextlib.nullcontext() if autocast is None else torch.autocast(self.device.type, dtype=autocast):
            loss = self.objective.loss(self.model, batch)
        share = loss.total * (self.averaging_ranks / samples)
        torch.autograd.backward(share if self.scaler is None else self.scaler.scale(share))
        weight = loss.weight.detach() if isinstance(loss.weight, torch.Tensor) else loss.weight
        return LossSum(loss.total.detach(), weight)

    def square(self, samples: int, weight: torch.Tensor | float) -> torch.Tensor:
        """|g|² of the mean loss of what has been accumulated so far, whose weight is given."""
        square = gradient_square(self.trainable())
        if self.scaler is not None:
            square = square / self.scaler.get_scale() ** 2
        return square * (samples / weight) ** 2

    def trainable(self) -> list[torch.Tensor]:
        """The parameters that have gradients."""
        own = (parameter for module in _modules_of(self.model) for parameter in module._parameters.values())
        every = {id(parameter): parameter for parameter in (*own, *self.further()) if parameter is not None}
        return [parameter for parameter in every.values() if parameter.requires_grad]


class PeakMeter:
    """Measures the memory that training uses on one device, keeps the peaks of the run; a no-op if not `enabled`."""

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        resident: Callable[[], Sequence[torch.Tensor]] = tuple,
        absent_bytes: Callable[[], int] = int,
        enabled: bool = True,
    ) -> None:
        self.memory = memory
        self.absent_bytes = absent_bytes  # of what does not exist yet, and will: optimizer state before its first step
        self.peak = MemoryReading()
        self._resident = resident  # what is in memory whatever the micro-batch
        self._enabled = enabled
        self._watching = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[MemoryReading | None]:
        """Measure what runs inside, under the memory limit if there is one.

        Inside another such block only the outer one counts, unless the meter is what holds the limit.
        """
        if not self._enabled or self._watching:
            yield None
            return
        self._watching = not self.memory.meter_slows
        try:
            with self.memory.metered(self._resident()) as reading:
                yield reading
        finally:
            self._watching = False
        self.peak.peak_allocated_bytes = max(self.peak.peak_allocated_bytes, reading.peak_allocated_bytes)
        self.peak.peak_reserved_bytes = max(self.peak.peak_reserved_bytes, reading.peak_reserved_bytes)
        self.peak.alloc_retries += reading.alloc_retries

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        device = self.memory.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    def release_cache(self) -> None:
        """Give back blocks that were cut for another size: they would be counted as those of this one."""
        if not self.memory.meter_slows:
            self.memory.release(thorough=False)


class MicroBatches:
    """Runs windows on one device."""

    def __init__(
        self,
        gradients: GradientPass,
        sizes: MicroBatchSizer,
        meter: PeakMeter,
        *,
        fail_on_oom: bool = False,
        remedies: Callable[[int], list[str]] = lambda length: memory_remedies((), batch_size=length),
        note: Callable[[str], None] = ignore_note,
        waits: DeviceWaits | None = None,
    ) -> None:
        self.gradients = gradients
        self.sizes = sizes
        self.meter = meter
        self.waits = waits or DeviceWaits()
        self.remedies = remedies  # what to propose where so many samples do not fit
        self.rewinder = Rewinder(gradients.model)
        self.begun = False  # whether there is a mark to go back to, for whoever resets it
        self._memory = meter.memory
        self._fail_on_oom = fail_on_oom
        self._note = note
        self._trainable: list[torch.Tensor] = []  # those of this window: layers may be frozen, or replaced, in a run
        self._ambiguous = False  # an error that may or may not be memory was survived once
        self._waited_seconds = 0.0  # for other processes, in this window

    def run(self, work: WindowWork) -> WindowDone:
        """The gradients of this rank's share, in `.grad`: the sum of its losses over `work.samples`."""
        self.begin(work.costs[0] if work.costs else 1)
        while True:
            self.drop_gradients()
            with self.waits.cause("other" if self.sizes.settled else "search"):
                outcome = self._attempt(work)
            if isinstance(outcome, WindowDone):
                self.end()
                return outcome
            left = self._memory.left_by_others_bytes()
            # The except block has ended: nothing pins the failed micro-batch's tensors any more.
            self.rewinder.rewind()
            self.drop_gradients()
            self._memory.release()
            self._after_failure(outcome, left)

    def begin(self, costliest: int = 1) -> None:
        """A window begins, from where it is redone after a failure."""
        self._trainable = self.gradients.trainable()
        self.rewinder.mark()
        self.begun = True
        live = self.sizes.live
        if live.disturbed and live.return_after_others(self._memory.left_by_others_bytes()):
            self._note("other processes have given memory back: micro-batches are as large as before again")
        self.sizes.begin_window(costliest)

    def end(self) -> None:
        """The window is done."""
        self.sizes.end_window()
        self._ambiguous = False
        self._waited_seconds = 0.0

    def stepped(self, retries: int) -> None:
        """A whole step is done, with so many retries of the allocator."""
        if self.sizes.stepped(retries, self._memory.left_by_others_bytes() if retries else None):
            self.meter.release_cache()

    def drop_gradients(self) -> None:
        """No gradient at all, as before the first backward."""
        for parameter in self._trainable:
            parameter.grad = None

    def watched_step(self) -> contextlib.AbstractContextManager[object]:
        """Around a whole step, once the size is settled: one reading is enough, and reading takes a while."""
        whole = self.sizes.settled and not self._memory.meter_slows
        return self.meter.watched() if whole else contextlib.nullcontext()

    def _attempt(self, work: WindowWork) -> WindowDone | FailedMicroBatch:
        """Run the share once; a micro-batch that does not fit ends it."""
        done = WindowDone()
        start = length = 0
        failed: FailedMicroBatch | None = None
        try:
            while start < len(work.items):
                length = self.sizes.next_length(len(work.items) - start, work.costs[start])
                if work.measure_noise and start == 0 and length == len(work.items) >= 2 * self.sizes.request.smallest:
                    length = (length + 1) // 2
                self._run_part(work, start, length, done)
                start += length
        except Exception as error:
            failed = self._classified(error, length, length * work.costs[start])
        return failed if failed is not None else done

    def _run_part(self, work: WindowWork, start: int, length: int, done: WindowDone) -> None:
        items, dtype = work.items[start : start + length], self.gradients.precision.weights
        seconds: float | None = None
        settled = self.sizes.settled
        if self.sizes.new:
            self.meter.release_cache()  # first: a batch in the midst of a cached block would keep all of it
        with self.waits.cause("loading"):
            fetched = [work.fetch(items)]
        self.sizes.absent_bytes = 0 if settled else self.meter.absent_bytes()
        if not settled:
            self.meter.synchronize()
        started = time.perf_counter()
        with self.meter.watched() as reading, self.waits.busy():
            # Taken out, so that what is converted does not outlive its conversion.
            loss = self.gradients.backward(fetched.pop().to(self.gradients.device, dtype), work.samples)
        if not settled:
            self.meter.synchronize()
            seconds = time.perf_counter() - started
        done.parts.append(MicroBatch(items, loss.total))
        done.weight = done.weight + loss.weight
        if start == 0 and work.measure_noise:
            done.small_square = self.gradients.square(work.samples, loss.weight)
            done.small_weight = loss.weight
        retried = reading is not None and reading.alloc_retries > 0
        left = self._memory.left_by_others_bytes() if retried else None
        self.sizes.record(measured(length, length * work.costs[start], seconds, reading), left)
        if not settled and self.sizes.settled:
            self.meter.release_cache()

    def _classified(self, error: Exception, length: int, cost: int) -> FailedMicroBatch:
        """A failure after which smaller micro-batches may fit; every other error is raised as it is."""
        if isinstance(error, BrimError):
            raise error
        failure = classify(error)
        if failure.kind is FailureKind.FATAL:
            raise LostError(
                f"{failure.reason}; the device cannot be used again by this process. The last checkpoint is kept: "
                f"continue with {named('resume')}"
            ) from error
        if self.gradients.averaging_ranks > 1 and failure.kind is not FailureKind.OTHER:
            raise LostError(
                f"{failure.reason}, with a micro-batch of {length} of a sharded model: the other ranks wait inside its "
                f"forward. Give a smaller {named('batch_size')} and continue from the last checkpoint with "
                f"{named('resume')}"
            ) from error
        if failure.kind is FailureKind.OTHER or (failure.kind is FailureKind.AMBIGUOUS and self._ambiguous):
            raise error
        return FailedMicroBatch(length=length, cost=cost, failure=failure, error=error.with_traceback(None))

    def _after_failure(self, failed: FailedMicroBatch, left_bytes: int | None) -> None:
        """Smaller from here on, or the end: fail as asked, or because nothing smaller is left."""
        length, failure = failed.length, failed.failure
        self._ambiguous = failure.kind is FailureKind.AMBIGUOUS
        if self._fail_on_oom and not self._ambiguous:
            raise DoesNotFitError(f"a micro-batch of {length} does not fit: {failure.reason} ({named('fail_on_oom')})")
        if self.sizes.hopeless(length, failed.cost):
            if self._ambiguous:
                raise failed.error
            if self.sizes.live.evidence.others_hold(left_bytes) and self._waited_seconds < MOST_WAIT_SECONDS:
                self._wait_for_others(length)
                return
            remedies = "\n  - ".join(self.remedies(length))
            raise DoesNotFitError(
                f"not even a micro-batch of {length} fits ({failure.reason}).\nWhat may help:\n  - {remedies}"
            )
        probe = Probe(batch_size=length, cost=failed.cost, verdict="oom", detail=failure.reason)
        self.sizes.record(probe, left_bytes)
        self._note(f"a micro-batch of {length} failed ({failure.reason}): its window runs again in smaller ones")

    def _wait_for_others(self, length: int) -> None:
        """Nothing smaller is left, and other processes hold the memory: the window runs again in a while."""
        seconds = min(max(self._waited_seconds, FIRST_WAIT_SECONDS), MOST_WAIT_SECONDS - self._waited_seconds)
        self.sizes.oom_events += 1
        self._note(f"not even a micro-batch of {length} fits while others hold the memory: again in {seconds:g} s")
        wait(seconds)
        self._waited_seconds += seconds


def gradient_square(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
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


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()` without making their names, which takes five times as long: every window asks."""
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


_NORMALISATION = nn.modules.batchnorm._NormBase


class Rewinder:
    """Marks a moment, and goes back to it as often as asked.

    rewinder.mark()
    ...                  # forwards and backwards, perhaps cut short
    rewinder.rewind()    # as at the mark

    Modules and buffers may come and go: those that the model has at a mark are the ones that it has after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str]] = []
        self._moving: set[int] = set()
        self._compared = False
        self._versions: list[int] = []
        self._held: list[torch.Tensor | None] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._rng: StateSnapshot | None = None

    def mark(self) -> None:
        """Remember the present moment."""
        places = self._present()
        first = places != self._places
        if first:
            self._places, self._compared = places, False
            self._moving = {place for place, (module, _) in enumerate(places) if isinstance(module, _NORMALISATION)}
        else:
            self._moving |= self._changed()
        self._rng = StateSnapshot.take()  # of nothing but the random generators
        self._held = self._buffers()
        self._versions = [_version(buffer) for buffer in self._held]
        kept = range(len(self._held)) if first else sorted(self._moving)
        held = [(place, self._held[place]) for place in kept]
        self._copies = {place: buffer.detach().clone() for place, buffer in held if buffer is not None}

    def rewind(self) -> None:
        """Back to the mark: the same objects in their places, with the bytes that they had."""
        assert self._rng is not None, "rewind() before mark()"
        for module, name in set(self._present()) - set(self._places):
            del module._buffers[name]
        with torch.no_grad():
            for (module, name), held in zip(self._places, self._held, strict=True):
                module._buffers[name] = held
            for place, copy in self._copies.items():
                held = self._held[place]
                assert held is not None
                held.copy_(copy)
        self._rng.restore()

    def moving(self) -> list[int]:
        """The places of buffers that some window has been seen to change."""
        self._moving |= self._changed()
        return sorted(self._moving)

    def buffers_at(self, places: Iterable[int]) -> list[torch.Tensor]:
        """The buffers at these places, as they are now."""
        buffers = self._buffers()
        return [buffer for place in places if (buffer := buffers[place]) is not None]

    def _changed(self) -> set[int]:
        """The places of buffers that were written to, or replaced, since the mark."""
        buffers = self._buffers()
        changed = zip(buffers, self._held, self._versions, strict=True)
        found = {
            place for place, (now, held, version) in enumerate(changed) if now is not held or _version(now) != version
        }
        if not self._compared:  # after the first window, when there is a copy of everything
            self._compared = True
            for place, copy in self._copies.items():
                now = buffers[place]
                if now is None or not torch.equal(now, copy):
                    found.add(place)
        return found

    def _present(self) -> list[tuple[nn.Module, str]]:
        return [(module, name) for module in _modules_of(self._model) for name, _ in module._buffers.items()]

    def _buffers(self) -> list[torch.Tensor | None]:
        # TorchScript's modules keep theirs in something with fewer methods than a dictionary.
        return [module._buffers[name] if name in module._buffers else None for module, name in self._places]  # noqa: SIM401


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else buffer._version
