"""A line of a run's checklist, and what it is made over: a run's own figures, or those of each run inside it.

Figures come from the records alone; one that is missing stays missing. It does not know which checks there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from brim.advice.run_reader import Run, entries, epoch_rows, mapping, open_run, value_at
from brim.errors import DoesNotFitError, RequestError, plural
from brim.monitor.trace_file import read_rows
from brim.settings.check_settings import CheckLimits
from brim.storage.files import read_json
from brim.units import number

__all__ = [
    "Asked", "CheckLine", "CheckVerdict", "CheckedPart", "CheckedRun", "JudgedFigure", "checked_parts", "counts_text",
    "line_of", "not_judged", "part_noun", "percent",
]  # fmt: skip

CheckVerdict = Literal["pass", "fail", "unknown"]
TITLES = {
    "failed": "failures",
    "out_of_memory": "out of memory",
    "alloc_retries": "allocator retries",
    "gpu_utilisation": "GPU utilisation",
    "waiting_for_data": "waiting for data",
    "throttling": "throttling",
    "peak_memory": "peak memory",
    "epoch_seconds": "epoch time",
    "total_seconds": "total time",
    "speed_up": "speed-up",
}
_HOSTS = ("cpu", "mps")  # devices without NVML and without a caching allocator that counts its retries


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckLine:
    """One line of the checklist."""

    name: str
    verdict: CheckVerdict | None  # None: shown, and not judged because no limit was asked for
    value: Any  # the number, in seconds, bytes or as a fraction; None: not known
    limit: Any  # what it was held to; None: nothing
    text: str  # the number and the limit for people
    interval: tuple[float, float] | None = None  # of a speed-up

    @property
    def title(self) -> str:
        """What people call it."""
        return TITLES[self.name]

    def to_json(self) -> dict[str, Any]:
        """The line as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class JudgedFigure:
    """What one run, or one of the runs inside it, has to say on one line."""

    ok: bool | None  # None: could not be judged
    value: float | None = None
    text: str = ""  # the value
    why: str = ""  # it failed, or could not be judged
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Asked:
    """The limit of a line: as it is recorded and as it is written, and which figure is the worst."""

    limit: Any
    words: str
    worst: Callable[..., JudgedFigure] = max


def line_of(name: str, found: Sequence[JudgedFigure], asked: Asked, *, noun: str) -> CheckLine:
    """One line over all figures: the worst of them, and unknown where any of them is."""
    failed = [one for one in found if one.ok is False]
    unknown = [one for one in found if one.ok is None]
    several = len(found) > 1
    if failed:
        worst = _worst(failed, asked)
        where = f"; {len(failed)} of {plural(len(found), noun)}, {worst.label} the worst" if several else ""
        text = f"{worst.text}, {worst.why}{where}"
        return CheckLine(name=name, verdict="fail", value=worst.value, limit=asked.limit, text=text)
    if unknown or not found:
        why = unknown[0].why if unknown else f"no {noun} ran"
        where = f" ({len(unknown)} of {plural(len(found), noun)})" if several else ""
        value = unknown[0].value if unknown else None
        return CheckLine(name=name, verdict="unknown", value=value, limit=asked.limit, text=f"{why}{where}")
    worst = _worst(found, asked)
    alike = all(one.text == worst.text for one in found)
    where = (f" in each of {plural(len(found), noun)}" if alike else f" at {worst.label}, the worst") if several else ""
    words = f" ({asked.words})" if asked.words else ""
    return CheckLine(
        name=name, verdict="pass", value=worst.value, limit=asked.limit, text=f"{worst.text}{where}{words}"
    )


def _worst(found: Iterable[JudgedFigure], asked: Asked) -> JudgedFigure:
    return asked.worst(found, key=lambda one: one.value if one.value is not None else 0.0)


def not_judged(line: CheckLine, *, more: str = "") -> CheckLine | None:
    """A figure that nobody set a limit to: shown where it is known."""
    if line.verdict != "pass":
        return None
    return dataclasses.replace(line, verdict=None, text=f"{line.text}{more}")


def counts_text(lines: Sequence[CheckLine], *, reasons: bool = True) -> str:
    """`5 passed, 1 failed (GPU utilisation 12.0 %, below 30 %), 2 could not be judged`."""
    failed = [line for line in lines if line.verdict == "fail"]
    unknown = sum(line.verdict == "unknown" for line in lines)
    parts = [f"{sum(line.verdict == 'pass' for line in lines)} passed"]
    if failed:
        why = "; ".join(f"{line.title} {line.text}" for line in failed)
        parts.append(f"{len(failed)} failed ({why})" if reasons else f"{len(failed)} failed")
    if unknown:
        parts.append(f"{unknown} could not be judged")
    return ", ".join(parts)


