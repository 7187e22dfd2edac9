"""Advice on batches: their size against the knee, their padding, and what does not fit."""

from __future__ import annotations

import math
from typing import Any

from brim.advice.base import Advice, figure, on_cuda
from brim.advice.batch_times import (
    MeasuredRate,
    padded_share,
    probe_rates,
    rates_of_cached_plans,
    rates_of_same_work,
)
from brim.advice.run_reader import Run, value_at
from brim.units import bytes_text, fraction_text

__all__ = ["gradient_checkpointing", "padding", "small_batches"]

TINY_SIZE = 8  # below it a device is hardly ever busy, whatever the model
USUAL_KNEE = 64  # where most models gain little from more samples
MOST_ESTIMATED = 4.0  # of a gain that nothing measured
FREE_FRACTION = 0.25  # of the memory limit: a run that used less had room for larger batches
LEAST_PADDING = 0.2
PADDING_LEFT = 0.2  # in batches that are formed by cost
NARROW = 1.25  # the most that a gain may be over the least, to count as measured


def small_batches(run: Run) -> Advice | None:
    """A size that was given, far below what was measured or what a device needs."""
    if run.kind == "train":
        return _small_micro_batches(run)
    size, rate = figure(run, "batch_size_used"), figure(run, "samples_per_second")
    if run.request.get("batch_size") is None or not size or not rate or size >= (figure(run, "num_samples") or 0):
        return None
    best = max(
        rates_of_same_work(run) or rates_of_cached_plans(run), key=lambda one: one.samples_per_second, default=None
    )
    if best is not None and best.batch_size > size:
        return _measured(best, size=int(size), rate=rate)
    wanted = min(USUAL_KNEE, figure(run, "num_samples") or 0)
    return _estimated(run, size=int(size), wanted=wanted, settings={"batch_size": "auto"})


def _measured(best: MeasuredRate, *, size: int, rate: float) -> Advice:
    return Advice(
        name="batch_size",
        cause=f"batches of {size}, far below the knee",
        evidence=f"{rate:,.1f} samples/s in batches of {size}; {best.source} did the same work at "
        f"{best.samples_per_second:,.1f} samples/s in batches of {best.batch_size}",
        expected_gain=best.samples_per_second / rate,
        measured=True,
        settings={"batch_size": best.batch_size if best.given else "auto"},
    )


def _estimated(run: Run, *, size: int, wanted: float, settings: dict[str, Any]) -> Advice | None:
    """No larger size was measured: below eight samples a rule of thumb, above it no figure."""
    peak, limit = figure(run, "peak_reserved_bytes"), run.limit_bytes
    used = None if peak is None or not limit else peak / limit
    if used is not None and used > 2 * FREE_FRACTION:
        return None
    if size >= TINY_SIZE and (not on_cuda(run) or used is None or used > FREE_FRACTION):
        return None
    tiny = size < TINY_SIZE and wanted >= 2 * size
    gain = min((wanted / size) ** 0.5, MOST_ESTIMATED) if tiny else None
    # What a sample needs is at most its share of the peak, which holds the weights too.
    room = int(size / used) if used else None
    memory = f"; {fraction_text(used)} of the {bytes_text(limit)} was used" if used is not None else ""
    if room is not None:
        memory += f", so there is room for {room:,} samples in a batch or more"
    rates = ", ".join(f"{one.samples_per_second:,.1f} samples/s at {one.batch_size}" for one in probe_rates(run)[-2:])
    return Advice(
        name="batch_size",
        cause=f"batches of {size}, which is few for any device",
        evidence=f"no larger size was tried ({rates or 'none was timed'}){memory}; the gain is a rule of thumb, not "
        "measured: --try measures it",
        expected_gain=gain,
        at_least=gain == MOST_ESTIMATED and room is not None and room >= MOST_ESTIMATED**2 * size,
        settings=settings,
    )


def _small_micro_batches(run: Run) -> Advice | None:
    """Several micro-batches in a step although the size was given: the effective batch stays, so results do too."""
    asked = value_at(run.request, "settings.hp.batch_size")
    size, effective = figure(run, "micro_batch_size"), figure(run, "effective_batch_size")
    if not isinstance(asked, int) or not size or not effective or (figure(run, "accumulation_steps") or 1) < 2:
        return None
    if size < asked:  # it was lowered, since it did not fit
        return None
    settings = {"hp.batch_size": "auto", "hp.effective_batch": int(effective)}
    return _estimated(run, size=int(size), wanted=min(USUAL_KNEE, effective), settings=settings)


def padding(run: Run) -> Advice | None:
    """Batches of so many samples, whatever their lengths: short samples are padded to the longest."""
    wasted = figure(run, "padding_fraction")
    if run.kind != "eval" or run.request.get("batch_size") is None or wasted is None or wasted < LEAST_PADDING:
        return None
    less = min((1 - wasted) / (1 - PADDING_LEFT), 1.0)  # of the padded cost
    busy = _busy_fraction(run)
    low, high = (1 / (1 - busy * share * (1 - less)) for share in padded_share(run))
    known = high <= NARROW * low
    why = (
        "the times of the batches show how much of the time that is"
        if known
        else f"a gain between {low:.2g}× and {high:.2g}×: the batches do not show how much of their time is that of "
        "padded cost, so the middle is a rule of thumb, not measured"
    )
    return Advice(
        name="padding",
        cause=f"{fraction_text(wasted)} of the batches is padding",
        evidence=f"batches of {run.summary.get('batch_size_used')} samples of different lengths spend "
        f"{fraction_text(wasted)} of their cost on padding; batches by cost (auto) leave about "
        f"{fraction_text(PADDING_LEFT)}; {why}",
        expected_gain=math.sqrt(low * high),
        measured=known,
        settings={"batch_size": "auto"},
    )


def _busy_fraction(run: Run) -> float:
    """Of the run's time, what was spent in batches; of an older record, what was not waiting for samples."""
    seconds, in_batches = figure(run, "seconds"), figure(run, "batch_times.busy_seconds")
    if not seconds:
        return 1.0
    if in_batches is None:
        return max(1 - (figure(run, "loader.wait_seconds") or 0.0) / seconds, 0.0)
    return min(in_batches / (figure(run, "ranks") or 1) / seconds, 1.0)


def gradient_checkpointing(run: Run) -> Advice | None:
    """The micro-batch that was asked for does not fit: it was made smaller, and the step accumulates."""
    asked, used = value_at(run.request, "settings.hp.batch_size"), figure(run, "micro_batch_size")
    if run.kind != "train" or not isinstance(asked, int) or not used or used >= asked:
        return None
    if value_at(run.request, "settings.training.gradient_checkpointing") or asked > (
        figure(run, "effective_batch_size") or asked
    ):
        return None
    return Advice(
        name="gradient_checkpointing",
        cause=f"a micro-batch of {asked} does not fit",
        evidence=f"{int(used)} of {asked} samples fit, so a step accumulates "
        f"{run.summary.get('accumulation_steps')} micro-batches and learns the same; recomputing activations lets more "
        "fit and takes about a third more time a sample: not measured",
        settings={"training.gradient_checkpointing": True},
    )
