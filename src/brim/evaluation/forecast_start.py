"""A forecast for an evaluation to start from: the bytes of batches of its dearest sample, without running one.

The sample is traced as the run will treat it, prompts read and tokens decoded or one forward, at two or three sizes,
and the sizes near the limit are worked out from these. Only on CUDA, whose allocator a forecast is about, and only
where the few seconds are sure to be little beside the run. What cannot be traced costs a line and nothing else: the run
then starts with two samples, as ever. How the run goes on from the first batch is none of this file's business.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from brim.evaluation.hint import ForecastBytes
from brim.evaluation.subject import Subject
from brim.evaluation.tasks.base import Task
from brim.evaluation.tasks.choice import ChoiceTask
from brim.evaluation.tasks.classify import ClassifyTask
from brim.evaluation.tasks.generate import GenerateTask
from brim.evaluation.tasks.multimodal import joined
from brim.forecasting.events import Target, Trace
from brim.forecasting.gpus import Gpu
from brim.forecasting.trace import trace_workload
from brim.forecasting.untraceable import UntraceableError
from brim.models.loaded import LoadedModel
from brim.running.executor import Pending
from brim.running.interrupts import InterruptWatch
from brim.searching.forecast_start import start_forecast
from brim.workloads.base import Workload
from brim.workloads.generate import GenerateWorkload

__all__ = ["ForecastStart", "StartForecaster", "forecast_start", "is_worth_a_trace", "workload_to_trace"]

LONGEST_SECONDS = 3.0  # a trace that takes longer is given up
SIZES = (2, 8)  # samples whose bytes are worked out first; these are also the sizes that are traced
PREPARED = 8  # of the dearest samples that are tried: one that cannot be prepared never reaches the model

# A trace takes about as long as this many decode steps; it pays where the small batches that it spares take twice as
# many. A climb from two samples by fours needs about four batches to where it would have started.
TRACE_STEPS = 256
MOST_SPARED = 4
CLIMB = 4
NO_CLIMB = 8  # samples of a run whose first batch of two is a quarter of it, and so as large as it gets

# Or the run is so long that nobody sees the trace: no card computes faster than this, and none so fast in practice.
FASTEST = 1e15  # floating-point operations a second
LONG_SECONDS = 60.0
POSITIONS = 128  # in a picture or a clip, at least: what a weight is used for in a sample that is not counted in tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastStart:
    """What came of a trace: bytes to start from, or None and a line that says why; and what it took."""

    bytes: ForecastBytes | None
    seconds: float
    note: str | None = None


# Of a subject, the items to do and the memory limit; None where none is made.
StartForecaster = Callable[[Subject, Sequence[int], int], ForecastStart | None]


def forecast_start(
    subject: Subject, items: Sequence[int], limit_bytes: int, *, gpu: Gpu | None = None
) -> ForecastStart | None:
    """The bytes of the dearest of these items; None where no forecast is made: not on CUDA, or not worth the time.

    With `gpu` it is made for that card, wherever the model is and however short the run.
    """
    if gpu is None and (subject.device.type != "cuda" or not is_worth_a_trace(subject, items)):
        return None
    started = time.perf_counter()
    item, prepared = _dearest(subject, items)
    workload = None if item is None else workload_to_trace(subject, item, prepared)
    if item is None or workload is None:
        return None
    with InterruptWatch(), _given_up_after(LONGEST_SECONDS):  # a trace is full of weak references
        forecast, notes = start_forecast(workload, gpu=gpu, trace=_trace_one_step, begun="started")
    found = None
    if forecast is not None:
        points = _points(forecast.reserved_at, limit_bytes, most=len(items))
        found = ForecastBytes(item_cost=subject.costs[item], points=points)
    return ForecastStart(bytes=found, seconds=time.perf_counter() - started, note=next(iter(notes), None))


def is_worth_a_trace(subject: Subject, items: Sequence[int]) -> bool:
    """Whether a trace spares more than it takes, or is lost in the length of the run.

    What a forecast spares is the small batches of a climb. Generation pays for each with as many steps as there are new
    tokens, whatever its size; a forward over two samples takes no time at all, and then a forecast is only good for
    knowing beforehand what fits.
    """
    module = subject.model.module
    if not isinstance(module, nn.Module) or not items:
        return False
    costs = [subject.costs[item] for item in items]
    if isinstance(subject.task, GenerateTask):
        spared = min(math.log(max(sum(costs) / max(costs) / NO_CLIMB, 1), CLIMB), MOST_SPARED)
        if spared * subject.task.generation.max_new_tokens >= 2 * TRACE_STEPS:
            return True
    positions = sum(costs) if subject.task.unit == "tokens" else POSITIONS * len(costs)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return 2 * parameters * positions / FASTEST >= LONG_SECONDS


def workload_to_trace(subject: Subject, item: int, prepared: Any) -> Workload | None:
    """Batches that repeat one sample, for a trace; None for a model or a task that is not brim's own to look into."""
    task, model = subject.task, subject.model
    if not isinstance(model.module, nn.Module):
        return None
    if isinstance(task, GenerateTask):
        return GenerateWorkload(
            model=model.module,
            make_batch=lambda size: _prompts(model, prepared, size),
            max_new_tokens=task.generation.max_new_tokens,
            device=model.device,
        )
    if type(task) in (ChoiceTask, ClassifyTask):
        return _RepeatedSample(task, item, prepared)
    return None


