"""What `brim train` and `brim.train` take: a file of settings, changes to them, and how this run of them goes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named, written
from brim.settings.declare import NestedSettings, Setting, check_fields
from brim.settings.nested_keys import flatten, nest
from brim.settings.problems import Problem
from brim.settings.setting_checks import MOST_SEED, Check, choice, numbers, path_text
from brim.settings.shared import BATCH, FAST_PATHS, OUTPUT, read_seeds, seeds_from
from brim.settings.sizes import parse_bytes
from brim.settings.train_settings import FLAG_KEYS, TrainSettings, train_settings

__all__ = ["TrainCommand", "TrainRequest"]

SEEDS = "Seeds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training run: the settings say what is learnt, the rest how."""

    settings: TrainSettings
    fixed: shared.NoAutoBatchSize = False  # micro-batches of exactly hp.batch_size
    fail_on_oom: shared.FailOnOom = False
    per_rank: shared.PerRank = False  # each rank keeps a micro-batch of its own
    plan: Annotated[  # the folder of a run whose sizes are used again
        str | None,
        Setting(
            help="Use the sizes of an earlier run.", panel=BATCH, metavar="DIR", check=path_text(),
        ),
    ] = None  # fmt: skip
    use_cache: shared.NoCache = True
    resume: Annotated[bool, Setting(help="Continue from the last checkpoint in -o.", panel=OUTPUT)] = False
    validate: Annotated[  # False: a trial, of which only the training matters
        bool, Setting(help="Whether to validate.", only="python", hidden=True)
    ] = True
    file: str | None = None  # that the settings were read from
    seeds: Annotated[  # the same training for each; none: for hp.seed alone, in the run's own folder
        tuple[int, ...],
        Setting(
            help="Train several seeds: how many from hp.seed on, or a list (3,5,8).", panel=SEEDS, metavar="N|LIST",
            check=Check("seeds", read_seeds), python="int | str | Sequence[int] | None",
        ),
    ] = ()  # fmt: skip
    learning_rates: Annotated[  # and for each of these; none: hp.learning_rate
        tuple[float, ...],
        Setting(
            help="Every seed at each of these: 1e-3,3e-4.", panel=SEEDS, metavar="RATES", check=numbers(float),
            python="str | Sequence[float] | None",
        ),
    ] = ()  # fmt: skip
    fast_path: Annotated[  # how seeds are trained
        str,
        Setting(
            help="auto, off (one by one), resident (data on the device) or stacked (all seeds in one model).",
            panel=SEEDS, metavar="PATH", check=choice("auto", *FAST_PATHS),
        ),
    ] = "auto"  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fixed and self.settings.hp.batch_size == "auto":
            raise RequestError(
                f"{named('no_auto_batch_size')} needs a size: add {written('batch_size', 'N')}, or hp.batch_size to "
                "the file"
            )
        shared.check_fail_on_oom(self.fail_on_oom, fixed=self.fixed)
        if self.plan is not None and not (Path(self.plan) / "run.json").is_file():
            raise RequestError(
                f"{given('plan', self.plan)}: there is no run.json in it; give the folder of an earlier training run"
            )
        self._check_runs()
        growing = self.settings.hp.effective_batch == "auto"
        if growing and self.settings.training.fsdp:
            raise RequestError(
                "training.fsdp: the noise scale cannot be measured on shards; give hp.effective_batch a number"
            )

    def _check_runs(self) -> None:
        if len(set(self.seeds)) < len(self.seeds) or any(not 0 <= seed <= MOST_SEED for seed in self.seeds):
            several = ",".join(str(seed) for seed in self.seeds[:8]) + (",…" if len(self.seeds) > 8 else "")
            raise RequestError(f"{written('seeds', several)}: give each once, from 0 to {MOST_SEED}")
        rates = ",".join(f"{rate:g}" for rate in self.learning_rates)
        if any(not 0 < rate < float("inf") for rate in self.learning_rates):
            raise RequestError(f"{written('learning_rates', rates)}: they must be above 0")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise RequestError(f"{written('learning_rates', rates)}: one is named twice")
        if self.fast_path in ("resident", "stacked") and not self.several:
            raise RequestError(
                f"{given('fast_path', self.fast_path)}: it goes with {written('seeds', 'N')}; a single run is trained "
                "by the loop, which keeps a checkpoint of every epoch"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """A training run from a file, and where its record goes."""

    config: Annotated[
        str | os.PathLike[str] | Mapping[str, Any],
        Setting(
            help="A YAML file; --schema prints its keys.", argument=True, metavar="CONFIG",
            python="str | os.PathLike[str] | Mapping[str, object]",
            python_help="A YAML file, or a mapping of the same keys, which `brim train --schema` prints.",
        ),
    ]  # fmt: skip
    overrides: Annotated[
        Mapping[str, Any],
        Setting(
            help="Overrides of settings in the file: hp.epochs=3.", argument=True, many=True, metavar="KEY=VALUE",
            check=Check("settings", shared.read_changes), python="Mapping[str, object] | Sequence[str] | None",
            python_help="Overrides of settings in the file: {'hp.epochs': 3}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    request: Annotated[TrainRequest, NestedSettings()]
    notes: tuple[str, ...] = ()  # on the file
    compare_batch: Annotated[
        tuple[int, ...],
        shared.setting_of(shared.CompareBatch, help="Short trials of these effective batches instead: 512,2048,8192."),
    ] = ()
    output: shared.RunFolder = None
    log: shared.Log = ()
    json_output: shared.JsonOutput = False

    @staticmethod
    def arranged(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the file with the changes made: those by key, and those by flag."""
        config = values.get("config")
        if config is None:
            raise RequestError(f"{named('config')} is missing: name a YAML file, such as config.yaml")
        changes = dict(values.get("overrides", {}))
        for name, key in FLAG_KEYS.items():
            if name in values and key in changes:
                raise RequestError(f"{key}={changes[key]}: {named(name)} sets it too; keep one")
        changes |= {key: values[name] for name, key in FLAG_KEYS.items() if name in values}
        problems: tuple[Problem, ...] = ()
        if isinstance(config, Mapping):
            nested: dict[str, Any] = nest({**flatten(config), **changes})
            file: str | None = None
        else:
            from brim.settings.config_files import read_training_file  # which is not needed to show flags

            nested, problems = read_training_file(config, overrides=changes)
            file = os.fspath(config)
        settings = train_settings(nested)
        seeds = values.get("seeds")
        rest = {name: value for name, value in values.items() if name not in FLAG_KEYS}
        if seeds is not None:
            rest["seeds"] = seeds_from(seeds, first=settings.hp.seed)
        return {**rest, "settings": settings, "file": file, "notes": tuple(str(problem) for problem in problems)}

    def __post_init__(self) -> None:
        if self.compare_batch:
            shared.check_comparison("compare_batch", resume=self.request.resume)
        shared.check_resume(self.request.resume, self.output)
        shared.check_log(self.log, "compare_batch", asked=bool(self.compare_batch))
        if self.compare_batch and self.request.several:
            raise RequestError(
                f"{named('compare_batch')}: sizes are compared for one seed; leave {named('seeds')} and "
                f"{named('learning_rates')} out"
            )
