"""How many times as fast as another run, with an interval where both did the same work."""

from __future__ import annotations

from brim.advice.check_lines import CheckLine, CheckVerdict
from brim.advice.checked_parts import CheckedPart, CheckedRun
from brim.advice.run_reader import data_keys
from brim.intervals import Interval, paired_speed_up, segment_seconds, speed_up
from brim.units import number

__all__ = ["speed_up_line"]


def speed_up_line(checked: CheckedRun) -> CheckLine | None:
    """How many times as fast as another run; over several parts, the slowest of those that both have."""
    run, limits, baseline = checked.run, checked.limits, checked.baseline
    if baseline is None:
        return None
    wanted = 1.0 if limits.min_speed_up is None else limits.min_speed_up
    before = {part.label: part for part in baseline.parts if not part.failed}
    pairs = [(before[part.label], part) for part in checked.parts if not part.failed and part.label in before]
    same_data = len({repr(key) for key in data_keys([baseline.run, run])}) == 1
    found = [(after.label, *_part_speed_up(old, after, same_data=same_data)) for old, after in pairs]
    known = [(label, interval, why) for label, interval, why in found if interval is not None]
    if not known:
        why = found[0][2] if found else "the two runs have nothing in common"
        return CheckLine(name="speed_up", verdict="unknown", value=None, limit=wanted, text=why)
    verdicts = [_speed_verdict(interval, wanted) for _, interval, _ in known]
    verdict: CheckVerdict = "fail" if "fail" in verdicts else "unknown" if "unknown" in verdicts else "pass"
    if len(known) < len(found) and verdict == "pass":
        verdict = "unknown"
    shown = [one for one, judged in zip(known, verdicts, strict=True) if judged == verdict] or known
    label, interval, why = min(shown, key=lambda one: one[1].value)
    text = f"{interval.text()}{f' at {label}, the slowest' if len(known) > 1 else ''}{f': {why}' if why else ''}"
    if verdict == "fail":
        text = f"{text}, {'slower' if wanted == 1 else f'below {wanted:g}×'}"
    bounds = None if interval.low is None or interval.high is None else (interval.low, interval.high)
    return CheckLine(name="speed_up", verdict=verdict, value=interval.value, limit=wanted, text=text, interval=bounds)


def _part_speed_up(before: CheckedPart, after: CheckedPart, *, same_data: bool) -> tuple[Interval | None, str]:
    """The speed-up with its interval where both did the same work in enough batches, else of the two rates alone."""
    curves = [_curve(part) for part in (before, after)]
    whole = not (before.resumed or after.resumed)
    same_work = same_data and whole and all(curves) and curves[0][-1][1] == curves[1][-1][1]
    if same_work:
        parts = [segment_seconds(curve) for curve in curves]
        if all(parts):
            return paired_speed_up(*parts), ""
    rates = [number(part.summary.get("samples_per_second")) for part in (before, after)]
    if rates[0] is None or rates[1] is None or min(rates[0], rates[1]) <= 0:
        return None, "a throughput is not on record"
    why = (
        "too few batches, or no curve, for an interval" if same_data and whole else "the runs did not do the same work"
    )
    return speed_up([rates[0]], [rates[1]]), why


def _curve(part: CheckedPart) -> list[tuple[float, float]]:
    """The throughput curve; empty where any of it is damaged."""
    recorded = part.summary.get("throughput")
    points: list[tuple[float, float]] = []
    for point in recorded if isinstance(recorded, list) else ():
        pair = [number(one) for one in point] if isinstance(point, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            return []
        points.append((pair[0], pair[1]))
    return points


def _speed_verdict(interval: Interval, wanted: float) -> CheckVerdict:
    if interval.low is None or interval.high is None:
        return "unknown"
    return "fail" if interval.high < wanted else "pass" if interval.low >= wanted else "unknown"