class _RepeatedSample(Workload):
    """One forward of a task over a sample, as often as the batch has places."""

    def __init__(self, task: Task, item: int, prepared: Any) -> None:
        self.device = task.model.device
        self.task = copy.copy(task)  # what a batch leaves on it, and its notes, are not the run's
        self.task.notes = []
        # Pinned memory is the host's: the copy on the device is the same without it.
        self.task.settings = dataclasses.replace(task.settings, non_blocking=False)
        self._item = item
        self._prepared = prepared

    def make_batch(self, size: int) -> list[Any]:
        """The sample, so many times."""
        return [self._prepared] * size

    def batch_length(self, batch: list[Any]) -> int:
        """How many samples."""
        return len(batch)

    def step(self, batch: list[Any]) -> Pending:
        """Start the batch; its answers are never read."""
        return self.task.launch([self._item] * len(batch), batch)

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.task.model.module,)


def _prompts(model: LoadedModel, prepared: Any, size: int) -> dict[str, Any]:
    """A prepared prompt, so many times, as one batch on the model's device."""
    if isinstance(prepared, Mapping):
        batch = joined([prepared] * size, pad=model.tokenizer.pad_token_id or 0)
    else:
        ids = torch.tensor([prepared] * size, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _dearest(subject: Subject, items: Sequence[int]) -> tuple[int | None, Any]:
    """The dearest item that can be prepared, prepared; None if none of the first few can."""
    for item in sorted(items, key=lambda item: -subject.costs[item])[:PREPARED]:
        with contextlib.suppress(Exception):  # the run will meet it again, and record it as this sample's failure
            return item, subject.task.prepare(item)
    return None, None


def _trace_one_step(workload: Workload, size: int, target: Target | None) -> Trace:
    """Nothing outlives a step of an evaluation, so that one is enough; and it is never run for real."""
    return trace_workload(workload, size, target=target, steps=1, or_approximately=False)


def _points(bytes_at: Callable[[int], int], limit_bytes: int, *, most: int) -> tuple[tuple[int, int], ...]:
    """Bytes at the small sizes, and at the one where a line through them meets the limit, or at the largest there is.

    Small sizes lie in the allocator's first segments and say little about the slope.
    """
    found = {size: bytes_at(size) for size in SIZES}
    (low, low_bytes), (high, high_bytes) = found.items()
    slope = (high_bytes - low_bytes) / (high - low)
    reach = most if slope <= 0 else high + (limit_bytes - high_bytes) / slope
    far = max(math.floor(min(reach, most)), high)
    return tuple({**found, far: bytes_at(far)}.items())


@contextlib.contextmanager
def _given_up_after(seconds: float) -> Iterator[None]:
    """An `UntraceableError` in the forward of whatever module comes next, once the time is up."""
    end = time.perf_counter() + seconds

    def look(*_: Any) -> None:
        if time.perf_counter() > end:
            raise UntraceableError(f"it takes more than {seconds:g} seconds")

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
