"""How far a run has come: what a checkpoint keeps of it, and the rows of epochs.csv. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from brim.training.windows import Window

__all__ = ["Progress"]


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Counted over all ranks; the same on each."""

    step: int = 0  # optimizer steps made
    epoch: int = 0  # epochs finished
    position: int = 0  # samples of the epoch under way that have been learnt from
    samples: int = 0  # in all
    train_seconds: float = 0.0
    epoch_seconds: float = 0.0  # of the steps of the epoch under way
    loss_total: float = 0.0  # over the epoch under way
    loss_weight: float = 0.0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # one per epoch
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # changes of the effective batch
    best_epoch: int | None = None  # from 0
    best_value: float | None = None
    best_loss: float | None = None
    waited: int = 0  # epochs without a gain
    stopped_early: bool = False

    def stepped(self, window: Window) -> None:
        """An optimizer step was made."""
        self.step += 1
        self.position = window.stop
        self.samples += window.samples

    def spent(self, seconds: float) -> None:
        """Training took so long."""
        self.train_seconds += seconds
        self.epoch_seconds += seconds

    def learnt(self, total: float, weight: float) -> None:
        """A step's loss is known."""
        self.loss_total += total
        self.loss_weight += weight

    def end_epoch(self, figures: Mapping[str, float], **more: Any) -> dict[str, Any]:
        """The epoch is over, with these figures of validation; gives its row."""
        seen = self.position
        row = {
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.samples,
            "train_loss": self.loss_total / self.loss_weight if self.loss_weight else None,
            **{f"val_{name}": value for name, value in figures.items()},
            "seconds": self.epoch_seconds,
            "samples_per_second": seen / self.epoch_seconds if self.epoch_seconds else None,
            **more,
        }
        self.rows.append(row)
        self.epoch += 1
        self.position = 0
        self.epoch_seconds = self.loss_total = self.loss_weight = 0.0
        return row

    def judge(
        self, value: float, loss: float, *, higher_is_better: bool, min_delta: float, patience: int | None
    ) -> bool:
        """Whether the epoch just ended is the best so far; `stopped_early` after `patience` that were not.

        Of two with the same value the one with the lower loss is the better; for patience it is no gain.
        """
        before = self.best_value
        gain = 0.0 if before is None else (value - before if higher_is_better else before - value)
        gained = before is None or gain > min_delta
        better = gained or (value == before and self.best_loss is not None and loss < self.best_loss)
        if better:
            self.best_value, self.best_loss, self.best_epoch = value, loss, self.epoch - 1
        self.waited = 0 if gained else self.waited + 1
        self.stopped_early = patience is not None and self.waited >= patience
        return better

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Read it back; fields of a later version are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})
