"""The forecast: the peak memory of a workload at any size, on a named card, without running on it.

Traces two sizes (a third where bytes grow faster than in a line), two steps of the first and one of each further size
where the second can be concluded (`later_steps.py`), replays torch's allocator on them and on every size
asked for, and adds what lies outside: the CUDA context and buckets for communication. It knows not how traces are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from brim.errors import DoesNotFitError, RequestError, first_line
from brim.forecasting.allocator import AllocatorSettings
from brim.forecasting.events import Target, Trace, UntraceableError
from brim.forecasting.extrapolate import Owned, SizeModel
from brim.forecasting.gpus import Gpu, find_gpu, gpu_of_memory
from brim.forecasting.later_steps import repeats_its_first_step, with_second_step
from brim.forecasting.overheads import PARTS, Environment, installed_torch, make_timeline
from brim.forecasting.trace import trace_workload
from brim.memory.collector import without_collector
from brim.memory.devices import DEFAULT_MARGIN
from brim.memory.failures import memory_remedies
from brim.ranks.unwrap import communication_bytes
from brim.ranks.world import current_world
from brim.records import Forecast, ModuleBytes
from brim.settings.caller import given, named, written
from brim.settings.find_settings import DEFAULT_MAX_SIZE
from brim.settings.shared import check_one_card
from brim.settings.sizes import format_bytes
from brim.sizing.priors import ForecastCurve
from brim.workloads.base import Workload

__all__ = [
    "Forecaster",
    "TraceFunction",
    "TracedWorkload",
    "choose_gpu",
    "forecast_batch_size",
    "forecast_curve",
    "forecast_memory",
    "gpu_of_device",
]

TraceFunction = Callable[[Workload, int, Target | None], Trace]
_MADE_FOR = ("data", "classes", "knobs", "dtype", "optimizer", "gradient_checkpointing", "parameters")
_Kind = tuple[tuple[int, int], tuple[int, int] | None]  # of a target: what a trace depends on

REFERENCE_CARD = "a100-80gb"  # whose workspaces and context stand in when no card is named and none is here


def forecast_memory(
    workload: Workload,
    batch_size: int,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    margin: float | None = None,
) -> Forecast:
    """The peak memory of a batch size, before any GPU is touched.

    Args:
        workload: What runs on one batch: a subclass of `Workload`.
        batch_size: The size to forecast.
        gpu: A card by its name; without `gpu` and `memory` this machine's own, or an A100 where there is none.
        memory: A card by its memory, such as `"24GiB"`.
        margin: The fraction of the card's memory that is kept free.

    Returns:
        The forecast of this size; its `batch_size_max` is None: `forecast_batch_size` works it out.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> class Linear(brim.Workload):
        ...     model = torch.nn.Linear(1024, 1024)
        ...
        ...     def make_batch(self, size):
        ...         return torch.ones(size, 1024)
        ...
        ...     def step(self, batch):
        ...         return self.model(batch)
        >>> brim.forecast_memory(Linear(), 32, gpu="rtx 4090").fits
        True
    """
    forecaster = Forecaster(TracedWorkload(workload), choose_gpu(gpu, memory), margin=margin)
    return forecaster.at(batch_size)


def forecast_batch_size(
    workload: Workload,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    margin: float | None = None,
    power_of_two: bool = False,
    multiple_of: int = 1,
    max_batch_size: int = DEFAULT_MAX_SIZE,
) -> Forecast:
    """The forecast of the largest batch size that fits a card: its `batch_size`.

    Args:
        workload: What runs on one batch: a subclass of `Workload`.
        gpu: A card by its name; without `gpu` and `memory` this machine's own, or an A100 where there is none.
        memory: A card by its memory, such as `"24GiB"`.
        margin: The fraction of the card's memory that is kept free.
        power_of_two: Only powers of two.
        multiple_of: Only multiples of this.
        max_batch_size: The largest size that is considered.

    Returns:
        The forecast of that size.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Not even a batch of one fits.

    Examples:
        >>> class Squares(brim.Workload):
        ...     def make_batch(self, size):
        ...         return torch.ones(size, 1024, 1024)
        ...
        ...     def step(self, batch):
        ...         return batch**2
        >>> brim.forecast_batch_size(Squares(), memory="24GiB", power_of_two=True).batch_size
        2048
    """
    traced = TracedWorkload(workload)
    forecaster = Forecaster(traced, choose_gpu(gpu, memory), margin=margin, largest=max_batch_size)
    size = forecaster.largest(power_of_two=power_of_two, multiple_of=multiple_of)
    if size == 0:
        raise forecaster.does_not_fit()
    return forecaster.at(size, largest=size)


class TracedWorkload:
    """A workload and the traces of it made so far, one for each size and architecture."""

    def __init__(self, workload: Workload, trace: TraceFunction | None = None) -> None:
        self.workload = workload
        self.seconds = 0.0  # spent on tracing
        self._stepped = workload.traced_as()
        self._trace = trace or _trace
        self._traces: dict[tuple[int, _Kind | None], Trace] = {}
        self._real_steps: dict[int, Trace] = {}  # by size, of a workload that cannot be traced

    def at(self, size: int, target: Target | None) -> Trace:
        """The trace of a size for a card."""
        key = (size, None if target is None else (target.compute_capability, target.torch_version))
        if key not in self._traces:
            started = time.perf_counter()
            self._traces[key] = self._like_another(size, target, key[1]) or self._traced(size, target)
            self.seconds += time.perf_counter() - started
        return self._traces[key]

    def _traced(self, size: int, target: Target | None) -> Trace:
        if self._trace is not _trace:
            return self._trace(self._stepped, size, target)
        return _trace(self._stepped, size, target, self._real_steps)

    def _like_another(self, size: int, target: Target | None, kind: _Kind | None) -> Trace | None:
        """From one step of this size and two of another that was traced before; None where that is not possible."""
        known = next((trace for (_, other), trace in self._traces.items() if other == kind), None)
        if self._trace is not _trace or known is None or not repeats_its_first_step(known):
            return None
        try:
            step = trace_workload(self._stepped, size, target=target, steps=1, or_approximately=False)
        except UntraceableError:
            return None
        return with_second_step(step, known)


class Forecaster:
    """Forecasts of one workload on one card.

    `torch_version` is that of the machine it will run on (by default the one installed here), `expandable_segments`
    its allocator's setting (by default the one of this process's environment); `after` is a size that the same process
    has run before, as in a search. `memory_limit_bytes` is a limit on what the process reserves, below the card's own.
    Without `workspaces` the allocated peak is that of the host, where no library of a GPU takes any.
    """

    def __init__(
        self,
        traced: TracedWorkload,
        gpu: Gpu,
        *,
        margin: float | None = None,
        largest: int = DEFAULT_MAX_SIZE,
        torch_version: tuple[int, int] | None = None,
        expandable_segments: bool | None = None,
        after: int | None = None,
        memory_limit_bytes: int | None = None,
        workspaces: bool = True,
    ) -> None:
        workload = traced.workload
        self.gpu = gpu
        self.margin = _checked_margin(margin)
        self.smallest = workload.smallest_size()
        self.largest_allowed = max(min(largest, workload.largest_size() or largest), self.smallest)
        self._traced = traced
        self._environment = Environment(
            compute_capability=gpu.compute_capability,
            torch_version=torch_version or installed_torch(),
            multiprocessors=gpu.multiprocessors,
        )
        expandable = _expandable_segments() if expandable_segments is None else expandable_segments
        self._settings = AllocatorSettings(expandable_segments=expandable)
        self._after = after
        self._memory_limit_bytes = memory_limit_bytes
        self._workspaces = workspaces
        self._beside = workload.reserved_bytes()
        if workload.mode == "train" and current_world().size > 1:
            self._beside += communication_bytes(workload.modules())
        self._model: SizeModel | None = None
        self._approximate: str | None = None

    @property
    def limit_bytes(self) -> int:
        """What may be on the card: its memory less the margin, which is one of what torch can reserve."""
        return self.gpu.context_bytes + self._reservable_bytes

    @property
    def _reservable_bytes(self) -> int:
        """What torch may reserve."""
        room = self.gpu.limit_bytes(self.margin)
        return room if self._memory_limit_bytes is None else min(room, self._memory_limit_bytes)

    @property
    def trace_seconds(self) -> float:
        """The time spent on traces so far."""
        return self._traced.seconds

    def at(self, size: int, *, largest: int | None = None, depth: int | None = None) -> Forecast:
        """The forecast of one size; `largest` is what to say of the largest size, if it is known.

        With `depth` it has the bytes by module: those of modules so many names deep, each with what is inside of it.
        """
        if size < self.smallest:
            raise RequestError(f"batch size {size}: the smallest this workload can run is {self.smallest}")
        peaks = self.model(size).peaks(size)
        device_bytes = peaks.reserved_bytes + self._beside + self.gpu.context_bytes
        breakdown = dict(peaks.parts)
        if self._beside:
            breakdown["communication"] = self._beside
        breakdown["cached"] = peaks.reserved_bytes - peaks.allocated_bytes
        breakdown["context"] = self.gpu.context_bytes
        facts = self._traced.workload.identity() or {}
        return Forecast(
            batch_size=size,
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            device_bytes=device_bytes,
            breakdown=breakdown,
            fits=device_bytes <= self.limit_bytes,
            limit_bytes=self.limit_bytes,
            batch_size_max=largest,
            device=self.gpu.name,
            unit=self._traced.workload.unit,
            approximate=self._approximate,
            trace_seconds=self.trace_seconds,
            notes=tuple(self._traced.workload.notes),
            made_for={name: _plain(facts[name]) for name in _MADE_FOR if name in facts},
            by_module=() if depth is None else _by_module(self.model(size).owned(size), depth),
        )

    def largest(self, *, power_of_two: bool = False, multiple_of: int = 1) -> int:
        """The largest size that fits, 0 when none does."""
        if multiple_of < 1:
            raise RequestError(f"{given('multiple_of', multiple_of)}: give a whole number from 1")
        limit = self._reservable_bytes - self._beside
        size = self.model().largest_within(limit, smallest=self.smallest, largest=self.largest_allowed)
        size -= size % multiple_of
        if power_of_two and size:
            size = 1 << (size.bit_length() - 1)
            if size % multiple_of:
                raise RequestError(
                    f"{given('multiple_of', multiple_of)}: with {named('power_of_two')} it must be a power of two "
                    "itself"
                )
        return size if size >= self.smallest else 0

    def model(self, size: int | None = None) -> SizeModel:
        """The peaks as a function of the size; a size that will be asked for is best traced itself."""
        if self._model is None:
            self._model = self._traced_model(size)
        return self._model

    def sizes(self, largest: int) -> list[int]:
        """Sizes worth showing: doubling from the smallest, the largest that fits, and one that does not."""
        sizes = [self.smallest]
        while sizes[-1] * 2 <= min(max(2 * largest, self.smallest), self.largest_allowed):
            sizes.append(sizes[-1] * 2)
        return sorted({*sizes, *([largest] if largest else [])})

    def does_not_fit(self) -> DoesNotFitError:
        """What to say when not even the smallest size fits."""
        least = self.at(self.smallest)
        unit = "sample" if self.smallest == 1 else "samples"
        more = f"a card with more memory ({written('gpu', 'NAME')}, {written('memory', 'SIZE')})"
        found = memory_remedies(self._traced.workload.savings, batch_size=self.smallest, more=more)
        remedies = "\n  - ".join(found)
        return DoesNotFitError(
            f"a batch of {self.smallest} {unit} does not fit {self.gpu.name}: it would take about "
            f"{format_bytes(least.device_bytes)}, and of its {format_bytes(self.gpu.memory_bytes)} "
            f"{format_bytes(self.limit_bytes)} may be used ({self._limited_by()}).\nWhat may help:\n  - {remedies}"
        )

    def _limited_by(self) -> str:
        """What leaves less than the card's memory."""
        if self._memory_limit_bytes is None or self._memory_limit_bytes > self._reservable_bytes:
            return f"margin {self.margin:.0%}"
        limit = written("memory_limit", format_bytes(self._memory_limit_bytes))
        return f"{limit}, and a CUDA context of {format_bytes(self.gpu.context_bytes)}"

    def _traced_model(self, asked: int | None) -> SizeModel:
        sizes = _sizes_to_trace(self.smallest, self.largest_allowed, asked)
        model = self._model_of(sizes)
        if not model.simulated or model.grows_faster_than_a_line:
            further = min(4 * max(sizes), max(self.largest_allowed, max(sizes)))
            if further > max(sizes):
                model = self._model_of([*sizes, further])
        return model

    def _model_of(self, sizes: Sequence[int]) -> SizeModel:
        target = dataclasses.replace(self.gpu.target, torch_version=self._environment.torch_version)
        with without_collector():  # tens of thousands of events, and not a cycle among them
            traces = {size: self._traced.at(size, target) for size in sizes}
            timelines = {
                size: make_timeline(trace, self._environment, workspaces=self._workspaces)
                for size, trace in traces.items()
            }
            model = SizeModel(timelines, self._settings, after=self._after)
        reasons = [trace.approximate for trace in traces.values() if trace.approximate]
        if not model.simulated:
            reasons.append("steps of different sizes allocate differently, so sizes in between are fitted")
        self._approximate = "; ".join(dict.fromkeys(reasons)) or None
        return model


