"""One probe: try one size of a workload on its device, and record what happened.

A probe starts from an emptied cache, warms up, and runs several steady steps. It knows nothing of which
size to try next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy

from brim.errors import LostError, RequestError, plural
from brim.memory.collector import heap_set_aside
from brim.memory.devices import DeviceMemory, MemoryReading, as_current, device_name, memory_of, resolve_limit
from brim.memory.environment import environment_facts
from brim.memory.failures import Failure, FailureKind, classify
from brim.memory.snapshot import StateSnapshot, required_bytes
from brim.memory.storage_meter import refuse_compiled
from brim.monitor.host import available_host_bytes
from brim.ranks.unwrap import communication_bytes, without_collectives
from brim.ranks.world import current_world
from brim.records import Probe, Verdict
from brim.settings.caller import named, written
from brim.settings.sizes import format_bytes
from brim.sizing.probing import ProbeContext
from brim.workloads.base import Workload

__all__ = ["DeviceProber", "ProbeSettings", "Prober", "WorkloadError", "raised_by"]

# A size near the limit that falls this far behind a smaller one is short of memory without saying so: cuDNN took
# slower algorithms for want of workspace, or the driver moved pages to system memory.
SLOW_FRACTION = 0.88
NEAR_LIMIT = 0.8
# Below this fraction of the limit nothing can run short: one steady step of a quarter of a second is enough.
SAFE_FRACTION = 0.5
# Steps end early, and sooner than a quarter of a second, once their mean is known to this part of itself: an eighth of
# the tolerance by which sizes are usually distinguished.
KNOWN_WELL_ENOUGH = 0.0025
FEWEST_SPREAD = 4  # timed steps before a spread says anything
LOOK_SECONDS = 0.04  # of steps between two decisions whether to make more
# Bytes on the device that are not the workload's own, as a part of the limit, from which on old garbage is looked for.
UNEXPLAINED_FRACTION = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How a probe is run, and under which limit."""

    memory_limit_bytes: int | None = None
    margin: float | None = None
    timeout_seconds: float | None = None
    warmup_steps: int = 1
    min_steps: int = 3
    max_steps: int = 20
    steady_seconds: float = 0.25  # steps are repeated for about this long


