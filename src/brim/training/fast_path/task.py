"""What is trained, apart from how: model, rows and their order, criterion, settings; and the outcome of each run.

Rows come in streams: one for supervised data, in- and out-of-distribution rows for preference training. An epoch is
one pass over the longest stream; a shorter one starts again as often as needed, shuffled anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.settings.caller import given
from brim.training.loop import EpochRules, Progress

__all__ = [
    "Batch",
    "Counts",
    "Criterion",
    "EpochPlan",
    "Orders",
    "Outputs",
    "RowData",
    "RunOutcome",
    "RunSpec",
    "RunsListener",
    "RunsRequest",
    "Settings",
    "TrainingTask",
    "Validate",
    "epoch_orders",
]

Counts = tuple[int, ...]  # rows of each stream in one step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The steps of an epoch: all alike but the last, which takes what is left of the longest stream.

    A step takes `batch_size` rows of each stream, and no more than a stream has. With `matched` every stream gives as
    many rows as the longest one, whatever its length.
    """

    lengths: tuple[int, ...]
    batch_size: int
    matched: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise RequestError(f"there is nothing to train on: streams of {self.lengths} rows")
        if self.batch_size < 1:
            raise RequestError(f"a batch of {self.batch_size} rows: it must be at least 1")

    @functools.cached_property
    def size(self) -> int:
        """Rows of the longest stream in a full step: never more than there are."""
        return min(self.batch_size, max(self.lengths))

    @functools.cached_property
    def steps(self) -> int:
        """Steps in an epoch."""
        return math.ceil(max(self.lengths) / self.size)

    @functools.cached_property
    def full(self) -> Counts:
        """Rows of each stream in every step but perhaps the last."""
        return self._counts(self.size)

    @functools.cached_property
    def last(self) -> Counts:
        """Rows of each stream in the last step."""
        return self._counts(max(self.lengths) - (self.steps - 1) * self.size)

    @functools.cached_property
    def spans(self) -> tuple[int, ...]:
        """How many rows of each stream an epoch takes in all."""
        return tuple((self.steps - 1) * full + last for full, last in zip(self.full, self.last, strict=True))

    def counts(self, step: int) -> Counts:
        """Rows of each stream in one step."""
        return self.last if step == self.steps - 1 else self.full

    def _counts(self, rows: int) -> Counts:
        return tuple(rows if self.matched else min(rows, length) for length in self.lengths)


def epoch_orders(plan: EpochPlan, *, seed: int, epoch: int) -> list[torch.Tensor]:
    """For each stream the rows in the order in which the epoch takes them, `[span]`; numbered through over all streams.

    The order depends on seed, epoch and stream alone, so every path, and a run begun in the middle, sees the same.
    """
    starts = _starts(plan.lengths)
    return [
        _shuffled(length, span, key=f"{seed}/{epoch}/{stream}") + starts[stream]
        for stream, (length, span) in enumerate(zip(plan.lengths, plan.spans, strict=True))
    ]


def _shuffled(length: int, span: int, *, key: str) -> torch.Tensor:
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator().manual_seed(number)
    passes = [torch.randperm(length, generator=generator) for _ in range(math.ceil(span / length))]
    return torch.cat(passes)[:span]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:stream]) for stream in range(len(lengths))]


