"""Small Lightning modules and trainers for the tests, and what they hold at a moment."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

# What Lightning says of small data sets, of the number of loading processes, and of what it deprecates itself.
QUIET = (
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
WIDTH = 32
SAMPLES = 64


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, WIDTH, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


class Classifier(pl.LightningModule):
    """Two layers with all that keeps state: batch normalisation, dropout, a metric, a scheduler, a list."""

    def __init__(self, batch_size: int | None = 4, *, data: Dataset[Any] | None = None, dropout: float = 0.5) -> None:
        super().__init__()
        if batch_size is not None:
            self.batch_size = batch_size
        self.data = samples() if data is None else data
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Dropout(dropout), nn.Linear(64, 4))
        self.seen = MeanMetric()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.update(len(batch[0]))
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=getattr(self, "batch_size", 2), shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self.make_loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self.make_loader()

    def test_dataloader(self) -> Any:
        return self.make_loader()

    def predict_dataloader(self) -> Any:
        return self.make_loader()


class Plain(Classifier):
    """Without batch normalisation and dropout: pieces of a batch give the gradients of the whole."""

    def __init__(self, batch_size: int | None = 4, **settings: Any) -> None:
        super().__init__(batch_size, **settings)
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4))

    def train_dataloader(self) -> Any:
        return self.make_loader()


class CountingLogger(Logger):
    """Remembers how often it was asked to log."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @property
    def name(self) -> str:
        return "counting"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls += 1

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return


def trainer(*callbacks: pl.Callback, folder: Path | None = None, **settings: Any) -> pl.Trainer:
    usual = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **{**usual, **settings})


def state_of(trainer: pl.Trainer, module: Classifier) -> dict[str, Any]:
    """Everything that a trial must leave as it was."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": [parameter.grad for parameter in module.parameters()],
        "modes": [part.training for part in module.modules()],
        "losses": list(module.losses),
        "metric": copy.deepcopy(module.seen.metric_state),
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "fit_loop": copy.deepcopy(trainer.fit_loop.state_dict()),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "objects": (list(map(id, trainer.callbacks)), list(map(id, trainer.loggers))),
        "names": sorted(vars(module)),
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()),
    }


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """The places at which two nested values differ, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differences(first, second, f"{name}[{place}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not torch.equal(one, other):
            yield name
    elif isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        if not numpy.array_equal(one, other):
            yield name
    elif one != other:
        yield name


class Remember(pl.Callback):
    """Keeps the state at the start of every stage, and counts the batches that callbacks see."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.batches = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.states["fit"] = state_of(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.states.setdefault("validate", state_of(trainer, pl_module))

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.states["test"] = state_of(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.states["predict"] = state_of(trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1
