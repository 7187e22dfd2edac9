"""What `brim profile`, `brim.profile` and `brim demo` take: an evaluation and the knobs to vary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named, written
from brim.settings.declare import NestedSettings, Setting, check_fields
from brim.settings.eval_settings import EvalRequest
from brim.settings.setting_checks import (
    Check,
    WrongEntryError,
    byte_size,
    choice,
    entries_of,
    fraction,
    number,
    whole,
)
from brim.settings.shared import BATCH
from brim.settings.sizes import parse_bytes

__all__ = [
    "SEED_SCALE", "DemoSettings", "Order", "Pairing", "ProfileRequest", "ProfileSettings", "Sampling", "ScaleStep",
    "parse_values",
]  # fmt: skip

Pairing = Literal["cross", "zip"]
Sampling = Literal["stratified", "lhs", "boundary"]
MOST_VALUES = 100_000


def parse_values(text: str) -> tuple[str, ...]:
    """The values of a list: single ones, and ranges of whole numbers such as 2-13 or 2-13:2 (every second).

    A `ValueError` says what is wrong, and leaves it to others to name the setting.
    """
    values: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        span = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part)
        if span is None:
            values.append(part)
            continue
        first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if first > last or step < 1:
            raise ValueError(f"the range {part} is empty; write it from small to large")
        if (last - first) // step >= MOST_VALUES:
            raise ValueError(f"the range {part} has more than {MOST_VALUES:,} values")
        values += [str(value) for value in range(first, last + 1, step)]
    if not values:
        raise ValueError("it names no value; write for instance 2-13 or 8,16")
    repeated = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is there twice")
    return tuple(values)


Order = Literal["given", "ascending", "descending"]
ScaleStep = tuple[float, float]  # up to this value of the knob, this part of the ceiling
Axes = Mapping[str, Sequence[Any] | None]  # the values of each knob; None: its whole range

# The rule that people with Molmo on an 80 GB card go by: a first guess where nothing better is known.
SEED_SCALE: tuple[ScaleStep, ...] = ((4, 1.0), (8, 0.75), (12, 0.5), (float("inf"), 0.4))
LATENCY_SAMPLES = 20
POINTS, CHOICE = "Points", "Recommendation"
_OTHER = ("knob", "offload", "fail_fast", "retry_failed", "resume")  # settings of an evaluation that a profile lacks


def _read_axes(value: Any) -> dict[str, tuple[Any, ...] | None]:
    """`["max_crops=2-13", "tokens"]` or `{"max_crops": range(2, 14)}` as lists; None is the whole range."""
    if isinstance(value, Mapping):
        return {str(name): None if values is None else _listed(values) for name, values in value.items()}
    axes: dict[str, tuple[Any, ...] | None] = {}
    for entry in map(str, entries_of(value)):
        name, equals, values = entry.partition("=")
        name = name.strip()
        if not name or (equals and not values.strip()):
            raise WrongEntryError(entry, "write NAME for the whole range, or NAME=2-13, or NAME=8,16")
        if name in axes:
            raise WrongEntryError(entry, f"{name} is given twice; put its values into one list")
        axes[name] = parse_values(values) if equals else None
    return axes


def _listed(values: Any) -> tuple[Any, ...]:
    return parse_values(values) if isinstance(values, str) else tuple(entries_of(values))


def _read_scale(value: Any) -> tuple[ScaleStep, ...]:
    """`4=1,8=0.75,12=0.5,0.4` as steps: up to 4 the whole ceiling, and so on; the last one holds for all above."""
    if not isinstance(value, str):
        return tuple((float(up_to), float(scale)) for up_to, scale in entries_of(value))
    steps: list[ScaleStep] = []
    parts = [part.strip() for part in value.split(",") if part.strip()]
    for place, part in enumerate(parts):
        up_to, equals, scale = part.rpartition("=")
        try:
            step = (float(up_to) if equals else float("inf"), float(scale))
        except ValueError:
            raise ValueError(f"{part} is not VALUE=FRACTION") from None
        if not 0 < step[1] <= 1 or (not equals and place < len(parts) - 1) or (steps and step[0] <= steps[-1][0]):
            raise ValueError("write rising values with fractions up to 1, such as 4=1,8=0.75,12=0.5,0.4")
        steps.append(step)
    if not steps:
        raise ValueError("it is empty; write for instance 4=1,8=0.75,12=0.5,0.4")
    return tuple(steps)


def _read_sizes(value: Any) -> tuple[tuple[Mapping[str, str], int], ...]:
    """`13=24`, or `max_crops=13,max_new_tokens=8=24`, each as the values of a point and its size."""
    entries = [f"{point}={size}" for point, size in value.items()] if isinstance(value, Mapping) else entries_of(value)
    found = tuple(_read_size(entry) if isinstance(entry, str) else entry for entry in entries)
    for _, size in found:
        if size < 1:
            raise ValueError("the size must be a whole number from 1")
    return found


def _read_size(entry: str) -> tuple[Mapping[str, str], int]:
    places, _, size = entry.rpartition("=")
    if not places or not size.isdecimal() or int(size) < 1:
        raise WrongEntryError(entry, "write VALUE=N, such as 13=24")
    point: dict[str, str] = {}
    for part in places.split(","):
        name, equals, value = part.rpartition("=")
        point[name.strip() if equals else ""] = value.strip()
    return point, int(size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A profile: an evaluation, and the knobs to vary.

    `axes` has a list of values for each knob, or None for its whole range. `batch_size_for` names points by some of
    their knob values.
    """

    base: Annotated[EvalRequest, NestedSettings(without=_OTHER)]
    axes: Annotated[
        Axes,
        Setting(
            name="knob", help="The knob to profile: NAME for its whole range, NAME=2-13 or NAME=8,16; repeatable.",
            panel=POINTS, metavar="NAME[=VALUES]", check=Check("knobs", _read_axes), many=True, positional=True,
            missing="name the knob to profile, such as max_crops",
            python="str | Mapping[str, Sequence[object] | range | str | None]",
            python_help="The knob to profile over its whole range, or knobs with their values: "
            "{'max_crops': range(2, 14)}.",
        ),
    ]  # fmt: skip
    pairing: Annotated[
        Pairing,
        Setting(
            help="Several knobs: cross (all combinations) or zip (one to one).", panel=POINTS, metavar="cross|zip",
            check=choice("cross", "zip"),
        ),
    ] = "cross"  # fmt: skip
    sample: Annotated[
        Sampling | None,
        Setting(
            help="Only some combinations: stratified, lhs or boundary.", panel=POINTS, metavar="HOW",
            check=choice("stratified", "lhs", "boundary"),
        ),
    ] = None  # fmt: skip
    num_points: Annotated[
        int | None, Setting(help="With --sample: how many.", panel=POINTS, metavar="N", check=whole(1))
    ] = None
    start_from: Annotated[
        str | None,
        Setting(
            help="Drop smaller values.", panel=POINTS, metavar="VALUE", check=Check("a value", str),
            python="str | float | None",
        ),
    ] = None  # fmt: skip
    order: Annotated[
        Order,
        Setting(
            help="given, ascending or descending (the costliest first).", panel=POINTS, metavar="ORDER",
            check=choice("given", "ascending", "descending"),
        ),
    ] = "given"  # fmt: skip
    initial_scale: Annotated[
        tuple[ScaleStep, ...],
        Setting(
            help="With -b N: the part of N that the first value starts with (4=1,8=0.75,12=0.5,0.4: all of N up to 4, "
            "0.4 of it above 12).",
            panel=BATCH, metavar="STEPS", check=Check("steps", _read_scale), default=None,
            python="str | Sequence[tuple[float, float]] | None",
            python_help="With batch_size=N: the part of N that the first value starts with ('4=1,8=0.75,12=0.5,0.4').",
        ),
    ] = SEED_SCALE  # fmt: skip
    batch_size_for: Annotated[
        tuple[tuple[Mapping[str, str], int], ...],
        Setting(
            help="One point's size by hand: 13=24, or max_crops=13,max_new_tokens=8=24.", panel=BATCH,
            metavar="POINT=N", check=Check("sizes of points", _read_sizes), many=True,
            python="str | Sequence[str] | Mapping[object, int] | None",
            python_help="One point's size by hand: {13: 24}, or {'max_crops=13,max_new_tokens=8': 24}.",
        ),
    ] = ()  # fmt: skip
    latency_samples: Annotated[
        int,
        Setting(
            help="Samples timed alone at each point; 0 for none, 100 for a P99.", panel=CHOICE, metavar="N",
            check=whole(0),
        ),
    ] = LATENCY_SAMPLES  # fmt: skip
    within: Annotated[
        float,
        Setting(
            help="Recommend the cheapest point within this fraction of the best accuracy.", panel=CHOICE,
            metavar="FRACTION", check=fraction(),
        ),
    ] = 0.01  # fmt: skip
    target_latency_ms: Annotated[
        float | None,
        Setting(
            help="Also the cheapest that answers one sample in this time.", panel=CHOICE, metavar="MS",
            check=number(above=0),
        ),
    ] = None  # fmt: skip
    target_memory: Annotated[
        int | str | None,
        Setting(help="Also the cheapest that stays below this peak.", panel=CHOICE, metavar="SIZE", check=byte_size()),
    ] = None
    resume: shared.Resume = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.axes:
            raise RequestError(f"{named('knob')} is missing: name the knob to profile, such as max_crops")
        shared.check_new_tokens(self.base.max_new_tokens, self.axes)
        if (self.sample is None) != (self.num_points is None):
            raise RequestError(
                f"{named('sample')} and {named('num_points')} go together: {written('sample', 'lhs')} "
                f"{written('num_points', '20')}"
            )
        if self.sample is not None and self.pairing == "zip":
            raise RequestError(f"{named('sample')} draws from all combinations: leave {written('pairing', 'zip')} out")
        if self.start_from is not None and len(self.axes) > 1:
            raise RequestError(f"{named('start_from')}: with several knobs, give the values of each themselves")
        if self.batch_size_for and self.base.cost_cap is not None:
            raise RequestError(f"{named('batch_size_for')} counts samples: it cannot go with {named('cost_cap')}")

    @property
    def target_memory_bytes(self) -> int | None:
        """The bound on memory in bytes."""
        return None if self.target_memory is None else parse_bytes(self.target_memory, name="target_memory")

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["base"] = self.base.to_json()
        fields["axes"] = {name: None if values is None else list(values) for name, values in self.axes.items()}
        fields["initial_scale"] = [
            [None if up_to == float("inf") else up_to, scale] for up_to, scale in self.initial_scale
        ]
        fields["batch_size_for"] = [{"point": dict(point), "batch_size": size} for point, size in self.batch_size_for]
        return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """A profile, and where its record goes."""

    request: ProfileRequest
    values: Annotated[
        tuple[str, ...] | None,
        Setting(
            help="With one --knob NAME: 2-13, 2-13:3 or 2,4,8.", panel=POINTS, metavar="LIST",
            check=Check("a list", _listed), python="str | Sequence[object] | None",
            python_help="With one knob: '2-13', '2-13:3' or [2, 4, 8].",
        ),
    ] = None  # fmt: skip
    explain_speed: Annotated[
        bool,
        Setting(
            help="Instead of a profile: switch off each optimisation in turn and measure its effect.", only="flags"
        ),
    ] = False
    output: shared.RunFolder = None
    log: shared.Log = ()
    json_output: shared.JsonOutput = False

    @staticmethod
    def arranged(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`--values` are the values of the one knob."""
        listed, axes = values.get("values"), values.get("knob", {})
        if listed is None or not axes:
            return values
        if len(axes) != 1 or any(one is not None for one in axes.values()):
            raise RequestError(
                f"{given('values', ','.join(map(str, listed)))}: it goes with one {written('knob', 'NAME')}; for "
                "several give each its own values"
            )
        return {**values, "knob": dict.fromkeys(axes, listed)}

    def __post_init__(self) -> None:
        if self.explain_speed:
            shared.check_comparison("explain_speed", resume=self.request.resume)
        shared.check_resume(self.request.resume, self.output)
        shared.check_log(self.log, "explain_speed", asked=self.explain_speed)
        for name, values in self.request.axes.items():
            if self.explain_speed and (values is None or len(values) != 1):
                raise RequestError(
                    f"{named('explain_speed')}: give one value of {name}, such as {written('knob', f'{name}=12')}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How large the demonstration is."""

    questions: Annotated[
        int, Setting(help="How many questions about how many boards.", metavar="N", check=whole(8))
    ] = 200
    memory_limit: Annotated[
        str, Setting(help="The memory of the simulated card.", metavar="SIZE", check=byte_size())
    ] = "80MiB"  # the costliest values do not fit 64 boards into it, as on a card that is too small
    only_files: Annotated[bool, Setting(help="Write the model and the boards, for commands of your own, and stop.")] = (
        False
    )
    resume: shared.Resume = False
    output: shared.RunFolder = None
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        check_fields(self)
        shared.check_resume(self.resume, self.output)
