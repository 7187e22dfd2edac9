"""A training run as it was asked for: the settings of its file, and how this run of them goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.setting_checks import MOST_SEED
from brim.settings.sizes import parse_bytes
from brim.settings.train_settings import TrainSettings
from brim.training.fast_path.choose import PATHS

__all__ = ["TrainRequest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `brim train` and `brim.fit` take; the settings say what is learnt, the rest how."""

    settings: TrainSettings
    fixed: bool = False  # micro-batches of exactly hp.batch_size (--no-auto-batch-size)
    fail_on_oom: bool = False
    per_rank: bool = False  # each rank keeps a micro-batch of its own
    use_cache: bool = True
    resume: bool = False
    plan: str | None = None  # the folder of a run whose sizes are used again
    validate: bool = True  # False: a trial, of which only the training matters
    file: str | None = None  # where the settings came from
    seeds: tuple[int, ...] = ()  # the same training for each; none: for hp.seed alone, in the run's own folder
    learning_rates: tuple[float, ...] = ()  # and for each of these; none: hp.learning_rate
    fast_path: str = "auto"  # how seeds are trained: auto, off (one after the other), resident, stacked

    def __post_init__(self) -> None:
        size = self.settings.hp.batch_size
        if self.fixed and size == "auto":
            raise RequestError("--no-auto-batch-size needs a size: add -b N, or hp.batch_size to the file")
        if self.fail_on_oom and not self.fixed:
            raise RequestError("--fail-on-oom goes with --no-auto-batch-size and -b N")
        if self.plan is not None and not (Path(self.plan) / "run.json").is_file():
            raise RequestError(
                f"--plan {self.plan}: there is no run.json in it; give the folder of an earlier training run"
            )
        self._check_runs()
        growing = self.settings.hp.effective_batch == "auto"
        if growing and self.settings.training.fsdp:
            raise RequestError(
                "training.fsdp: the noise scale cannot be measured on shards; give hp.effective_batch a number"
            )

    def _check_runs(self) -> None:
        if len(set(self.seeds)) < len(self.seeds) or any(not 0 <= seed <= MOST_SEED for seed in self.seeds):
            named = ",".join(str(seed) for seed in self.seeds[:8]) + (",…" if len(self.seeds) > 8 else "")
            raise RequestError(f"--seeds {named}: give each once, from 0 to {MOST_SEED}")
        if any(not 0 < rate < float("inf") for rate in self.learning_rates):
            raise RequestError(f"--learning-rates {_by_commas(self.learning_rates)}: they must be above 0")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise RequestError(f"--learning-rates {_by_commas(self.learning_rates)}: one is named twice")
        if self.fast_path not in ("auto", *PATHS):
            raise RequestError(f"--fast-path {self.fast_path}: it must be auto, {', '.join(PATHS)}")
        if self.fast_path in ("resident", "stacked") and not self.several:
            raise RequestError(
                f"--fast-path {self.fast_path}: it goes with --seeds N; a single run is trained by the loop, which "
                "keeps a checkpoint of every epoch"
            )

    @property
    def several(self) -> bool:
        """Whether seeds or learning rates were named, so that every run has a folder of its own."""
        return bool(self.seeds or self.learning_rates)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        limit = self.settings.training.memory_limit
        return None if limit is None else parse_bytes(limit)

    @property
    def limited(self) -> bool:
        """Whether the user named how much memory may be used."""
        return self.settings.training.memory_limit is not None or self.settings.training.margin is not None

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**dataclasses.asdict(self), "settings": self.settings.to_json()}


def _by_commas(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
