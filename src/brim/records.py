"""The frozen records that cross layers, and their JSON.

A record holds plain values only: no tensor, no device object, no open file. `to_json` gives what the
command line prints and the cache stores; `from_json` reads it back and refuses another schema, and values of a wrong
type or out of range.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from brim.errors import RequestError

__all__ = [
    "FORECAST_SCHEMA", "PART_NAMES", "PLAN_SCHEMA", "BatchSizes", "Forecast", "MemoryFigures", "Mode", "ModuleBytes",
    "Objective", "Plan", "Probe", "SearchSeconds", "Unit", "Verdict", "settings_in_words",
]  # fmt: skip

FORECAST_SCHEMA = "brim.forecast/1"
PLAN_SCHEMA = "brim.plan/1"

Objective = Literal["fastest", "largest"]
Mode = Literal["forward", "generate", "train"]
Unit = Literal["samples", "tokens", "kv_bytes"]  # kv_bytes: of keys and values, in a generation pool
Verdict = Literal["fits", "oom", "thrashes", "size_limit", "fatal", "timeout"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """One trial of one size: whether it ran, what it took, how fast it was."""

    batch_size: int
    verdict: Verdict
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int = 0
    step_seconds: float | None = None
    samples_per_second: float | None = None
    steps: int = 0  # steady steps timed, after the warm-up
    needed_bytes: int | None = None  # of a size that ran out of memory: at least this much
    growth_bytes_per_step: int = 0  # more in use after every step than before it: something is kept
    cost: int | None = None  # of the whole batch with its padding, where sizes are found by cost
    detail: str = ""  # why it is not `fits`, or what the size was tried for, in one line
    warm_up_seconds: float | None = None  # the batch made, and the first steps, up to where one failed
    steady_seconds: float | None = None  # the steps that were timed
    release_seconds: float | None = None  # their memory given back

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise RequestError(f"not a probe: verdict is {self.verdict!r}, expected one of {get_args(Verdict)}")

    @property
    def fits(self) -> bool:
        """Only a size that ran several steady steps fits; a time-out or a crash never does."""
        return self.verdict == "fits"

    def to_json(self) -> dict[str, Any]:
        """The probe as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Probe:
        """Read a probe back; a wrong value is a `RequestError`, fields of a later version are ignored."""
        return cls(**_checked_fields(cls, data, "probe"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sizes of the batches a run made; the median counts items, so a ragged last batch hardly moves it."""

    smallest: int
    median: int
    largest: int
    per_rank: tuple[int, ...] | None = None

    @classmethod
    def of(cls, counts: Sequence[int]) -> BatchSizes | None:
        """From the number of items in each batch; None when there was no batch."""
        if not counts:
            return None
        half, ordered = sum(counts) / 2, sorted(counts)
        seen = 0
        for count in ordered:
            seen += count
            if seen >= half:
                break
        return cls(smallest=ordered[0], median=count, largest=ordered[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """The memory limit a plan was made under, and what it leaves free."""

    limit_bytes: int | None  # None: no limit could be read
    headroom_bytes: int | None  # limit less the peak reserved at the chosen size
    used_by_others_bytes: int = 0  # by other processes on the same device, when the search began


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSeconds:
    """Where the seconds of a search went, from a built model to its answer; the parts add up to `total`."""

    total: float
    forecast: float = 0.0  # steps traced, the allocator replayed, sizes chosen
    warm_up: float = 0.0  # of all probes, like the two that follow
    steady: float = 0.0
    release: float = 0.0
    state: float = 0.0  # a copy of what steps change, made and put back, and the device cleared before and after
    ranks: float = 0.0  # waiting for the other ranks
    other: float = 0.0  # the limit and the environment read; a child process started

    @classmethod
    def of(cls, probes: Sequence[Probe], *, total: float, forecast: float, state: float, ranks: float) -> SearchSeconds:
        """With those of the probes added up, and `other` for what is left."""
        warm_up = sum(probe.warm_up_seconds or 0.0 for probe in probes)
        steady = sum(probe.steady_seconds or 0.0 for probe in probes)
        release = sum(probe.release_seconds or 0.0 for probe in probes)
        other = max(total - forecast - warm_up - steady - release - state - ranks, 0.0)
        return cls(
            total=total, forecast=forecast, warm_up=warm_up, steady=steady, release=release, state=state, ranks=ranks,
            other=other,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The size chosen, in its unit, and the evidence for it."""

    unit: Unit
    size: int
    batch_size_max: int  # the largest size seen to fit
    batch_size_max_estimate: int | None  # the largest the byte model expects to fit; never used unverified
    objective: Objective
    reason: str
    cached: bool
    device: str
    memory: MemoryFigures
    probes: tuple[Probe, ...]
    fingerprint: str | None = None
    notes: tuple[str, ...] = ()  # what the user should know: neighbours on the card, sizes per rank, …
    batch_sizes_per_rank: tuple[int, ...] | None = None
    seconds: SearchSeconds | None = None  # of the search that gave this answer; None where a run found it on the way

    @property
    def batch_size(self) -> int:
        """The chosen number of samples in a batch (for a plan in tokens: the cost cap itself)."""
        return self.size

    @property
    def of_pool(self) -> bool:
        """Whether answers came from a pool, which is as large as fits: the size is no cap on batches."""
        return self.unit == "kv_bytes"

    @property
    def oom_events(self) -> int:
        """How many probes ran out of memory."""
        return sum(probe.verdict == "oom" for probe in self.probes)

    def chosen_probe(self) -> Probe | None:
        """The fitting probe at the chosen size, or None when the size was not tried in this search."""
        return next((p for p in reversed(self.probes) if p.batch_size == self.size and p.fits), None)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, schema first."""
        data = {"schema": PLAN_SCHEMA, **dataclasses.asdict(self), "batch_size": self.batch_size}
        data["probes"] = [probe.to_json() for probe in self.probes]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan back; another schema or a wrong value is a `RequestError`."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != PLAN_SCHEMA:
            raise RequestError(f"not a plan: schema is {schema!r}, expected {PLAN_SCHEMA!r}")
        probes, memory, seconds = data.get("probes"), data.get("memory"), data.get("seconds")
        if not isinstance(probes, Sequence) or isinstance(probes, str):
            raise RequestError(f"not a plan: probes is {probes!r}, expected a list")
        read = {
            "probes": tuple(Probe.from_json(probe) for probe in probes),
            "memory": MemoryFigures(**_checked_fields(MemoryFigures, memory, "plan: memory")),
        }
        if seconds is not None:
            read["seconds"] = SearchSeconds(**_checked_fields(SearchSeconds, seconds, "plan: seconds"))
        return cls(**_checked_fields(cls, {**data, **read}, "plan"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleBytes:
    """The bytes of one module at the allocated peak, without those of modules that have a row of their own."""

    module: str  # its path, "" for the model itself; in brackets what no module takes: `(batch)`
    bytes: int
    parts: Mapping[str, int]  # by what they are for; they sum to `bytes`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The peak memory of one batch size on one card, obtained without running on it."""

    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int  # as nvidia-smi would show: reserved, and the CUDA context
    breakdown: Mapping[str, int]  # sums to `device_bytes`
    fits: bool  # within `limit_bytes`
    limit_bytes: int  # what may be on the card: its memory less the margin
    batch_size_max: int | None  # the largest size that fits; None: not asked for; 0: none does
    device: str
    unit: Unit = "samples"
    approximate: str | None = None  # why the figures are less sure than usual, or None
    trace_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    made_for: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the settings that its bytes depend on
    by_module: tuple[ModuleBytes, ...] = ()  # most bytes first; sums to `peak_allocated_bytes`; empty: not asked for

    def to_json(self) -> dict[str, Any]:
        """The forecast as plain JSON values, schema first."""
        plain = dataclasses.asdict(self)
        return {"schema": FORECAST_SCHEMA, **plain, "by_module": list(plain["by_module"])}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Forecast:
        """Read a forecast back; another schema is a `RequestError`."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != FORECAST_SCHEMA:
            raise RequestError(f"not a forecast: schema is {schema!r}, expected {FORECAST_SCHEMA!r}")
        fields = _known_fields(cls, data)
        modules = tuple(ModuleBytes(**_checked_fields(ModuleBytes, one, "row")) for one in fields.get("by_module", ()))
        return cls(**{**fields, "notes": tuple(fields.get("notes", ())), "by_module": modules})


PART_NAMES = {  # of a forecast's breakdown, in words
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "inputs": "the batch itself",
    "activations": "activations",
    "kv_cache": "keys and values",
    "temporary": "temporary",
    "workspaces": "workspaces (cuBLAS, cuDNN)",
    "communication": "communication buckets",
    "cached": "cached by the allocator",
    "context": "CUDA context",
}


def settings_in_words(made_for: Mapping[str, Any]) -> str:
    """What a forecast was made for, beside the model: "8 classes, frames 16, size 112, float32, adam"."""
    words = [f"{made_for['classes']:,} classes"] if made_for.get("classes") else []
    words += [f"{name} {value}" for name, value in sorted((made_for.get("knobs") or {}).items())]
    words += [str(made_for[name]) for name in ("dtype", "optimizer") if made_for.get(name)]
    return ", ".join([*words, *(["gradient checkpointing"] if made_for.get("gradient_checkpointing") else [])])


def _known_fields(record: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in data.items() if name in names}


# Numbers start at 0 but for these: sizes start at 1, and a peak above the limit leaves a negative headroom.
_SMALLEST = {"size": 1, "batch_size": 1, "batch_size_max": 1, "batch_sizes_per_rank": 1, "headroom_bytes": -math.inf}


def _checked_fields(record: type, data: Any, what: str) -> dict[str, Any]:
    """The record's fields out of a JSON object, each of the type that the record declares and within its range."""
    if not isinstance(data, Mapping):
        raise RequestError(f"not a {what}: it is {data!r}, expected an object")
    hints = get_type_hints(record)
    checked: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if field.name not in data:
            if field.default is dataclasses.MISSING:
                raise RequestError(f"not a {what}: {field.name} is missing")
            continue
        value = data[field.name]
        if not _is_of(value, hints[field.name], _SMALLEST.get(field.name, 0)):
            raise RequestError(f"not a {what}: {field.name} is {value!r}")
        checked[field.name] = tuple(value) if isinstance(value, list) else value
    return checked


def _is_of(value: Any, hint: Any, smallest: float) -> bool:
    """Whether a value read from JSON is of an annotated type: a number is finite and no bool, a tuple is a list."""
    origin = get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_of(value, member, smallest) for member in get_args(hint))
    if origin is tuple:
        member = get_args(hint)[0]
        return isinstance(value, (list, tuple)) and all(_is_of(one, member, smallest) for one in value)
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and smallest <= value < math.inf
    return isinstance(value, hint)