def choose_gpu(gpu: str | None, memory: str | int | None) -> Gpu:
    """The card that is meant: a named one, one known by its memory, this machine's, or the reference card."""
    check_one_card(gpu, memory)
    if gpu is not None:
        return find_gpu(gpu)
    if memory is not None:
        return gpu_of_memory(memory)
    return gpu_of_device(0) if torch.cuda.is_available() else find_gpu(REFERENCE_CARD)


def gpu_of_device(device: torch.device | int) -> Gpu:
    """A card of this machine, with the catalogue's figure for its context where it is in there."""
    properties = torch.cuda.get_device_properties(device)
    try:
        known = find_gpu(properties.name)
    except RequestError:
        known = gpu_of_memory(properties.total_memory)
    return Gpu(
        key=known.key,
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        context_bytes=known.context_bytes,
        memory_source="this machine's driver",
        context_source=known.context_source,
        kind=known.kind,
        multiprocessors=properties.multi_processor_count,
    )


def _trace(workload: Workload, size: int, target: Target | None, real_steps: dict[int, Trace] | None = None) -> Trace:
    return trace_workload(workload, size, target=target, real_steps=real_steps)


def _sizes_to_trace(smallest: int, largest: int, asked: int | None) -> list[int]:
    """Two sizes: the one asked for and another far enough from it; not 1 if that is not asked for.

    Steps on a single item are special: dimensions of length one make views of what else is copied.
    """
    low = min(max(smallest, 2), largest)
    pair = (
        {low, min(4 * low, largest)} if asked is None or asked > largest else {asked, low if asked > low else 4 * low}
    )
    return sorted(pair)


