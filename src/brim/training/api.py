"""A training run as it was asked for: one, or one for every seed and learning rate."""

from __future__ import annotations

from brim.settings.train_request import TrainCommand
from brim.training.listener import TrainListener
from brim.training.run import TrainResult, run_training
from brim.training.seeds.run import run_seeds

__all__ = ["train_as"]


def train_as(settings: TrainCommand, *, listener: TrainListener | None = None) -> TrainResult:
    """Train, and leave the run's folder behind; with several seeds each has a folder of its own inside it."""
    for note in settings.notes:
        if listener is not None:
            listener.note(note)
    train = run_seeds if settings.request.several else run_training
    return train(settings.request, output=settings.output, listener=listener)
