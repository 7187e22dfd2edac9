"""Which runs make up a training of several seeds and learning rates, and where each of them lies. Pure."""

from __future__ import annotations

import dataclasses

from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import TrainSettings
from brim.training.fast_path.task import RunSpec

__all__ = ["Variant", "variants_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One seed at one learning rate."""

    seed: int
    learning_rate: float
    name: str  # what people read, and the folder's name inside the training's

    @property
    def spec(self) -> RunSpec:
        """As the fast path knows it."""
        return RunSpec(seed=self.seed, lr=self.learning_rate)

    def settings(self, settings: TrainSettings) -> TrainSettings:
        """The settings of this run alone: those of `brim train CONFIG hp.seed=N`."""
        hp = dataclasses.replace(settings.hp, seed=self.seed, learning_rate=self.learning_rate)
        return dataclasses.replace(settings, hp=hp)

    def request(self, request: TrainRequest, *, resume: bool = False) -> TrainRequest:
        """The request of this run alone."""
        return dataclasses.replace(
            request, settings=self.settings(request.settings), seeds=(), learning_rates=(), fast_path="auto",
            resume=resume,
        )  # fmt: skip


def variants_of(request: TrainRequest) -> tuple[Variant, ...]:
    """Every seed at every learning rate; of one rate only the seed is in the name."""
    hp = request.settings.hp
    rates, seeds = request.learning_rates or (hp.learning_rate,), request.seeds or (hp.seed,)
    several = len(request.learning_rates) > 1
    return tuple(
        Variant(seed=seed, learning_rate=rate, name=f"seed-{seed}-lr-{rate:g}" if several else f"seed-{seed}")
        for rate in rates
        for seed in seeds
    )