def _by_module(owned: Owned, depth: int) -> tuple[ModuleBytes, ...]:
    """A row for each module down to a depth, most bytes first."""
    rows: dict[str, dict[str, int]] = {}
    for (module, part), count in owned.items():
        outside = module.startswith("(")
        parts = rows.setdefault(module if outside else ".".join(module.split(".")[:depth]), {})
        parts[part] = parts.get(part, 0) + count
    made = [
        ModuleBytes(
            module=module, bytes=sum(parts.values()), parts={part: parts[part] for part in PARTS if part in parts}
        )
        for module, parts in rows.items()
    ]
    return tuple(sorted(made, key=lambda row: (-row.bytes, row.module)))


def _plain(value: Any) -> Any:
    """A dtype as people write it: float32."""
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _checked_margin(margin: float | None) -> float:
    if margin is None:
        return DEFAULT_MARGIN
    if not 0 <= margin < 1:
        raise RequestError(f"{given('margin', margin)}: give a fraction from 0 to below 1")
    return margin


def _expandable_segments() -> bool:
    """What this process's environment sets for torch's allocator."""
    names: Iterable[str] = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = next((os.environ[name] for name in names if name in os.environ), "")
    return "expandable_segments:true" in text.lower().replace(" ", "")


def forecast_curve(
    workload: Workload,
    *,
    gpu: Gpu | None = None,
    one_step: bool = False,
    seconds: float | None = None,
    begun: str = "searched",
) -> tuple[ForecastCurve | None, tuple[str, ...]]:
    """The forecast, or None; and notes for the user.

    `gpu` is a card to forecast for in place of the workload's own device. With `one_step` nothing outlives a step, so
    that one is traced, and never run for real; with `seconds` a trace that takes longer is given up. `begun` is the
    word for what is done without a forecast.
    """
    if gpu is None and workload.device.type != "cuda":
        return None, ()
    try:
        with _given_up_after(seconds):
            traced = TracedWorkload(workload, _trace_one_step if one_step else None)
            forecaster = Forecaster(traced, gpu or gpu_of_device(workload.device))
            model = forecaster.model()
            smallest = model.replayed(workload.smallest_size())
    except Exception as error:  # the user's step on tensors without data: it may raise anything
        return None, (f"{begun} without a forecast, since the step cannot be traced: {first_line(error)}",)
    if not model.simulated or smallest.reserved_bytes <= 0:
        return None, ()
    forecast = ForecastCurve(
        reserved_at=lambda size: model.replayed(size).reserved_bytes,
        allocated_at=lambda size: model.replayed(size).allocated_bytes,
        runs_within=model.runs_within,
    )
    return forecast, ()


def _trace_one_step(workload: Workload, size: int, target: Target | None) -> Trace:
    return trace_workload(workload, size, target=target, steps=1, or_approximately=False)


@contextlib.contextmanager
def _given_up_after(seconds: float | None) -> Iterator[None]:
    """An `UntraceableError` in the forward of whatever module comes next, once the time is up."""
    if seconds is None:
        yield
        return
    end = time.perf_counter() + seconds

    def check(*_: Any) -> None:
        if time.perf_counter() > end:
            raise UntraceableError(f"it takes more than {seconds:g} seconds")

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