def raised_by(stage: str, error: BaseException) -> str:
    """What the workload's own error says, in words, with the batch size at which it came."""
    return "\n".join([f"{stage} raised {type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class WorkloadError(RequestError):
    """The workload's own code raised in a child process; in this process its exception is raised as it is."""


class Prober(ABC):
    """Tries sizes, here or in a child process; used as a context manager."""

    context: ProbeContext
    stage: str = "the step"  # which part of the workload ran last, for error messages
    state_seconds: float = 0.0  # spent on a copy of what steps change, made and put back, and on clearing the device

    @abstractmethod
    def probe(self, size: int) -> Probe:
        """Try one size; an error of the workload that is not about memory is raised, and other sizes may follow."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DeviceProber(Prober):
    """Probes a workload in this process, under the memory limit while inside the `with` block."""

    def __init__(self, workload: Workload, settings: ProbeSettings, *, preserve_state: bool = True) -> None:
        self.workload = workload
        self.settings = settings
        self.preserve_state = preserve_state
        self.memory: DeviceMemory = memory_of(workload.device)
        self._rates: dict[int, float] = {}
        self._ambiguous_at = math.inf
        self._probing = contextlib.ExitStack()
        self._begun = False
        self._stateless: list[torch.optim.Optimizer] = []  # those without state before the first probe
        self._left_over = False  # whether a step that raised may have left tensors behind
        self._warm_at: float | None = None  # when the steady steps of the probe that runs began

    def __enter__(self) -> Self:
        workload, memory, settings = self.workload, self.memory, self.settings
        if memory.meter_slows:
            refuse_compiled(workload.modules(), *workload.functions())
        limit = resolve_limit(memory, asked_bytes=settings.memory_limit_bytes, margin=settings.margin)
        with self._on_state():
            if self._unexplained_bytes() > UNEXPLAINED_FRACTION * limit.usable_bytes:
                memory.release()
            self._probing.enter_context(heap_set_aside())
        reserved = workload.reserved_bytes()
        if workload.mode == "train" and current_world().size > 1:
            reserved += communication_bytes(workload.modules())
        identity = workload.identity()
        self.context = ProbeContext(
            device=device_name(memory.device),
            mode=workload.mode,
            unit=workload.unit,
            smallest_size=workload.smallest_size(),
            largest_size=workload.largest_size(),
            limit_bytes=max(limit.usable_bytes - reserved, 1),
            base_bytes=memory.resident_bytes(self._resident()),
            reserved_bytes=reserved,
            exact=memory.exact,
            used_by_others_bytes=memory.used_by_others_bytes(),
            notes=tuple(workload.notes),
            savings=tuple(workload.savings),
            identity=None if identity is None else dict(identity),
            environment=environment_facts(memory.device),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._on_state():
            self._probing.close()

    def probe(self, size: int) -> Probe:
        """Try one size; an error that is not about memory or size is the user's own and is raised."""
        reading = MemoryReading()
        failure: Failure | None = None
        result: Probe | None = None
        with self._on_state():
            self._begin()
            if self._left_over:
                self._clean_up(thorough=True)
        self._left_over = True
        self._warm_at = None
        started = time.perf_counter()
        try:
            result = self._attempt(size, reading)
        except RequestError:
            raise
        except Exception as error:
            failure = classify(error)
            if self._is_final(failure, size):
                error.add_note(f"brim: raised while sizes were tried, by {self.stage} at batch size {size}")
                raise
            if failure.kind is FailureKind.FATAL:
                raise LostError(
                    f"batch size {size}: {failure.reason}; the device cannot be used again by this process. "
                    f"Search with {named('isolate')}, which probes in a child process and continues"
                ) from error
        # The except block has ended, so the traceback no longer pins the failed step's tensors.
        ended = time.perf_counter()
        self._clean_up(thorough=result is None)
        if result is None:
            assert failure is not None
            result = self._failed(size, failure, reading)
        warm_at = ended if self._warm_at is None else self._warm_at
        return dataclasses.replace(
            result,
            warm_up_seconds=warm_at - started,
            steady_seconds=ended - warm_at,
            release_seconds=time.perf_counter() - ended,
        )

    @contextlib.contextmanager
    def _on_state(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.state_seconds += time.perf_counter() - started

    def _unexplained_bytes(self) -> int:
        """What is in use on the device beside the workload's own tensors: perhaps garbage that was not found yet."""
        own: dict[int, int] = {}
        for tensor in self._resident():
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
                storage = tensor.untyped_storage()
                own[storage.data_ptr()] = storage.nbytes()
        return self.memory.in_use_bytes() - sum(own.values())

    def _clean_up(self, *, thorough: bool) -> None:
        self._drop_leftovers()
        self.memory.release(thorough=thorough)
        self._left_over = False

    def _begin(self) -> None:
        """Before the first probe: remember the state, leave the other ranks, set the limit; undone at exit."""
        if self._begun:
            return
        self._begun = True
        workload = self.workload
        self._probing.enter_context(as_current(self.memory.device))
        self._stateless = [optimizer for optimizer in workload.optimizers() if not optimizer.state]
        if self.preserve_state:
            state = (workload.modules(), workload.optimizers(), workload.stateful())
            self._check_host_memory(required_bytes(*state))
            self._probing.callback(StateSnapshot.take(*state, devices=[self.memory.device]).restore)
        self._probing.callback(self.memory.release)
        self._probing.callback(self._drop_leftovers)
        self._probing.enter_context(without_collectives(workload.modules()))
        self._probing.enter_context(self.memory.limited(self.context.limit_bytes))
        self._drop_leftovers()
        self.memory.release()

    def _check_host_memory(self, snapshot_bytes: int) -> None:
        free_bytes = available_host_bytes()
        if snapshot_bytes > 0.8 * free_bytes:
            raise RequestError(
                f"keeping a copy of the model and optimizer takes {format_bytes(snapshot_bytes)} of host memory and "
                f"{format_bytes(free_bytes)} are free; search on a copy in a child process "
                f"instead ({named('isolate')})"
            )

    def _attempt(self, size: int, reading: MemoryReading) -> Probe:
        started = time.perf_counter()
        # A meter that is off while steps are timed must see a second step: gradients and optimizer state that the
        # first one leaves are there from then on.
        warmup_steps = self.settings.warmup_steps + (1 if self.memory.meter_slows else 0)
        in_use: list[tuple[int, int]] = []  # bytes after so many steps
        with self._metered(reading):
            self.stage = "make_batch"
            batch = self._make_batch(size)
            self.stage = "the step"
            for done in range(1, warmup_steps + 1):
                self.workload.step(batch)
                in_use.append((done, self.memory.in_use_bytes()))
            if self.memory.meter_slows and in_use[-1][1] > in_use[-2][1]:  # once more: does it rise with every step?
                self.workload.step(batch)
                in_use.append((warmup_steps + 1, self.memory.in_use_bytes()))
            if not self.memory.meter_slows:
                self.memory.timed(_nothing, repeats=1)  # drain the queue
            if self._timed_out(started):
                return self._timeout(size, reading)
        self._warm_at = time.perf_counter()
        steady = MemoryReading()
        with contextlib.nullcontext() if self.memory.meter_slows else self._metered(steady):
            near_limit = reading.peak_reserved_bytes > SAFE_FRACTION * self.context.limit_bytes
            step_seconds, steps = self._time_steps(batch, started, in_use, near_limit=near_limit)
        reading.peak_allocated_bytes = max(reading.peak_allocated_bytes, steady.peak_allocated_bytes)
        reading.peak_reserved_bytes = max(reading.peak_reserved_bytes, steady.peak_reserved_bytes)
        if self._timed_out(started):
            return self._timeout(size, reading)
        probe = self._judge(size, batch, step_seconds, steps, reading, steady.alloc_retries)
        return dataclasses.replace(probe, growth_bytes_per_step=_growth_per_step(in_use))

    def _judge(
        self, size: int, batch: Any, step_seconds: float, steps: int, reading: MemoryReading, retries: int
    ) -> Probe:
        """Fits, unless the allocator retried or the rate fell behind a smaller size for want of memory."""
        verdict: Verdict = "fits"
        detail = ""
        best = max((rate for smaller, rate in self._rates.items() if smaller < size), default=0.0)
        near_limit = reading.peak_reserved_bytes > NEAR_LIMIT * self.context.limit_bytes
        slow_rate = SLOW_FRACTION * best if near_limit and not self.memory.exact else 0.0
        if size / step_seconds < slow_rate:  # look twice before calling it slow
            again, _ = self._time_steps(batch, time.perf_counter(), [], near_limit=True)
            step_seconds = min(step_seconds, again)
        rate = size / step_seconds
        if retries:
            verdict, detail = "thrashes", f"the allocator had to free its cache and retry {plural(retries, 'time')}"
        elif rate < slow_rate:
            verdict = "thrashes"
            detail = f"{rate / best:.2f} of the rate of a smaller size: no memory left for workspaces"
        if verdict == "fits":
            self._rates[size] = rate
        return Probe(
            batch_size=size,
            verdict=verdict,
            peak_allocated_bytes=reading.peak_allocated_bytes,
            peak_reserved_bytes=reading.peak_reserved_bytes,
            alloc_retries=retries,
            step_seconds=step_seconds,
            samples_per_second=rate,
            steps=steps,
            detail=detail,
        )

    def _time_steps(
        self, batch: Any, started: float, in_use: list[tuple[int, int]], *, near_limit: bool
    ) -> tuple[float, int]:
        """Seconds of a steady step, and how many were made: until they are known well enough; near the limit several.

        Where the meter costs no time, `in_use` gets the bytes after the first and after the last; if the first one left
        more than was there before, a second one is made in any case.

        The first one is not counted where others follow: the allocator may still be putting its cache in order near
        the limit, and that is what a size would be blamed for; elsewhere libraries may still be choosing kernels.
        """
        settings = self.settings
        reads_bytes = bool(in_use) and not self.memory.meter_slows
        times = self._timed_each(batch, 1)
        fewest = settings.min_steps - (1 if times[0] >= settings.steady_seconds else 0) if near_limit else 1
        if reads_bytes:
            in_use.append((in_use[-1][0] + 1, self.memory.in_use_bytes()))
            fewest = max(fewest, 2 if in_use[-1][1] > in_use[-2][1] else 1)
        while not self._timed_out(started):
            more = self._further_steps(times, fewest)
            if not more:
                break
            times += self._timed_each(batch, more)
        if reads_bytes and len(times) > 1:
            in_use.append((in_use[-1][0] + len(times) - 1, self.memory.in_use_bytes()))
        counted = times[1:] or times
        return sum(counted) / len(counted), len(times)

    def _further_steps(self, times: Sequence[float], fewest: int) -> int:
        """How many steps to make before deciding again; 0: enough is known."""
        settings = self.settings
        spent, each = sum(times), sum(times) / len(times)
        if len(times) < fewest:
            return fewest - len(times)
        if spent >= settings.steady_seconds or len(times) >= settings.max_steps or _known_well(times[1:]):
            return 0
        until = min(settings.steady_seconds - spent, LOOK_SECONDS)
        return min(max(math.ceil(until / max(each, 1e-6)), 1), settings.max_steps - len(times))

    def _timed_each(self, batch: Any, steps: int) -> list[float]:
        return self.memory.timed_each(lambda: self.workload.step(batch), repeats=steps)

    def _make_batch(self, size: int) -> Any:
        batch = self.workload.make_batch(size)
        length = self.workload.batch_length(batch)
        if length != size:
            raise RequestError(
                f"make_batch({size}) returned a batch of {length}: it must return exactly the size asked for "
                "(if the first tensor's leading dimension is not the batch size, pass batch_length=)"
            )
        return batch

    @contextlib.contextmanager
    def _metered(self, reading: MemoryReading) -> Iterator[None]:
        """Meter a block into `reading`, also when the block raises."""
        inner = MemoryReading()
        try:
            with self.memory.metered(self._resident()) as inner:
                yield
        finally:
            reading.peak_allocated_bytes = inner.peak_allocated_bytes
            reading.peak_reserved_bytes = inner.peak_reserved_bytes
            reading.alloc_retries = inner.alloc_retries

    def _resident(self) -> Iterator[torch.Tensor]:
        for module in self.workload.modules():
            for tensor in (*module.parameters(), *module.buffers()):
                if is_lazy(tensor):  # no bytes yet; the copy of what steps change refuses it by name
                    continue
                yield tensor
                if tensor.grad is not None:
                    yield tensor.grad
        for optimizer in self.workload.optimizers():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _is_final(self, failure: Failure, size: int) -> bool:
        """Whether to raise the original: not about memory, or an ambiguous error that a smaller size repeats."""
        if failure.kind is FailureKind.AMBIGUOUS:
            repeated = size < self._ambiguous_at < math.inf
            self._ambiguous_at = min(self._ambiguous_at, size)
            return repeated or size <= self.context.smallest_size
        return failure.kind is FailureKind.OTHER

    def _failed(self, size: int, failure: Failure, reading: MemoryReading) -> Probe:
        verdict: Verdict = "size_limit" if failure.kind is FailureKind.SIZE_LIMIT else "oom"
        detail, needed = failure.reason, None
        if failure.requested_bytes:
            detail += f" (asked for {format_bytes(failure.requested_bytes)} more)"
            needed = reading.peak_allocated_bytes + failure.requested_bytes
        return Probe(
            batch_size=size,
            verdict=verdict,
            peak_allocated_bytes=reading.peak_allocated_bytes or None,
            peak_reserved_bytes=reading.peak_reserved_bytes or None,
            alloc_retries=reading.alloc_retries,
            needed_bytes=needed,
            detail=detail,
        )

    def _timed_out(self, started: float) -> bool:
        limit = self.settings.timeout_seconds
        return limit is not None and time.perf_counter() - started > limit

    def _timeout(self, size: int, reading: MemoryReading) -> Probe:
        return Probe(
            batch_size=size,
            verdict="timeout",
            peak_allocated_bytes=reading.peak_allocated_bytes or None,
            peak_reserved_bytes=reading.peak_reserved_bytes or None,
            detail=f"took longer than {written('probe_timeout', f'{self.settings.timeout_seconds:g}')} s",
        )

    def _drop_leftovers(self) -> None:
        """Drop what the last step left, so that every probe starts from the same memory, as a run with its size will.

        Optimizer state that the first step of a run makes lands among that step's cached activations. Kept from an
        earlier probe it would lie apart, and a size near the limit would seem to fit that then makes a run retry.
        """
        self.workload.release()
        for optimizer in self._stateless:
            optimizer.state.clear()
        for module in self.workload.modules():
            for parameter in module.parameters():
                parameter.grad = None


def _growth_per_step(in_use: list[tuple[int, int]]) -> int:
    """The bytes that every step leaves in use, from those after so many steps; 0 where something was made only once."""
    if len(in_use) < 3:
        return 0
    (done1, bytes1), (done2, bytes2), (done3, bytes3) = in_use[-3:]
    first, later = (bytes2 - bytes1) / (done2 - done1), (bytes3 - bytes2) / (done3 - done2)
    return round(later) if 0 < first <= 2 * later else 0


def _known_well(times: Sequence[float]) -> bool:
    """Whether the mean is known to a small part of itself, by the spread of the steps."""
    if len(times) < FEWEST_SPREAD:
        return False
    return statistics.stdev(times) / math.sqrt(len(times)) <= KNOWN_WELL_ENOUGH * statistics.fmean(times)


def _nothing() -> None:
    pass
