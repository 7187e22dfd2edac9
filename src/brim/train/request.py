"""A training run as it was asked for: the settings of its file, and how this run of them goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from brim.config.sizes import parse_bytes
from brim.config.train_settings import TrainSettings
from brim.errors import RequestError

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
        growing = self.settings.hp.effective_batch == "auto"
        if growing and self.settings.training.fsdp:
            raise RequestError(
                "training.fsdp: the noise scale cannot be measured on shards; give hp.effective_batch a number"
            )

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
