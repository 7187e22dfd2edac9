"""From a run's folder to its documents; a folder that is none, or holds a damaged one, is a wrong request.

It knows which files a run leaves and which schema they have, not what is shown of them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from brim.errors import RequestError
from brim.monitor.trace_file import read_rows
from brim.profiling.documents import PROFILE_SCHEMA
from brim.settings.report_settings import REPORT
from brim.storage.files import read_json
from brim.storage.run_folder import RUN_SCHEMA
from brim.units import duration_text, number

__all__ = [
    "Run",
    "Samples",
    "data_keys",
    "entries",
    "epoch_rows",
    "mapping",
    "open_run",
    "throughput_curve",
    "value_at",
]

_FILES = ("run.json", "profile.json", "report.html", "samples.jsonl")
# What a run leaves before its run.json: an evaluation, a training, seeds of one, `brim ood`, a sweep.
_UNFINISHED = ("samples.jsonl", "steps.jsonl", "checkpoint.json", "cells.jsonl", "journal.jsonl")
_NOT_DATA = ("model", "settings", "batch")  # parts of a fingerprint


class Samples:
    """The lines of a samples.jsonl, read anew by each loop and never held all at once: there may be a million.

    `damaged` counts the lines of the last loop that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged = 0
        try:
            file = self.path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                entry = _parsed(line)
                if entry is not None:
                    yield entry
                elif line.strip():
                    self.damaged += 1


def _parsed(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None for one that a kill cut, or that is something else."""
    try:
        entry = json.loads(line, parse_constant=_nothing)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its folder and its documents."""

    folder: Path
    kind: str
    document: Mapping[str, Any]  # run.json
    profile: Mapping[str, Any] | None = None  # profile.json

    @property
    def request(self) -> Mapping[str, Any]:
        """What was asked; a request around another one (a profile's around an evaluation's) is one request."""
        asked = mapping(self.document.get("request"))
        return {**mapping(asked.get("base")), **{name: value for name, value in asked.items() if name != "base"}}

    @property
    def environment(self) -> Mapping[str, Any]:
        return mapping(self.document.get("environment"))

    @property
    def plan(self) -> Mapping[str, Any]:
        return mapping(self.document.get("plan"))

    @property
    def summary(self) -> Mapping[str, Any]:
        return mapping(self.document.get("summary"))

    def samples(self) -> Samples:
        """Every sample's line; none where the run has no samples."""
        return Samples(self.folder / "samples.jsonl")

    def parts(self) -> list[Path]:
        """The folders of the runs inside this one that have ended."""
        entries = [] if self.profile is None else self.profile["summary"]
        places = [self.inside(entry.get("folder")) for entry in entries]
        return [place for place in places if place is not None and (place / "run.json").exists()]

    def inside(self, name: object) -> Path | None:
        """A folder that a document names; None where it names none, or one outside of the run."""
        if not isinstance(name, str) or not name:
            return None
        place = self.folder / name
        try:
            return place if place.resolve().is_relative_to(self.folder.resolve()) else None
        except (OSError, ValueError):  # no name that a file system takes
            return None

    @property
    def limit_bytes(self) -> float | None:
        """The memory limit that the plan was made for."""
        return number(value_at(self.plan, "memory.limit_bytes"))

    @property
    def duration(self) -> str:
        """How long it took, in words."""
        return duration_text(self.document.get("duration_seconds"))

    def report_of(self, name: object) -> str | None:
        """Where the page of a run inside this one lies, relative to this one's; None where it has none."""
        place = self.inside(name)
        return quote(f"{name}/{REPORT}") if place is not None and (place / REPORT).exists() else None

    def trace(self) -> list[dict[str, Any]]:
        """The rows of monitor.csv, of the first rank."""
        return read_rows(self.folder / "monitor.csv")


def open_run(path: Path) -> Run:
    """The run in a folder (or of one of its files); anything else is a `RequestError` that says what to give."""
    folder = path.parent if path.name in _FILES and path.is_file() else path
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise RequestError(f"{path}: {what}; give a run's folder, such as runs/eval-20260131-093000")
    if not (folder / "run.json").exists():
        if (folder / "profile.json").exists():
            alone = _read_profile(folder)
            return Run(folder=folder, kind="profile", document=alone, profile=alone)
        raise RequestError(_no_run(folder))
    document = _read_object(folder / "run.json")
    _check_schema(folder / "run.json", document, RUN_SCHEMA)
    kind = document.get("kind")
    if not isinstance(kind, str) or not kind:
        raise RequestError(f"{folder / 'run.json'}: it does not say which kind of run it is; run the command again")
    profile = _read_profile(folder) if kind == "profile" else None
    return Run(folder=folder, kind=kind, document=document, profile=profile)


def _read_profile(folder: Path) -> Mapping[str, Any]:
    path = folder / "profile.json"
    if not path.exists():
        raise RequestError(f"{folder}: the profile has no profile.json; finish it with brim profile … --resume")
    document = _read_object(path)
    _check_schema(path, document, PROFILE_SCHEMA)
    entries, knobs = document.get("summary"), document.get("knobs")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(f"{path}: its summary is not a list of points: the file is damaged; run the profile again")
    if not isinstance(knobs, list) or not knobs or not all(isinstance(knob, str) for knob in knobs):
        raise RequestError(f"{path}: it does not name its knobs: the file is damaged; run the profile again")
    return document


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_nothing)
    except ValueError as error:  # also bytes that are not UTF-8
        raise RequestError(f"{path}: it is not JSON ({error}): the file is damaged; run the command again") from error
    except RecursionError as error:
        raise RequestError(f"{path}: it is nested too deeply to be a run's; run the command again") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(document, dict):
        raise RequestError(f"{path}: it is not a JSON object, so no run wrote it; give a run's folder")
    return document


