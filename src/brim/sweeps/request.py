"""A sweep as it was asked for: how its experiments run, not what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from brim.errors import RequestError, nearest_names

__all__ = ["LOGGERS", "Place", "SweepRequest"]

Place = Literal["local", "ray", "slurm"]
_FLAGS = {
    "on": "--on", "jobs_per_gpu": "--jobs-per-gpu", "timeout_seconds": "--timeout", "top_n": "--top-n",
    "results_file": "--results-file", "max_experiments": "--max-experiments", "data_percentage": "--data-percentage",
}  # fmt: skip
LOGGERS = ("tensorboard", "mlflow", "wandb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What `brim sweep` takes beside the file."""

    file: str = ""
    overrides: tuple[str, ...] = ()
    on: Place = "local"
    jobs_per_gpu: int | None = None
    timeout_seconds: float | None = None
    retry: bool = True
    resume: bool = False
    use_cache: bool = True
    top_n: int = 10
    results_file: str | None = None
    max_experiments: int | None = None
    data_percentage: float | None = None
    loggers: tuple[str, ...] = ()
    slurm: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on not in get_args(Place):
            raise RequestError(f"--on {self.on}: it must be one of {', '.join(get_args(Place))}")
        for flag, value in (
            ("--jobs-per-gpu", self.jobs_per_gpu),
            ("--top-n", self.top_n),
            ("--max-experiments", self.max_experiments),
        ):
            if value is not None and value < 1:
                raise RequestError(f"{flag} {value}: give a whole number from 1")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise RequestError(f"--timeout {self.timeout_seconds:g}: give seconds, more than 0")
        if self.data_percentage is not None and not 0 < self.data_percentage <= 100:
            raise RequestError(f"--data-percentage {self.data_percentage:g}: give more than 0 and at most 100")
        for name in self.loggers:
            if name not in LOGGERS:
                raise RequestError(
                    f"--log {name}: it must be one of {', '.join(LOGGERS)}{nearest_names(name, LOGGERS)}"
                )
        if self.slurm and self.on != "slurm":
            raise RequestError("--slurm: it goes with --on slurm")

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values, with the command that asks the same."""
        return {**dataclasses.asdict(self), "argv": self.command()}

    def command(self) -> list[str]:
        """The command line of this request."""
        words = ["brim", "sweep", self.file, *self.overrides]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, flag in _FLAGS.items():
            value = getattr(self, name)
            if value != defaults[name]:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        words += [word for name in self.loggers for word in ("--log", name)]
        words += [word for name, value in self.slurm.items() for word in ("--slurm", f"{name}={value}")]
        return words + (["--no-retry"] if not self.retry else []) + (["--no-cache"] if not self.use_cache else [])