def percent(fraction: float) -> str:
    """A limit as people write it: `30 %`."""
    return f"{100 * fraction:g} %"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedPart:
    """The figures of one run; several where a run is made of runs."""

    label: str  # which of several; empty: the run itself
    summary: Mapping[str, Any]
    device: str | None = None  # None: not recorded
    folders: tuple[Path, ...] = ()  # with traces and epochs; none: the run inside could not be read
    kind: str = ""
    resumed: bool = False  # an earlier start did some of the work, and these figures are not of that
    failed: bool = False  # it has no figures
    did_not_fit: bool = False  # that is why it failed

    @property
    def on_host(self) -> bool:
        """Whether it ran without a GPU."""
        return self.device in _HOSTS

    def throttle_samples(self) -> tuple[int, dict[str, int]] | None:
        """How many samples of the card have its throttle reasons, and how many have each; None: none has.

        Of several ranks every trace must be there.
        """
        ranks = int(number(self.summary.get("ranks")) or 1)
        traces = [read_rows(path) for folder in self.folders for path in sorted(folder.glob("monitor*.csv"))]
        known = [
            [row["throttle_reasons"] for row in rows if row.get("throttle_reasons") is not None] for rows in traces
        ]
        if len(known) < ranks or not all(known):
            return None
        counts: dict[str, int] = {}
        for reason in (reason for reasons in known for some in reasons for reason in set(some)):
            counts[reason] = counts.get(reason, 0) + 1
        return sum(map(len, known)), counts

    def epoch_seconds(self) -> list[float]:
        """What the steps of each epoch took."""
        rows = [row for folder in self.folders for row in epoch_rows(folder)]
        return [seconds for row in rows if (seconds := row.get("seconds")) is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run with its parts, what it is held to, and the run that it is compared with."""

    run: Run
    parts: Sequence[CheckedPart]
    limits: CheckLimits
    baseline: CheckedRun | None = None


def part_noun(run: Run) -> str:
    """What the runs inside a run are called."""
    return {"profile": "point", "sweep": "experiment"}.get(run.kind, "run")


def checked_parts(run: Run) -> list[CheckedPart]:
    """The points of a profile, the experiments of a sweep, else the run itself."""
    if run.profile is not None:
        knobs = run.profile["knobs"]
        return [
            _inner_part(run, ", ".join(f"{knob}={entry.get(knob)}" for knob in knobs), entry, "done")
            for entry in entries(run.profile["summary"])
        ]
    if run.kind == "sweep":
        document = mapping(read_json(run.folder / "sweep.json"))
        return [
            _inner_part(run, str(entry.get("id")), mapping(entry.get("result")), "completed")
            for entry in entries(document.get("experiments"))
        ]
    return [_own_part(run, "")]


def _inner_part(outer: Run, label: str, entry: Mapping[str, Any], done: str) -> CheckedPart:
    """A run inside another one; of one whose folder cannot be read, what the outer one knows of it."""
    if entry.get("state") != done:
        full = entry.get("failure") == "out_of_memory" or entry.get("exit_code") == DoesNotFitError.exit_code
        return CheckedPart(label=label, summary={}, failed=True, did_not_fit=full)
    folder = outer.inside(entry.get("folder"))
    try:
        run = open_run(folder) if folder is not None else None
    except RequestError:
        run = None
    if run is None:
        return CheckedPart(label=label, summary=entry, device=_device(outer))
    return _own_part(run, label)


def _own_part(run: Run, label: str) -> CheckedPart:
    earlier = number(run.summary.get("num_resumed"))
    summary = run.summary
    folders: tuple[Path, ...] = (run.folder,)
    if isinstance(summary.get("runs"), list):
        summary, folders = _seeds(run)
    return CheckedPart(
        label=label, summary=summary, device=_device(run), folders=folders,
        kind=run.kind, resumed=bool(run.request.get("resume")) if earlier is None else earlier > 0,
    )  # fmt: skip


def _device(run: Run) -> str | None:
    """As the plan names it, or the environment, where there is no plan."""
    device = run.plan.get("device") or run.environment.get("device")
    return device if isinstance(device, str) else None


def _seeds(run: Run) -> tuple[Mapping[str, Any], tuple[Path, ...]]:
    """A training's figures over seeds, with the waiting of all of them; and where their traces and epochs are."""
    inner = [
        place for row in entries(run.summary.get("runs"))
        if row.get("error") is None and (place := run.inside(row.get("folder"))) is not None
    ]  # fmt: skip
    summaries = [mapping(mapping(read_json(place / "run.json")).get("summary")) for place in inner]
    waited = [number(value_at(summary, "loader.wait_seconds")) for summary in summaries]
    known = [seconds for seconds in waited if seconds is not None]
    whole = sum(known) if known and len(known) == len(waited) else None
    # Seeds that were trained at once have their curves and traces in the outer folder, and epochs in their own.
    return {**run.summary, "loader": {"wait_seconds": whole}}, (run.folder, *inner)
