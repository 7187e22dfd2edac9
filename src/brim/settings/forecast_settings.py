"""What `brim forecast` takes: a workload and its cards, or a file of several; what is shown, kept and checked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named
from brim.settings.declare import NestedSettings, Setting, check_fields
from brim.settings.find_settings import DEFAULT_MAX_SIZE, DataSelection, OwnStep, WorkloadRequest, with_own_step
from brim.settings.setting_checks import Check, byte_count, path, texts, whole
from brim.settings.shared import BATCH, OUTPUT, WHERE
from brim.settings.sizes import bytes_in, format_bytes

__all__ = ["DEFAULT_DEPTH", "Allowance", "ForecastSettings", "allowance", "read_allowance"]

DEFAULT_DEPTH = 2  # names of a module's path that a row has: `layer1.0`, `model.layers`
CHECKING = "Checking"
_WITH_A_FILE = ("file", "by_module", "save", "against", "allow", "markdown", "output", "json")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


@dataclasses.dataclass(frozen=True)
class Allowance:
    """How much a peak may grow: a fraction of it, or bytes."""

    fraction: float = 0.0
    bytes: int = 0

    def of(self, base_bytes: int) -> int:
        """The bytes by which this peak may grow."""
        return int(self.fraction * base_bytes) + self.bytes

    def __str__(self) -> str:
        if self.fraction:
            return f"{100 * self.fraction:.4g}%"
        return format_bytes(self.bytes) if self.bytes else "0"


def read_allowance(value: Any) -> Allowance:
    """`3%`, `200MiB` or 0; a whole number in Python is bytes. Anything else is a `ValueError`."""
    if isinstance(value, Allowance):
        return value
    wrong = "write a percentage such as 3%, a size such as 200MiB, or 0"
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    percent = _PERCENT.fullmatch(text)
    if percent:
        return Allowance(fraction=float(percent[1]) / 100)
    if re.fullmatch(r"0+(\.0*)?", text):
        return Allowance()
    if isinstance(value, str) and not re.search("[A-Za-z]", text):  # 3 of what?
        raise ValueError(wrong)
    try:
        return Allowance(bytes=bytes_in(text))
    except ValueError:
        raise ValueError(wrong) from None


def allowance() -> Check:
    """How much a peak may grow."""
    schema = {"anyOf": [{"type": "string", "pattern": r"^\s*[0-9.]+\s*(%|[A-Za-z]+)\s*$"}, {"enum": [0, "0"]}]}
    return Check("percentage or size", read_allowance, schema, "int | str")


def _depth() -> Check:
    """How deep rows go; true is the default depth, false is no table."""
    levels = whole(0)

    def read(value: Any) -> int | None:
        word = str(value).lower()
        if word in ("true", "false"):
            return DEFAULT_DEPTH if word == "true" else None
        depth: int = levels(value)
        return depth

    schema = {"anyOf": [levels.schema, {"type": "boolean"}]}
    return Check("whole number from 0", read, schema, "int | bool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """A forecast of memory for one card or several, of one workload or of those in a file."""

    workload: Annotated[
        WorkloadRequest | None,  # traced, never run; None: `own`, a file, a table or the list of cards
        NestedSettings(without=("device",), optional={"model": "As in brim find; left out with --file and --table."}),
    ]
    own: Annotated[OwnStep | None, NestedSettings(without=("key",))] = None
    on_data: DataSelection = dataclasses.field(default_factory=DataSelection)
    max_tokens: shared.MaxTokens = None
    gpu: Annotated[
        tuple[str, ...],
        Setting(
            help="A card by name, such as a100-80gb or 'rtx 4090'; repeatable. --gpus lists them.", panel=WHERE,
            metavar="NAME", check=texts(), many=True,
            python_help="A card by name, such as a100-80gb or 'rtx 4090', or several.",
        ),
    ] = ()  # fmt: skip
    memory: Annotated[
        int | str | None,
        Setting(help="Any other card by its memory, as the driver reports it: 24GiB.", panel=WHERE, metavar="SIZE"),
    ] = None
    batch_size: Annotated[
        int | None, shared.setting_of(shared.BatchSize, help="auto: sizes up to the largest that fits; or one size N.")
    ] = None
    memory_limit_bytes: Annotated[
        int | None,
        Setting(
            name="memory_limit", help="Use at most this much of the card, e.g. 20GiB.", panel=BATCH, metavar="SIZE",
            check=byte_count(), python="int | str | None",
        ),
    ] = None  # fmt: skip
    margin: Annotated[
        float | None,
        shared.setting_of(shared.Margin, help="Keep this fraction of the card free (0.05).", python_help=""),
    ] = None
    multiple_of: shared.MultipleOf = 1
    power_of_two: shared.PowerOfTwo = False
    max_batch_size: shared.MaxBatchSize = DEFAULT_MAX_SIZE
    table: Annotated[
        bool, Setting(help="Compute a table of batch sizes by card memory and language model size.", only="flags")
    ] = False
    gpus: Annotated[bool, Setting(help="List the cards that are known, and stop.", only="flags")] = False
    file: Annotated[
        Path | None,
        Setting(
            help="A YAML file of several workloads (--schema), forecast and checked in one go.", panel=CHECKING,
            metavar="FILE", check=path(), python_help="A YAML file of several workloads, checked in one go.",
        ),
    ] = None  # fmt: skip
    save: Annotated[
        Path | None,
        Setting(help="Keep the forecast in this file, for --against.", panel=CHECKING, metavar="FILE", check=path()),
    ] = None
    against: Annotated[
        Path | None,
        Setting(
            help="Compare with a file of --save; exit code 1 if a peak has grown.", panel=CHECKING, metavar="FILE",
            check=path(), python_help="Compare with a file of save; the result's check says whether a peak has grown.",
        ),
    ] = None  # fmt: skip
    allow: Annotated[
        Allowance | None,
        Setting(
            help="With --against: how much a peak may grow, 3% or 200MiB (0).", panel=CHECKING, metavar="GROWTH",
            check=allowance(),
        ),
    ] = None  # fmt: skip
    by_module: Annotated[
        int | None,
        Setting(
            help=f"Also the bytes by module at the peak, DEPTH names deep ({DEFAULT_DEPTH}).", panel=OUTPUT,
            metavar="[DEPTH]", check=_depth(),
            python_help=f"Also the bytes by module at the peak, so many names deep; True: {DEFAULT_DEPTH}.",
        ),
    ] = None  # fmt: skip
    markdown: Annotated[
        Path | None,
        Setting(
            help="Also write it as Markdown, for a comment on a pull request.", panel=OUTPUT, metavar="FILE",
            check=path(),
        ),
    ] = None  # fmt: skip
    output: Annotated[
        Path | None,
        Setting(
            help="Also write run.json into this folder, for brim report.", flags=("-o", "--output"), panel=OUTPUT,
            metavar="DIR", check=path(),
        ),
    ] = None  # fmt: skip
    plot: Annotated[
        Path | None,
        Setting(
            help="Also draw it, as one HTML file that needs no network.", panel=OUTPUT, metavar="FILE", check=path()
        ),
    ] = None
    json_output: shared.JsonOutput = False

    @staticmethod
    def arranged(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without a model there is a file, a table or a list of cards, or it is missing."""
        alone = next((name for name in ("gpus", "table", "file") if values.get(name)), None)
        if alone is None:
            if "model" not in values and values.get("step") is None:
                raise RequestError("MODEL is missing: give a model, as to brim find (or --file, --table, or --gpus)")
            if str(values.get("model")).endswith((".yaml", ".yml")):
                raise RequestError(f"MODEL {values['model']}: give a file of workloads with {named('file')}")
            return with_own_step(values)
        if alone == "table" and "model" in values:
            raise RequestError(f"--table computes its own models; leave {values['model']} out, or leave --table out")
        if alone == "file":
            for name in values:
                if name not in _WITH_A_FILE:
                    raise RequestError(
                        f"{named(name)}: with {named('file')} it belongs into the file, under defaults or a workload"
                    )
        return {**values, "workload": None, "own": None}

    @property
    def depth(self) -> int | None:
        """How deep the rows of modules are; None: there are none. A check names the modules that grew."""
        checked = self.save is not None or self.against is not None
        return self.by_module if self.by_module is not None or not checked else DEFAULT_DEPTH

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("plot", "save", "markdown"):
            _check_can_be_written(name, getattr(self, name))
        if self.allow is not None and self.against is None:
            raise RequestError(f"{given('allow', str(self.allow))}: it goes with {named('against')}")
        if self.save is not None and self.against is not None and self.save.resolve() == self.against.resolve():
            raise RequestError(
                f"{given('save', self.save)}: {named('against')} names the same file, so that a check would accept "
                "whatever it finds; save to another file, or save after the check"
            )


_EXAMPLES = {"plot": "forecast.html", "save": "base.json", "markdown": "comment.md"}


def _check_can_be_written(name: str, file: Path | None) -> None:
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise RequestError(f"{given(name, str(file))}: there is no folder {file.absolute().parent}")
    if file.is_dir():
        raise RequestError(f"{given(name, str(file))}: it is a folder; give a file, such as {file / _EXAMPLES[name]}")
