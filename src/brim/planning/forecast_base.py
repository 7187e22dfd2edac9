"""Forecasts that are kept for later checks: the file of `brim forecast --save`, written and read.

A base may be of another version, or the output of `brim forecast --json`; what is read is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError, first_line
from brim.records import FORECAST_SCHEMA
from brim.settings.caller import given, named
from brim.settings.forecast_settings import Allowance
from brim.storage.files import write_json

__all__ = [
    "FORECASTS_SCHEMA", "Base", "Document", "WorkloadDocument", "base_document", "base_of", "read_base", "save_base",
    "shown_size", "sizes_of", "versions",
]  # fmt: skip

FORECASTS_SCHEMA = "brim.forecasts/1"
_TIMES = ("trace_seconds",)  # left out of a base, so that saving twice gives the same file
Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadDocument:
    """A workload's forecasts, one for each card; none where it could not be forecast."""

    name: str
    forecasts: Sequence[Document] = ()
    error: str | None = None
    named: bool = True  # or else by its model, as no name was given
    allow: Allowance | None = None  # instead of that of the whole check

    def to_json(self) -> dict[str, Any]:
        """As a base and `--json` have it."""
        return {
            "name": self.name,
            "error": self.error,
            "allow": None if self.allow is None else str(self.allow),
            "forecasts": [dict(one) for one in self.forecasts],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What was kept: forecasts by workload, and the versions that made them."""

    file: str
    workloads: Mapping[str, Sequence[Document]]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of brim and torch; none: not known


def base_document(workloads: Sequence[WorkloadDocument]) -> dict[str, Any]:
    """Workloads as one document, with the versions that made them."""
    return {"schema": FORECASTS_SCHEMA, **versions(), "workloads": [one.to_json() for one in workloads]}


def save_base(file: Path, workloads: Sequence[WorkloadDocument]) -> None:
    """Keep forecasts for later checks; the same forecasts give the same bytes."""
    document = base_document(workloads)
    for workload in document["workloads"]:
        workload["forecasts"] = [
            {name: value for name, value in one.items() if name not in _TIMES} for one in workload["forecasts"]
        ]
        del workload["error"], workload["allow"]
    write_json(file, document)


def read_base(file: Path) -> Base:
    """The forecasts in a file of `--save`, or of `--json`; a `RequestError` for one that is neither."""
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RequestError(
            f"{given('against', file)}: there is no such file; write it with {named('save')}, where the forecast is "
            "as it should be"
        ) from None
    except IsADirectoryError as error:
        raise RequestError(f"{given('against', file)}: it is a folder; give a file of {named('save')}") from error
    except OSError as error:
        raise RequestError(f"{given('against', file)}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{given('against', file)}: it is no JSON file ({first_line(error)}); write it again with {named('save')}"
        ) from error
    return base_of(document, str(file))


def base_of(document: Any, file: str = "") -> Base:
    """The forecasts of a document, as `--save` or `--json` write it."""
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema not in (FORECAST_SCHEMA, FORECASTS_SCHEMA):
        raise RequestError(
            f"{given('against', file)}: it is no forecast (schema {schema!r}); write one with {named('save')}"
        )
    found: dict[str, Sequence[Document]] = {}
    try:
        for one in document["workloads"] if schema == FORECASTS_SCHEMA else [_alone(document)]:
            name = str(one["name"])
            if name in found:  # as two branches merged by hand leave it
                raise ValueError(f"it has {name} twice")
            found[name] = [_checked(forecast) for forecast in one["forecasts"]]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{given('against', file)}: the forecast in it is damaged ({type(error).__name__}: {first_line(error)}); "
            f"write it again with {named('save')}"
        ) from error
    made_with = {name: str(document[name]) for name in ("brim", "torch") if name in document}
    return Base(file=file, workloads=found, versions=made_with)


def sizes_of(document: Document) -> Sequence[Document]:
    """The sizes of a forecast: those listed, or the one it is about."""
    sizes: Sequence[Document] = document.get("sizes", [document])
    return sizes


def shown_size(document: Document) -> Document:
    """The size whose figures are worth seeing: the one asked for, else the largest that fits, else the smallest."""
    sizes = sizes_of(document)
    fitting = [size for size in sizes if size["fits"]]
    at_largest = [size for size in sizes if size["batch_size"] == document["batch_size_max"]]
    return (at_largest or fitting[-1:] or list(sizes))[0]


def versions() -> dict[str, str]:
    """Of brim and torch, without what says for which CUDA torch was built."""
    from brim import __version__

    return {"brim": __version__, "torch": importlib.metadata.version("torch").partition("+")[0]}


def _alone(document: Document) -> Document:
    """What `--json` prints of one workload, as one of several."""
    forecasts = document.get("forecasts", [document])
    return {"name": str(forecasts[0].get("model") or "step"), "forecasts": forecasts}


def _checked(forecast: Document) -> Document:
    """A forecast of a file, whose fields are there and of their kind."""
    made_for = forecast.get("made_for") or {}
    forecast["gpu"]["key"].casefold()
    for settings in (made_for, made_for.get("knobs"), forecast.get("knobs")):
        (settings or {}).keys()
    _check_counts(forecast, "batch_size_max")
    for size in sizes_of(forecast):
        _check_counts(size, "batch_size", "peak_allocated_bytes", "peak_reserved_bytes")
        for row in size.get("by_module") or ():
            row["module"].split(".")
            _check_counts(row["parts"], *row["parts"].keys())
    return forecast


def _check_counts(values: Document, *names: str) -> None:
    """Sizes and bytes are whole numbers from 0; JSON has signs, fractions and NaN as well."""
    for name in names:
        if type(values[name]) is not int or values[name] < 0:
            raise TypeError(f"{name} is {values[name]!r}")
