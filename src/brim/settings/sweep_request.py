"""What `brim sweep` and `brim.sweep` take: a file with a grid, and how its experiments run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import flag_of, given, named
from brim.settings.declare import Setting, check_fields
from brim.settings.setting_checks import Check, choice, number, pairs, path_text, texts, whole
from brim.settings.shared import OUTPUT

__all__ = ["Place", "SweepCommand", "SweepRequest"]

Place = Literal["local", "ray", "slurm"]
EXPERIMENTS, RUNNING, WHERE = "Experiments", "Running", "Where"
_IN_COMMAND = ("on", "jobs_per_gpu", "timeout", "top_n", "results_file", "max_experiments", "data_percentage")


def _read_texts(value: Any) -> tuple[str, ...]:
    """KEY=VALUE texts, or a mapping of keys to values, as texts."""
    if isinstance(value, Mapping):
        return tuple(f"{key}={_yaml(one)}" for key, one in value.items())
    found: tuple[str, ...] = texts()(value)
    return found


def _read_slurm(value: Any) -> dict[str, Any]:
    """Parameters of Slurm's jobs as a mapping, or as KEY=VALUE texts of YAML."""
    pairs("partition=gpu")(value)
    return shared.read_changes(value)


def _yaml(value: Any) -> str:
    """A value as YAML would have it in a line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_yaml(one) for one in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """How the experiments of a file run, not what they are."""

    file: Annotated[
        str,
        Setting(
            help="A YAML file with a grid; --schema prints its keys.", argument=True, metavar="FILE", check=path_text(),
            default=None, python_default=dataclasses.MISSING,
            python_help="A YAML file with a grid; `brim sweep --schema` prints its keys.",
        ),
    ] = ""  # fmt: skip
    overrides: Annotated[
        tuple[str, ...],
        Setting(
            help="Overrides of settings in the file: hp.learning_rate=[0.1,0.01].", argument=True, many=True,
            metavar="KEY=VALUE", check=Check("settings", _read_texts),
            python="Mapping[str, object] | Sequence[str] | None",
            python_help="Overrides of settings in the file: {'hp.learning_rate': [0.1, 0.01]}.",
        ),
    ] = ()  # fmt: skip
    on: Annotated[
        Place, Setting(help="local, ray or slurm.", panel=WHERE, metavar="WHERE", check=choice("local", "ray", "slurm"))
    ] = "local"
    jobs_per_gpu: Annotated[
        int | None,
        Setting(
            help="Experiments that may share a GPU (default: as many as fit), or the CPU (default 1).", panel=RUNNING,
            metavar="N", check=whole(1),
        ),
    ] = None  # fmt: skip
    timeout_seconds: Annotated[
        float | None,
        Setting(
            name="timeout", help="End an experiment that takes longer.", panel=RUNNING, metavar="SECONDS",
            check=number(above=0), python_help="Seconds; an experiment that takes longer is ended.",
        ),
    ] = None  # fmt: skip
    retry: Annotated[
        bool,
        Setting(
            name="no_retry", help="A batch size that does not fit fails its experiment.", panel=RUNNING, inverted=True
        ),
    ] = True
    resume: Annotated[
        bool, Setting(help="Continue the sweep in -o; failed experiments are tried again.", panel=OUTPUT)
    ] = False
    use_cache: Annotated[
        bool,
        shared.setting_of(shared.NoCache, help="Neither use cached plans and forecasts nor keep any.", panel=RUNNING),
    ] = True
    top_n: Annotated[int, Setting(help="How many of the best to show.", panel=OUTPUT, metavar="N", check=whole(1))] = 10
    results_file: Annotated[
        str | None, Setting(help="Also write results.csv here.", panel=OUTPUT, metavar="FILE", check=path_text())
    ] = None
    max_experiments: Annotated[
        int | None, Setting(help="Only the first N.", panel=EXPERIMENTS, metavar="N", check=whole(1))
    ] = None
    data_percentage: Annotated[
        float | None,
        Setting(
            help="Train on a part of the data.", panel=EXPERIMENTS, metavar="PERCENT", check=number(above=0, most=100)
        ),
    ] = None
    loggers: Annotated[
        tuple[str, ...], shared.setting_of(shared.Log, name="log", help="tensorboard, mlflow or wandb; repeatable.")
    ] = ()
    slurm: Annotated[
        Mapping[str, Any],
        Setting(
            help="With --on slurm: partition=gpu, account=…; repeatable.", panel=WHERE, metavar="KEY=VALUE", many=True,
            check=Check("settings", _read_slurm), python="Mapping[str, object] | None",
            python_help="With on='slurm': {'partition': 'gpu', …}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slurm and self.on != "slurm":
            raise RequestError(f"{named('slurm')}: it goes with {given('on', 'slurm')}")

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values, with the command that asks the same."""
        return {**dataclasses.asdict(self), "argv": self.command()}

    def command(self) -> list[str]:
        """The command line of this request."""
        words = ["brim", "sweep", self.file, *self.overrides]
        fields = {"timeout": "timeout_seconds"}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _IN_COMMAND:
            value = getattr(self, fields.get(name, name))
            if value != defaults[fields.get(name, name)]:
                words += [flag_of(name), f"{value:g}" if isinstance(value, float) else str(value)]
        words += [word for name in self.loggers for word in ("--log", name)]
        words += [word for name, value in self.slurm.items() for word in ("--slurm", f"{name}={value}")]
        return words + (["--no-retry"] if not self.retry else []) + (["--no-cache"] if not self.use_cache else [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """A sweep, what to check before it starts, and where its record goes."""

    request: SweepRequest
    config: Annotated[
        str | None,
        Setting(help="The same as FILE.", panel=EXPERIMENTS, metavar="FILE", check=path_text(), only="flags"),
    ] = None
    dry_run: Annotated[bool, Setting(help="Only show what would run, how it pairs, and its memory.", only="flags")] = (
        False
    )
    check: Annotated[bool, Setting(help="Only check the file for mistakes.", only="flags")] = False
    strict: Annotated[bool, Setting(help="Warnings are errors.", panel=EXPERIMENTS)] = False
    no_forecast: Annotated[
        bool, Setting(help="Do not forecast memory; experiments do not share a GPU then.", panel=RUNNING)
    ] = False
    gpu: Annotated[
        str | None, Setting(help="Forecast for this card instead of the one here.", panel=WHERE, metavar="NAME")
    ] = None
    memory: Annotated[
        int | str | None, Setting(help="Forecast for a card of this memory.", panel=WHERE, metavar="SIZE")
    ] = None
    multi_gpu: Annotated[bool, Setting(help="Always on: every GPU is used.", hidden=True, only="flags")] = False
    output: shared.RunFolder = None
    json_output: shared.JsonOutput = False

    @staticmethod
    def arranged(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The file and the settings changed; `--config FILE` is the old way to name it."""
        file, config, changes = values.get("file"), values.get("config"), tuple(values.get("overrides", ()))
        if config is not None and file is not None:
            if "=" not in file:
                raise RequestError(f"--config {config} and {file} both name a file; keep one")
            changes, file = (file, *changes), None
        found = config if config is not None else file
        if found is None:
            raise RequestError("FILE is missing: name a YAML file with a grid, such as brim sweep grid.yaml")
        if "=" in found and not Path(found).exists():
            raise RequestError(f"{found}: that is a setting; name the file first: brim sweep FILE {found}")
        rest = {name: value for name, value in values.items() if name != "config"}
        return {**rest, "file": os.fspath(found), "overrides": changes}

    def __post_init__(self) -> None:
        shared.check_resume(self.request.resume, self.output, what="sweep")
        shared.check_one_card(self.gpu, self.memory)
