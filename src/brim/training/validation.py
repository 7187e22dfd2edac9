"""Validation: every validation sample once, in batches of a size of their own.

The executor of evaluations does the work, so that a batch that does not fit is split, and the size grows while that
pays; what it found in one epoch serves the next.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError, RequestError
from brim.memory.device_waits import DeviceWaits
from brim.memory.devices import DeviceMemory, ModelMemory
from brim.models.placement import Precision
from brim.running.executor import BatchWork, ExecutionPolicy, Executor, Finished, Pending
from brim.running.loader import NotPrepared
from brim.running.retries import wait
from brim.running.work_queue import WorkQueue
from brim.sizing.live import LiveSizer
from brim.sizing.older_checkpoints import validation_state
from brim.sizing.priors import AvailableMemory, LiveRequest, Prior, start_live
from brim.training.epoch_loader import ValidationLoader
from brim.training.items import Items
from brim.training.objective import Objective
from brim.workloads.base import in_mode

__all__ = ["Validation", "ValidationRequest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationRequest:
    """One rank's part of a validation, and what its batches are bound by."""

    share: Sequence[int]  # the samples of this rank, the costliest first
    precision: Precision
    batch_size: int | None = None  # as the user gave it; None: found while it runs
    known: int | None = None  # of an earlier run
    limit_bytes: int | None = None  # to keep, or None where measuring would slow the batches
    in_step_samples: int | None = None  # in step with other ranks: samples of the largest share


class Validation:
    """The validation samples of one rank."""

    def __init__(
        self,
        items: Items,
        objective: Objective,
        memory: DeviceMemory,
        request: ValidationRequest,
        *,
        remedies: Callable[[int], list[str]],
        note: Callable[[str], None],
        between: Callable[[], None],
        waits: DeviceWaits,
    ) -> None:
        self.items, self.objective = items, objective
        self.share = list(request.share)
        self.by_size = request.batch_size is not None  # the user gave it
        self.by_count = self.by_size or items.uniform
        self.batch_sizes: list[int] = []
        self.seconds = 0.0
        self.oom_events = 0
        self._memory, self._request = memory, request
        self._note, self._between, self._remedies = note, between, remedies
        self._waits = waits
        self._costs = [items.cost(item) for item in range(len(items))]
        self.sizer = self._make_sizer(request)
        self._asked = {"batch_size": request.batch_size, "samples": len(self.share)}
        self._before: dict[str, Any] | None = None  # the state before a validation that is under way

    def to_json(self) -> dict[str, Any]:
        """The sizes found, as a checkpoint keeps them; of a validation under way, as they were when it began.

        A run that is resumed does such a validation again, in the batches that it would have had.
        """
        return self._before or {
            "asked": self._asked,
            "sizer": self.sizer.to_json(),
            "oom_events": self.oom_events,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Use the sizes of a checkpoint, unless another size is asked for or this rank has other samples now."""
        state = validation_state(data)
        if state["asked"] == self._asked:
            self.sizer.restore(state["sizer"])
            self.oom_events = state["oom_events"]

    def _make_sizer(self, request: ValidationRequest) -> LiveSizer:
        most, known = max(len(self.share), 1) if self.by_count else None, request.known
        if known is not None and most is not None:
            known = min(known, most)
        item_cost = 1 if self.by_count else max((self._costs[item] for item in self.share), default=1)
        memory = AvailableMemory(limit_bytes=request.limit_bytes, item_cost=item_cost)
        return start_live(LiveRequest(batch_size=request.batch_size, ceiling=most), Prior(known_size=known), memory)

    def fetch_first(self, loader: ValidationLoader) -> None:
        """Have the samples of the first batch here, while the device is still at work on something else."""
        first = WorkQueue(self._costs, self.share, by_count=self.by_count).take(self.sizer.next_size())
        loader.take(first)

    def run(
        self, model: nn.Module, loader: ValidationLoader | None = None, *, in_step_size: int | None = None
    ) -> list[float]:
        """The sum of every column of figures over this rank's samples, and last the sum of their weights.

        Without a loader samples are prepared as they are needed. `in_step_size` is the batch of a sharded model, the
        same on all ranks, which run as many batches as each other.
        """
        started = time.perf_counter()
        self._before = copy.deepcopy(self.to_json())
        found = self._run_alone(model, loader) if in_step_size is None else self._run_in_step(model, in_step_size)
        self._before = None
        self.seconds += time.perf_counter() - started
        columns = range(self.objective.columns)
        return [math.fsum(found[item][column] for item in self.share) for column in columns]

    def _run_in_step(self, model: nn.Module, size: int) -> dict[int, Sequence[float]]:
        """As many forwards as the rank with the most samples; one that has none left repeats its first."""
        assert self._request.in_step_samples is not None
        found: dict[int, Sequence[float]] = {}
        with in_mode(model, training=False), torch.no_grad():
            for start in range(0, self._request.in_step_samples, size):
                items = self.share[start : start + size]
                rows = self._judge(model, items or self.share[:1], None).tolist()
                found.update(zip(items, rows, strict=False))
                self.batch_sizes.append(len(items))
        return found

    def _run_alone(self, model: nn.Module, loader: ValidationLoader | None) -> dict[int, Sequence[float]]:
        found: dict[int, Sequence[float]] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_mode(model, training=False))
            executor = Executor(
                BatchWork(
                    launch=lambda batch: self._launch(model, loader, batch),
                    costs=self._costs,
                    note=lambda line: self._note(f"validation: {line}"),
                    set_aside=None if loader is None else loader.set_aside,
                    pause=lambda seconds: wait(seconds, self._between),
                ),
                sizer=self.sizer,
                memory=ModelMemory(self._memory, model),
                metered=self._request.limit_bytes is not None,
                policy=ExecutionPolicy(by_count=self.by_count, stop_if_hopeless=True),
            )
            for finished in stack.enter_context(contextlib.closing(executor.run(self.share))):
                for one in finished:
                    if one.failure is not None:
                        self._refuse(one)
                    found[one.item] = one.result
                self.batch_sizes.append(len(finished))
                if loader is not None:
                    loader.done([one.item for one in finished])
                self._between()
        self.oom_events += executor.figures.oom_events
        return found

    def _launch(self, model: nn.Module, loader: ValidationLoader | None, batch: list[int]) -> Pending:
        prepared = None if loader is None else loader.take(batch)
        for item, one in zip(batch, prepared or (), strict=False):
            if isinstance(one, NotPrepared):
                raise RequestError(f"validation sample {self.items.ids[item]} cannot be used: {one.message}")
        with torch.inference_mode():
            return _Rows(self._judge(model, batch, prepared))

    def _judge(self, model: nn.Module, batch: Sequence[int], prepared: Sequence[Any] | None) -> torch.Tensor:
        device = self._memory.device
        precision = self._request.precision
        autocast = precision.autocast
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            joined = self.items.batch(batch, prepared, device=device)
            with self._waits.busy():
                return self.objective.sample_metrics(model, joined.to(device, precision.weights))

    def _refuse(self, done: Finished) -> None:
        assert done.failure is not None
        name = self.items.ids[done.item]
        if done.failure.reason == "error":
            raise RequestError(f"validation sample {name}: {done.failure.message}")
        remedies = "\n  - ".join(self._remedies(1))
        raise DoesNotFitError(f"validation sample {name}: {done.failure.message}.\nWhat may help:\n  - {remedies}")


class _Rows(Pending):
    """Figures on their way from the device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def result(self) -> list[Any]:
        """One row per sample."""
        rows: list[Any] = self._rows.tolist()
        return rows
