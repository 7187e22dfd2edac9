"""The checklist of a run as judged facts: each line passes, fails, or could not be judged, with its number.

A figure that is missing, or that covers only a part of the run, never passes. Pure over a `Run`: it reads records and
runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brim.advice.check_lines import (
    Asked,
    CheckedPart,
    CheckedRun,
    CheckLine,
    JudgedFigure,
    checked_parts,
    line_of,
    not_judged,
    part_noun,
    percent,
)
from brim.advice.figure_checks import (
    MAX_THROTTLED_FRACTION,
    MAX_WAITING_FRACTION,
    epoch_seconds,
    oom_events,
    peak_memory,
    retries,
    speed_up_line,
    throttling,
    utilisation,
    waiting,
)
from brim.advice.run_reader import Run, entries, mapping, open_run
from brim.errors import RequestError
from brim.settings.caller import given
from brim.settings.check_settings import CheckLimits, CheckSettings
from brim.units import bytes_text, count_text, duration_text, number

__all__ = ["CHECKED_KINDS", "CHECKS", "CheckResult", "check_as", "check_run"]

CHECK_SCHEMA = "brim.check_run/1"
CHECKED_KINDS = ("eval", "lm-eval", "profile", "train", "sweep")  # `brim ood` is a training


def _over_parts(
    name: str, checked: CheckedRun, figure: Callable[[CheckedPart, CheckLimits], JudgedFigure], asked: Asked
) -> CheckLine:
    """One line over all parts that ran; what must not happen at all (a limit of 0) may have in those that failed."""
    parts = [part for part in checked.parts if asked.limit == 0 or not part.failed]
    found = [dataclasses.replace(figure(part, checked.limits), label=part.label) for part in parts]
    return line_of(name, found, asked, noun=part_noun(checked.run))


def _utilisation_line(checked: CheckedRun) -> CheckLine:
    least = checked.limits.min_utilisation
    asked = Asked(least, f"at least {percent(least)}", min)
    return _over_parts("gpu_utilisation", checked, utilisation, asked)


def _memory_line(checked: CheckedRun) -> CheckLine | None:
    wished = checked.limits.memory_range
    if wished is None:
        line = _over_parts("peak_memory", checked, peak_memory, Asked(None, ""))
        usable = f" of {bytes_text(checked.run.limit_bytes)} usable" if checked.run.limit_bytes is not None else ""
        return not_judged(line, more=usable)
    words = f"between {bytes_text(wished[0])} and {bytes_text(wished[1])}"
    middle = sum(wished) / 2
    asked = Asked(list(wished), words, lambda found, key: max(found, key=lambda one: abs(key(one) - middle)))
    return _over_parts("peak_memory", checked, peak_memory, asked)


def _oom_line(checked: CheckedRun) -> CheckLine:
    return _over_parts("out_of_memory", checked, oom_events, Asked(0, ""))


def _retries_line(checked: CheckedRun) -> CheckLine:
    return _over_parts("alloc_retries", checked, retries, Asked(0, ""))


def _waiting_line(checked: CheckedRun) -> CheckLine:
    asked = Asked(MAX_WAITING_FRACTION, f"at most {percent(MAX_WAITING_FRACTION)}")
    return _over_parts("waiting_for_data", checked, waiting, asked)


def _throttling_line(checked: CheckedRun) -> CheckLine:
    asked = Asked(MAX_THROTTLED_FRACTION, f"at most {percent(MAX_THROTTLED_FRACTION)}")
    return _over_parts("throttling", checked, throttling, asked)


def _epoch_line(checked: CheckedRun) -> CheckLine | None:
    most = checked.limits.max_epoch_seconds
    asked = Asked(most, f"limit {duration_text(most)}" if most is not None else "")
    line = _over_parts("epoch_seconds", checked, epoch_seconds, asked)
    return not_judged(line) if most is None else line


def _total_line(checked: CheckedRun) -> CheckLine | None:
    seconds, most = number(checked.run.document.get("duration_seconds")), checked.limits.max_total_seconds
    resumed = any(part.resumed for part in checked.parts) or bool(checked.run.request.get("resume"))
    if seconds is None:
        figure = JudgedFigure(None, why="the time was not recorded")
    elif most is not None and seconds > most:
        figure = JudgedFigure(False, seconds, duration_text(seconds), f"above {duration_text(most)}")
    elif resumed and most is not None:
        figure = JudgedFigure(
            None, seconds, why=f"{duration_text(seconds)} in this start, and an earlier start's is not known"
        )
    else:
        figure = JudgedFigure(True, seconds, duration_text(seconds) + (" in this start" if resumed else ""))
    asked = Asked(most, f"limit {duration_text(most)}" if most is not None else "")
    line = line_of("total_seconds", [figure], asked, noun="run")
    return not_judged(line) if most is None else line


def _failed_line(checked: CheckedRun) -> CheckLine | None:
    """Samples, points, seeds, experiments and cells that failed."""
    found = _failures(checked.run)
    if found is None:
        return None
    failed, total, words = found
    if failed is None or total is None:
        why = "failures were not counted"
        return CheckLine(name="failed", verdict="unknown", value=None, limit=0, text=why)
    if failed == 0 and total == 0:
        return CheckLine(name="failed", verdict="unknown", value=0, limit=0, text=f"there were no {words}")
    text = f"{count_text(failed)} of {count_text(total)} {words}" if failed else f"none of {count_text(total)} {words}"
    return CheckLine(name="failed", verdict="fail" if failed else "pass", value=failed, limit=0, text=text)


def _failures(run: Run) -> tuple[float | None, float | None, str] | None:
    """How many failed, of how many, and of what; None for a run in which nothing can fail alone."""
    summary = run.summary
    if run.kind in ("eval", "lm-eval"):
        return number(summary.get("num_failed")), number(summary.get("num_samples")), "samples"
    if run.profile is not None:
        points = entries(run.profile["summary"])
        lost = sum(point.get("state") != "done" for point in points)
        if lost or not points:
            return lost, len(points), "points"
        counts = [(number(point.get("num_failed")), number(point.get("num_samples"))) for point in points]
        known = [(failed, samples) for failed, samples in counts if failed is not None and samples is not None]
        if len(known) < len(counts):
            return None, None, "samples"
        return sum(failed for failed, _ in known), sum(samples for _, samples in known), "samples"
    if run.kind == "sweep":
        counts_by_state = {name: number(count) for name, count in mapping(summary.get("counts")).items()}
        if not counts_by_state or any(count is None for count in counts_by_state.values()):
            return None, None, "experiments"
        total = sum(count or 0 for count in counts_by_state.values())
        return total - (counts_by_state.get("completed") or 0), total, "experiments"
    for total_name, words in (("num_runs", "runs"), ("num_cells", "cells")):
        if total_name in summary:
            return number(summary.get("num_failed")), number(summary.get(total_name)), words
    return None


# What applies to a run, in the order of the table; None: it does not apply, or nothing is known and nothing was asked.
CHECKS: tuple[Callable[[CheckedRun], CheckLine | None], ...] = (
    _failed_line,
    _oom_line,
    _retries_line,
    _utilisation_line,
    _waiting_line,
    _throttling_line,
    _memory_line,
    _epoch_line,
    _total_line,
    speed_up_line,
)


def check_run(run: Run, limits: CheckLimits | None = None, *, baseline: Run | None = None) -> list[CheckLine]:
    """Every line that applies to a run, in the order of `CHECKS`; a kind that cannot be checked has none."""
    if run.kind not in CHECKED_KINDS:
        return []
    held_to = limits or CheckLimits()
    before = None if baseline is None else CheckedRun(run=baseline, parts=checked_parts(baseline), limits=held_to)
    checked = CheckedRun(run=run, parts=checked_parts(run), limits=held_to, baseline=before)
    lines = [check(checked) for check in CHECKS]
    return [line for line in lines if line is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A run's checklist."""

    folder: Path
    kind: str
    lines: tuple[CheckLine, ...]
    against: Path | None = None

    @property
    def failed(self) -> tuple[CheckLine, ...]:
        """The lines that failed."""
        return tuple(line for line in self.lines if line.verdict == "fail")

    @property
    def document(self) -> dict[str, Any]:
        """What `brim check --json` prints."""
        counts = {
            verdict: sum(line.verdict == verdict for line in self.lines) for verdict in ("pass", "fail", "unknown")
        }
        return {
            "schema": CHECK_SCHEMA,
            "run": str(self.folder),
            "kind": self.kind,
            "against": None if self.against is None else str(self.against),
            "ok": not self.failed,
            "counts": counts,
            "lines": [line.to_json() for line in self.lines],
        }


def check_as(settings: CheckSettings) -> CheckResult:
    """Judge the run in a folder; a folder that is no finished run is a `RequestError`."""
    run = open_run(settings.run)
    if run.kind not in CHECKED_KINDS:
        raise RequestError(
            f"{settings.run}: a run of brim {run.kind} has nothing to check; give one of {', '.join(CHECKED_KINDS)} "
            "or ood"
        )
    baseline = None if settings.against is None else open_run(settings.against)
    if baseline is not None and settings.against is not None:
        if baseline.folder.resolve() == run.folder.resolve():
            raise RequestError(f"{given('against', settings.against)}: that is the run itself; give an earlier one")
        if baseline.kind != run.kind:
            raise RequestError(
                f"{given('against', settings.against)}: it is of the kind {baseline.kind}, the run of the kind "
                f"{run.kind}; compare runs of one kind"
            )
    lines = check_run(run, settings.limits, baseline=baseline)
    return CheckResult(folder=run.folder, kind=run.kind, lines=tuple(lines), against=settings.against)
