"""Figures of a run held to their limits: utilisation, memory, errors, waiting, throttling, epochs, and its speed."""

from __future__ import annotations

from brim.advice.check_lines import CheckedPart, CheckedRun, CheckLine, CheckVerdict, JudgedFigure, percent
from brim.advice.run_reader import data_keys, throughput_curve, value_at
from brim.errors import plural
from brim.intervals import Interval, curve_speed_up, speed_up
from brim.settings.check_settings import CheckLimits
from brim.units import bytes_text, duration_text, fraction_text, number

__all__ = [
    "MAX_THROTTLED_FRACTION", "MAX_WAITING_FRACTION", "epoch_seconds", "oom_events", "peak_memory", "retries",
    "speed_up_line", "throttling", "utilisation", "waiting",
]  # fmt: skip

MAX_WAITING_FRACTION = 0.1  # of a run's time: more than that, and loading is what limits it
MAX_THROTTLED_FRACTION = 0.01  # of the samples of a card: fewer are the moments when clocks change
_NOT_THROTTLING = ("gpu_idle", "applications_clocks")


def utilisation(part: CheckedPart, limits: CheckLimits) -> JudgedFigure:
    """The mean over the run, as the driver reports it."""
    used = number(part.summary.get("gpu_utilisation_mean"))
    if used is None:
        return JudgedFigure(None, why="it ran without a GPU" if part.on_host else "the driver gave no figure")
    return JudgedFigure(
        used >= limits.min_utilisation, used, fraction_text(used), f"below {percent(limits.min_utilisation)}"
    )


def peak_memory(part: CheckedPart, limits: CheckLimits) -> JudgedFigure:
    """The most that was reserved."""
    peak = number(part.summary.get("peak_reserved_bytes"))
    if peak is None:
        return JudgedFigure(None, why="the peak was not measured; on the CPU that takes a memory limit")
    if limits.memory_range is None:
        return JudgedFigure(True, peak, bytes_text(peak))
    low, high = limits.memory_range
    why = f"below {bytes_text(low)}" if peak < low else f"above {bytes_text(high)}"
    return JudgedFigure(low <= peak <= high, peak, bytes_text(peak), why)


def oom_events(part: CheckedPart, _: CheckLimits) -> JudgedFigure:
    """Batches and steps that did not fit."""
    if part.did_not_fit:
        return JudgedFigure(False, 1, "1 did not fit at all", "none allowed")
    return _none_of("time", part, number(part.summary.get("oom_events")), "out-of-memory errors were not counted")


def retries(part: CheckedPart, _: CheckLimits) -> JudgedFigure:
    """How often the CUDA allocator had to free its cache and try again."""
    if part.on_host:
        return JudgedFigure(None, why="it ran without a CUDA allocator")
    count = number(part.summary.get("alloc_retries"))
    if count == 0 and part.device is None:  # trainings count 0 on a CPU
        return JudgedFigure(None, why="the device was not recorded")
    return _none_of("time", part, count, "retries were not counted")


def _none_of(what: str, part: CheckedPart, count: float | None, missing: str) -> JudgedFigure:
    """Of something that should not have happened at all: seen in a part of the run is enough, not seen is not."""
    if part.failed:
        return JudgedFigure(None, why="it failed before it was counted")
    if count is None:
        return JudgedFigure(None, why=missing)
    if count > 0:
        return JudgedFigure(False, count, plural(int(count), what), "none allowed")
    if part.resumed:
        return JudgedFigure(None, 0, why="none in this start, and an earlier start is not on record")
    return JudgedFigure(True, 0, "none")