def _check_schema(path: Path, document: Mapping[str, Any], expected: str) -> None:
    schema = document.get("schema")
    if schema == expected:
        return
    name, _, version = str(schema).rpartition("/")
    if name and name == expected.rpartition("/")[0]:
        raise RequestError(
            f"{path}: schema is {schema}, this brim reads {expected}; use the brim that wrote version {version}"
        )
    raise RequestError(
        f"{path}: schema is {schema!r}, expected {expected!r}: no run of brim wrote it; give a run's folder"
    )


def _no_run(folder: Path) -> str:
    if any((folder / name).exists() for name in _UNFINISHED):
        return f"{folder}: the run has not finished (no run.json); continue with --resume -o {folder}"
    inside = sorted(file.parent for name in ("run.json", "profile.json") for file in folder.glob(f"*/{name}"))
    if inside:
        return f"{folder}: no run.json in it, but in folders below; give one, such as {inside[-1]}"
    return f"{folder}: no run.json in it; give the folder of a run: what -o named, or runs/<command>-<time>"


def _nothing(_: str) -> None:
    """NaN and the infinities, which are not JSON: unknown."""


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it has fields, else none: a document may hold anything."""
    return value if isinstance(value, dict) else {}


def entries(value: object) -> list[Mapping[str, Any]]:
    """Those of a list that have fields."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """What a document has at `a.b.c`; None where there is nothing."""
    *outer, last = path.split(".")
    for name in outer:
        document = mapping(document.get(name))
    return document.get(last)


def throughput_curve(summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Seconds, and samples done by then; empty where any of it is damaged."""
    recorded = summary.get("throughput")
    points: list[tuple[float, float]] = []
    for point in recorded if isinstance(recorded, list) else ():
        pair = [number(one) for one in point] if isinstance(point, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            return []
        points.append((pair[0], pair[1]))
    return points


def epoch_rows(folder: Path) -> list[dict[str, float | None]]:
    """The rows of a training's epochs.csv with their figures as numbers; none where there is no such file."""
    try:
        with (folder / "epochs.csv").open(encoding="utf-8", errors="replace", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, csv.Error):
        return []
    return [{name: _figure(value) for name, value in line.items() if isinstance(name, str) and name} for line in lines]


def _figure(value: object) -> float | None:
    try:
        return number(float(str(value)))
    except ValueError:
        return None


def data_keys(runs: Sequence[Run]) -> list[Any]:
    """What distinguishes the data of runs: its content where every run recorded that, else what was asked for."""
    contents = [_content_of_data(run) for run in runs]
    return list(contents) if all(contents) else [_data_asked(run) for run in runs]


def _content_of_data(run: Run) -> dict[str, str]:
    """The parts of a run's fingerprint that name its data; a profile's are those of its values."""
    documents = [run.document, *(mapping(read_json(part / "run.json")) for part in run.parts()[:1])]
    for document in documents:
        known = str(value_at(document, "summary.fingerprint") or "")
        parts = dict(part.split(":", 1) for part in known.split() if ":" in part)
        found = {name: value for name, value in parts.items() if name not in _NOT_DATA}
        if found:
            return found
    return {}


def _data_asked(run: Run) -> list[Any]:
    asked = [run.request.get(name) for name in ("data", "split", "limit", "mapping", "images")]
    data = value_at(run.request, "settings.data")
    kept = {name: value for name, value in data.items() if name != "num_workers"} if isinstance(data, dict) else None
    return [*asked, kept]
