"""A task over real data as a workload: what `brim find -d DATA` searches on, and what a forecast traces.

The worst case of the data is its costliest sample, as often as the batch has places, with every new token written.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError, plural
from brim.evaluation.setup import EvaluationSetup, evaluation_savings, open_setup
from brim.models.base import LoadedModel
from brim.records import Mode
from brim.running.executor import Pending
from brim.settings.eval_settings import EvalRequest
from brim.tasks.base import Task
from brim.tasks.choice import ChoiceTask
from brim.tasks.classify import ClassifyTask
from brim.tasks.generate import GenerateTask
from brim.tasks.multimodal import joined
from brim.workloads.base import Workload
from brim.workloads.inference import GenerateWorkload

__all__ = ["DataWorkload", "build_from_json", "workload_to_trace"]


@dataclasses.dataclass(frozen=True)
class _Batch:
    items: list[int]
    prepared: list[Any]


class DataWorkload(Workload):
    """Runs a task on batches of the data's costliest sample; `request` is what the setup was opened from."""

    def __init__(self, setup: EvaluationSetup, request: EvalRequest | None = None) -> None:
        self.setup = setup
        self.device = setup.device
        self.mode: Mode = "generate" if isinstance(setup.task, GenerateTask) else "forward"
        self.task: Task = setup.task
        if isinstance(self.task, GenerateTask):
            self.task.never_end()
        self._costliest = max(range(len(setup.costs)), key=setup.costs.__getitem__)
        self._prepared: Any = None
        costliest = setup.data.samples[self._costliest].id
        cost = f"{setup.costs[self._costliest]:,} {self.task.unit}"
        repeated = f"batches repeat the costliest of {plural(len(setup.costs), 'sample')} ({costliest}, cost {cost})"
        self.notes = (*setup.model.notes, repeated)
        if request is not None:
            self.savings = evaluation_savings(request, mode=self.mode)

    def make_batch(self, size: int) -> _Batch:
        """The costliest sample, so many times."""
        return _Batch(items=[self._costliest] * size, prepared=[self._prepare()] * size)

    def batch_length(self, batch: _Batch) -> int:
        """How many samples."""
        return len(batch.items)

    def step(self, batch: _Batch) -> Pending:
        """One batch of the task; its answers stay on the device."""
        return self.task.launch(batch.items, batch.prepared)

    def traced_as(self) -> Workload:
        """The model on the same batches, without the task around it."""
        plain = workload_to_trace(self.setup, self._costliest, self._prepare())
        return self if plain is None else plain

    def modules(self) -> Sequence[nn.Module]:
        """The model, if it is one of torch."""
        module = self.setup.model.module
        return (module,) if isinstance(module, nn.Module) else ()

    def release(self) -> None:
        """Let go of keys, values and graphs."""
        self.task.release()

    def largest_size(self) -> int:
        """A batch is never larger than the data."""
        return len(self.setup.costs)

    def identity(self) -> Mapping[str, Any]:
        """Model, task, and the cost of the costliest sample; the keys are those of stored plans."""
        cost = self.setup.costs[self._costliest]
        task = dict(self.task.identity())
        return {**self.setup.identity(), **task, "mode": self.mode, "dearest": cost, "count": len(self.setup.costs)}

    def _prepare(self) -> Any:
        if self._prepared is None:
            try:
                self._prepared = self.task.prepare(self._costliest)
            except ValueError as error:
                sample = self.setup.data.samples[self._costliest].id
                raise RequestError(f"the data's costliest sample {sample!r} cannot be used: {error}") from error
        return self._prepared


def build_from_json(data: Mapping[str, Any]) -> DataWorkload:
    """The workload of a request's JSON, for a child process."""
    plain = {**data, **{name: tuple(data[name]) for name in ("metrics", "plugins", "stop")}}
    request = EvalRequest(**plain)
    return DataWorkload(open_setup(request), request)


def workload_to_trace(setup: EvaluationSetup, item: int, prepared: Any) -> Workload | None:
    """Batches that repeat one sample, for a trace; None for a model or a task that is not brim's own to look into."""
    task, model = setup.task, setup.model
    if not isinstance(model.module, nn.Module):
        return None
    if isinstance(task, GenerateTask):
        return GenerateWorkload(
            model=model.module,
            make_batch=lambda size: _prompts(model, prepared, size),
            max_new_tokens=task.generation.max_new_tokens,
            device=model.device,
        )
    if type(task) is ChoiceTask:
        return _RepeatedSample(*task.in_padded_rows(prepared), item)
    if type(task) is ClassifyTask:
        return _RepeatedSample(task, prepared, item)
    return None


class _RepeatedSample(Workload):
    """One forward of a task over a sample, as often as the batch has places."""

    def __init__(self, task: Task, prepared: Any, item: int) -> None:
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