def waiting(part: CheckedPart, _: CheckLimits) -> JudgedFigure:
    """The part of the time spent waiting for samples."""
    fraction, whole = _waiting_fraction(part)
    if fraction is None:
        return JudgedFigure(None, why="waiting was not measured, or there were fewer than two batches")
    if part.device == "cpu":
        why = f"{fraction_text(fraction)}, not judged: the host prepares and computes with the same cores"
        return JudgedFigure(None, fraction, why=why)
    if fraction > MAX_WAITING_FRACTION:
        return JudgedFigure(False, fraction, fraction_text(fraction), f"above {percent(MAX_WAITING_FRACTION)}")
    if not whole:
        return JudgedFigure(None, fraction, why="this start's waiting is known, an earlier start's is not")
    return JudgedFigure(True, fraction, fraction_text(fraction))


def _waiting_fraction(part: CheckedPart) -> tuple[float | None, bool]:
    """The fraction, and whether both of its figures cover the same time."""
    loading = number(value_at(part.summary, "gpu_wait_causes.loading"))  # of a training: not all of its waiting
    if loading is not None:
        return loading, not part.resumed
    between_batches = number(part.summary.get("gpu_wait_fraction"))
    if between_batches is not None:
        return between_batches, True
    waited, seconds = number(value_at(part.summary, "loader.wait_seconds")), number(part.summary.get("seconds"))
    if part.kind in ("eval", "lm-eval") or waited is None or not seconds:
        return None, False
    return waited / seconds, not part.resumed


def throttling(part: CheckedPart, _: CheckLimits) -> JudgedFigure:
    """The part of the samples in which something but idleness or set clocks held the clocks down."""
    seen = part.throttle_samples()
    if seen is None:
        reasons = value_at(part.summary, "monitor.throttle_reasons")
        bad = [str(one) for one in reasons if one not in _NOT_THROTTLING] if isinstance(reasons, list) else []
        if bad:
            return JudgedFigure(False, None, ", ".join(bad), "clocks were held down")
        return JudgedFigure(None, why="it ran without a GPU" if part.on_host else "the driver gave no reasons")
    samples, counts = seen
    held = {reason: count for reason, count in counts.items() if reason not in _NOT_THROTTLING}
    most = max(held.values(), default=0) / samples
    shown = f"{fraction_text(most)} of the time" + (f" ({', '.join(sorted(held))})" if held else "")
    if most > MAX_THROTTLED_FRACTION:
        return JudgedFigure(False, most, shown, f"above {percent(MAX_THROTTLED_FRACTION)}")
    if part.resumed:
        return JudgedFigure(None, most, why="not in this start, and an earlier start is not on record")
    return JudgedFigure(True, most, shown)


def epoch_seconds(part: CheckedPart, limits: CheckLimits) -> JudgedFigure:
    """The longest epoch's steps."""
    seconds = part.epoch_seconds()
    if not seconds:
        return JudgedFigure(
            None, why="no epochs on record" if "eval" not in part.kind else "an evaluation has no epochs"
        )
    longest, most = max(seconds), limits.max_epoch_seconds
    kept = most is None or longest <= most
    return JudgedFigure(kept, longest, f"{duration_text(longest)} at most", f"above {duration_text(most)}")


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
    whole = not (before.resumed or after.resumed)
    if same_data and whole:
        curves = [throughput_curve(part.summary) for part in (before, after)]
        interval, paired = curve_speed_up(*curves)
        if interval is not None:
            return interval, "" if paired else _one_measurement(min(map(len, curves)))
    rates = [number(part.summary.get("samples_per_second")) for part in (before, after)]
    if rates[0] is None or rates[1] is None or min(rates[0], rates[1]) <= 0:
        return None, "a throughput is not on record"
    why = (
        "too few batches, or no curve, for an interval" if same_data and whole else "the runs did not do the same work"
    )
    return speed_up([rates[0]], [rates[1]]), why


def _one_measurement(points: int) -> str:
    spread = "the spread of the other's parts, a factor of 2 at least"
    return f"one run has {plural(points, 'point')} of throughput, so the interval is {spread}"


def _speed_verdict(interval: Interval, wanted: float) -> CheckVerdict:
    if interval.low is None or interval.high is None:
        return "unknown"
    return "fail" if interval.high < wanted else "pass" if interval.low >= wanted else "unknown"