Batch = dict[str, torch.Tensor]  # the rows of one step of one run
Criterion = Callable[[torch.Tensor, Batch, Counts], torch.Tensor]  # the model's outputs on a batch → the loss
Outputs = Callable[[torch.Tensor], torch.Tensor]  # rows `[n, …]` → `[runs, n, …]`, in evaluation mode
Validate = Callable[[Outputs], Sequence[float] | Sequence[Mapping[str, float]]]  # for each run a figure, or several
FIGURE = "figure"  # the name of a figure that `validate` gives without one
Orders = Callable[[int, int], Sequence[torch.Tensor]]  # seed and epoch → the rows of each stream, in their order


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowData:
    """The rows to train on: tensors of equal length, and where each stream ends.

    `per_run` holds what differs from run to run, `[runs, rows]`, such as the energies of a frozen reference.
    """

    tensors: Mapping[str, torch.Tensor]
    lengths: tuple[int, ...]  # rows of each stream, one after the other
    per_run: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    ids: Sequence[str] | None = None  # of the rows, for messages

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.shape[0] != sum(self.lengths):
                raise RequestError(
                    f"{name} has {tensor.shape[0]:,} rows where {sum(self.lengths):,} are wanted: features, labels and "
                    "whatever else belongs to a row must be equally many"
                )

    @property
    def bytes(self) -> int:
        """What the rows take on a device."""
        everything = (*self.tensors.values(), *self.per_run.values())
        return sum(tensor.nbytes for tensor in everything)

    def on(self, device: torch.device) -> RowData:
        """The same rows on the device."""
        return dataclasses.replace(
            self,
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
            per_run={name: tensor.to(device) for name, tensor in self.per_run.items()},
        )

    def of_runs(self, runs: Sequence[int]) -> RowData:
        """The same rows with what belongs to these runs only."""
        return dataclasses.replace(self, per_run={name: tensor[list(runs)] for name, tensor in self.per_run.items()})

    def name_of(self, row: int) -> str:
        """A row's id, or its number."""
        return str(row) if self.ids is None else self.ids[row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run: its seed and its learning rate."""

    seed: int
    lr: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How runs are trained; the same for all runs of a task."""

    epochs: int
    batch_size: int  # rows of the longest stream in one optimizer step
    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip_norm: float | None = None
    autocast_dtype: torch.dtype | None = None
    loss_scaling: bool = False  # for float16: a scale for each run, steps with infinite gradients skipped
    validate_every: int = 1  # epochs
    patience: int | None = None  # validations without a better figure before a run stops
    lr_factor: Callable[[int], float] | None = None  # by the optimizer step, from 0
    matched: bool = False  # every stream gives equally many rows to a step
    skips_infinite_losses: bool = True  # with loss_scaling: False ends a run at the first of them

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validate_every"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.patience is not None and self.patience < 1:
            raise RequestError(f"{given('patience', self.patience)}: it must be at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RequestError(f"a gradient norm of at most {self.clip_norm:g}: it must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A model of any seed, the rows it learns from, and how its outputs are judged.

    The model is called on one tensor of rows; `criterion` gets its outputs for the rows of a step, the step's other
    tensors, and how many rows belong to each stream. It is written for one run; stacked runs call it under
    `torch.func.vmap`. `make_model(seed)` must give the same weights whenever it is called. `validate` gives a figure
    for each run, of which a higher one is better; or, with `rules`, figures by name, which are compared as the rules
    say. `orders` gives other orders than the fast path's own.

        TrainingTask(make_model=head, data=RowData(tensors={"features": x, "labels": y}, lengths=(len(x),)),
                criterion=lambda outputs, batch, counts: F.cross_entropy(outputs, batch["labels"]))
    """

    make_model: Callable[[int], nn.Module]
    data: RowData
    criterion: Criterion
    validate: Validate | None = None
    inputs: str = "features"
    orders: Orders | None = None
    rules: EpochRules | None = None  # None: as Settings.patience and validate_every say
    epoch_facts: Callable[[RunSpec, int], Mapping[str, Any]] | None = None  # run and steps made → more of its row

    def plan(self, settings: Settings) -> EpochPlan:
        """The steps of an epoch."""
        return EpochPlan(lengths=self.data.lengths, batch_size=settings.batch_size, matched=settings.matched)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsRequest:
    """Which runs of a task are trained, on which device and path, and within what memory."""

    task: TrainingTask
    specs: Sequence[RunSpec]
    settings: Settings
    device: torch.device | str
    path: str = "auto"  # or off, resident, stacked
    micro_batch_size: int | None = None  # None: as many rows in one pass as fit
    memory_limit_bytes: int | None = None
    margin: float | None = None
    graphs: bool = True  # steps may be replayed from a CUDA graph
    not_stacked: str = ""  # why runs must not be stacked; empty: they may


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The result of one run: its weights at the best validation (or the end), its epochs and its losses."""

    spec: RunSpec
    weights: dict[str, torch.Tensor]  # of the best epoch, on the CPU
    best_epoch: int  # from 1; the last one where nothing was validated; 0: none
    progress: Progress = dataclasses.field(default_factory=Progress)
    step_losses: tuple[torch.Tensor, ...] = ()  # of each epoch, [steps]
    skipped_steps: int = 0  # by loss scaling
    error: str | None = None  # why the run failed: a loss that is not a number
    last_weights: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of a run that did not fail

    @property
    def epochs(self) -> int:
        """Epochs that were ended."""
        return self.progress.epoch

    @functools.cached_property
    def losses(self) -> tuple[float, ...]:
        """The mean of each epoch, without the steps that loss scaling skipped."""
        return tuple(float(losses[losses.isfinite()].double().mean()) for losses in self.step_losses)

    @property
    def validations(self) -> tuple[float, ...]:
        """The figure of every validation, where there is a single one."""
        return tuple(row[f"val_{FIGURE}"] for row in self.progress.rows if f"val_{FIGURE}" in row)


class RunsListener:
    """Called as the training proceeds; every method does nothing unless overridden."""

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """An epoch has ended, for so many runs at once."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""
