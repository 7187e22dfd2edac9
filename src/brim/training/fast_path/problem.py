"""What is trained, apart from how: model, rows, criterion, settings, and what came of each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.settings.caller import given
from brim.training.fast_path.order import Counts, EpochPlan

__all__ = [
    "Batch", "Criterion", "EpochEnd", "Follow", "Orders", "Outputs", "Problem", "RowData", "RunOutcome", "RunSpec",
    "RunsListener", "Settings", "Validate", "Verdict",
]  # fmt: skip

Batch = dict[str, torch.Tensor]  # the rows of one step of one run
Criterion = Callable[[torch.Tensor, Batch, Counts], torch.Tensor]  # the model's outputs on a batch → the loss
Outputs = Callable[[torch.Tensor], torch.Tensor]  # rows `[n, …]` → `[runs, n, …]`, in evaluation mode
Validate = Callable[[Outputs], Sequence[float]]  # a figure for each run; the higher, the better
Orders = Callable[[int, int], Sequence[torch.Tensor]]  # seed and epoch → the rows of each stream, in their order


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowData:
    """The rows to train on: tensors of equal length, and where each stream ends.

    `per_run` holds what differs from run to run, `[runs, rows]`, such as the energies of a frozen reference.
    """

    tensors: Mapping[str, torch.Tensor]
    lengths: tuple[int, ...]  # rows of each stream, one after the other
    per_run: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    ids: Sequence[str] | None = None  # names of the rows, for messages

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
    """How runs are trained; the same for all runs of a problem."""

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

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validate_every"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.patience is not None and self.patience < 1:
            raise RequestError(f"{given('patience', self.patience)}: it must be at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RequestError(f"a gradient norm of at most {self.clip_norm:g}: it must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """What is known of a stack when an epoch is over."""

    epoch: int  # from 1
    last: bool
    running: tuple[int, ...]  # the runs that trained in it, and whose losses are numbers
    losses: torch.Tensor  # [runs, steps], on the host
    seconds: float  # of its steps, for all runs together
    outputs: Outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from an epoch: runs whose weights are their best so far, and runs that stop."""

    better: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()


Follow = Callable[[Sequence[RunSpec]], Callable[[EpochEnd], Verdict]]  # for a stack that begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model of any seed, the rows it learns from, and how its outputs are judged.

    The model is called on one tensor of rows; `criterion` gets its outputs for the rows of a step, the step's other
    tensors, and how many rows belong to each stream. It is written for one run; stacked runs call it under
    `torch.func.vmap`. `make_model(seed)` must give the same weights whenever it is called. `follow` takes the place of
    `validate` and patience where somebody else decides after every epoch which weights are kept and which runs stop;
    it is asked anew for every stack that begins, also for one that begins again. `orders` gives other orders than the
    fast path's own.

        Problem(make_model=head, data=RowData(tensors={"features": x, "labels": y}, lengths=(len(x),)),
                criterion=lambda outputs, batch, counts: F.cross_entropy(outputs, batch["labels"]))
    """

    make_model: Callable[[int], nn.Module]
    data: RowData
    criterion: Criterion
    validate: Validate | None = None
    inputs: str = "features"
    follow: Follow | None = None
    orders: Orders | None = None

    def plan(self, settings: Settings) -> EpochPlan:
        """The steps of an epoch."""
        return EpochPlan(lengths=self.data.lengths, batch_size=settings.batch_size, matched=settings.matched)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What came of one run: its weights at the best validation (or the end), and how it got there."""

    spec: RunSpec
    weights: dict[str, torch.Tensor]  # on the CPU
    epochs: int
    best_epoch: int  # from 1; the last one where nothing was validated
    losses: tuple[float, ...]  # the mean of each epoch
    validations: tuple[float, ...]
    skipped_steps: int = 0  # by loss scaling
    error: str | None = None  # why the run came to nothing: a loss that is no number
    last_weights: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of a run that is followed


class RunsListener:
    """Told of the training as it goes; does nothing by itself."""

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """An epoch has ended, for so many runs at once."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""
