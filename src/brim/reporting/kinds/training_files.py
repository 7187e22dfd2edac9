"""The files that a training leaves beside run.json, read to what a screen shows: steps, epochs, seeds, cells.

A run may have millions of steps: they are read once, and neighbours are folded as they come. A kill may have cut a
file: what is missing or damaged has no rows. What is shown of them is not known here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.run_reader import Run, Samples, epoch_rows, mapping
from brim.units import count_text, number, spread_text

__all__ = [
    "MOST_EVENTS", "MOST_SPANS", "MOST_STRETCHES", "Span", "StepDigest", "TrainingRun", "digest_steps", "figure_names",
    "is_preference", "read_cells", "read_epochs", "read_training", "samples_to_reach", "schedule_rows", "seed_rows",
    "smoothed",
]  # fmt: skip

MOST_SPANS = 180  # to twice as many are kept: a wide chart has about two pixels for each
MOST_EVENTS = 200  # OOM events that are each drawn
MOST_STRETCHES = 40  # rows of the table of sizes
SMOOTHED_OVER = 20  # the running mean takes a twentieth of the run, half of it on either side


@dataclasses.dataclass(kw_only=True)
class Span:
    """Neighbouring steps as one: what a screen can show of them."""

    steps: int
    last_step: int
    start_samples: float
    samples: float  # seen when it ended
    seconds: float  # of its steps
    loss_sum: float  # of samples
    weight: float  # samples in that sum
    learning_rate: float | None
    effective_batch: float | None
    micro_low: float | None  # the largest micro-batch of a step: least and most over the steps
    micro_high: float | None
    accumulation: float | None  # micro-batches of a step, at most
    oom_events: float  # in these steps

    @property
    def loss(self) -> float | None:
        """The mean over its samples."""
        return self.loss_sum / self.weight if self.weight else None

    def take(self, later: Span) -> None:
        """Fold the next span into this one."""
        self.steps += later.steps
        self.last_step, self.samples = later.last_step, later.samples
        self.seconds += later.seconds
        self.loss_sum += later.loss_sum
        self.weight += later.weight
        self.oom_events += later.oom_events
        for field in ("learning_rate", "effective_batch"):
            if getattr(later, field) is not None:
                setattr(self, field, getattr(later, field))
        self.micro_low = _fold(min, self.micro_low, later.micro_low)
        self.micro_high = _fold(max, self.micro_high, later.micro_high)
        self.accumulation = _fold(max, self.accumulation, later.accumulation)


def _fold(choose: Any, one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return choose(known) if known else None


@dataclasses.dataclass(kw_only=True)
class StepDigest:
    """The steps of a run, folded, and where it ran out of memory."""

    spans: list[Span] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # OOM, the first of them
    num_steps: int = 0
    num_events: int = 0
    _width: int = 1
    _oom_before: float = 0.0
    _batch: float = 0.0  # the effective batch in force: it grows, and never shrinks

    def add(self, line: Mapping[str, Any]) -> None:
        """One more line of steps.jsonl; one without samples, or that goes back, is left out."""
        samples = number(line.get("samples"))
        before = self.spans[-1].samples if self.spans else 0.0
        if samples is None or samples <= before:
            return
        self.num_steps += 1
        # An epoch's last window is shorter: what it was cut into says nothing of the sizes in force.
        batch = number(line.get("effective_batch")) or 0.0
        whole = batch >= self._batch
        self._batch = max(self._batch, batch)
        span = _span(line, before=before, samples=samples, place=self.num_steps, whole=whole)
        span.oom_events = self._new_events(line, span)
        if self.spans and self.spans[-1].steps < self._width:
            self.spans[-1].take(span)
            return
        if len(self.spans) >= 2 * MOST_SPANS:
            for one, other in zip(self.spans[::2], self.spans[1::2], strict=True):
                one.take(other)
            self.spans = self.spans[::2]
            self._width *= 2
        self.spans.append(span)

    def _new_events(self, line: Mapping[str, Any], span: Span) -> float:
        """How often this step ran out of memory; the line counts them since the run began, or was resumed."""
        total = number(line.get("oom_events")) or 0.0
        new = total - self._oom_before if total >= self._oom_before else total
        self._oom_before = total
        if new > 0:
            self.num_events += int(new)
            if len(self.events) < MOST_EVENTS:
                self.events.append(
                    {"step": span.last_step, "samples": span.samples, "times": int(new), "micro": _largest(line)}
                )
        return new


def digest_steps(lines: Iterable[Mapping[str, Any]]) -> StepDigest:
    """All lines, read once."""
    digest = StepDigest()
    for line in lines:
        digest.add(line)
    return digest


def _span(line: Mapping[str, Any], *, before: float, samples: float, place: int, whole: bool) -> Span:
    loss = number(line.get("loss"))
    micro = _largest(line) if whole else None
    parts = line.get("micro_batches")
    return Span(
        steps=1,
        last_step=int(number(line.get("step")) or place),
        start_samples=before,
        samples=samples,
        seconds=number(line.get("seconds")) or 0.0,
        loss_sum=0.0 if loss is None else loss * (samples - before),
        weight=0.0 if loss is None else samples - before,
        learning_rate=number(line.get("learning_rate")),
        effective_batch=number(line.get("effective_batch")) if whole else None,
        micro_low=micro,
        micro_high=micro,
        accumulation=float(len(parts)) if whole and isinstance(parts, list) and parts else None,
        oom_events=0.0,
    )


def _largest(line: Mapping[str, Any]) -> float | None:
    parts = line.get("micro_batches")
    known = [size for part in parts if (size := number(part)) is not None] if isinstance(parts, list) else []
    return max(known, default=None)


def smoothed(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """The running mean of the loss over a twentieth of the run.

    At the start, where a loss falls fast, it is as narrow as it must be not to lag; at the end it looks back only.
    """
    known = [span for span in spans if span.weight]
    reach = len(known) // (2 * SMOOTHED_OVER)
    found = []
    for place, span in enumerate(known):
        ahead = min(reach, place)
        near = known[place - ahead : place + ahead + 1]
        found.append((span, math.fsum(one.loss_sum for one in near) / math.fsum(one.weight for one in near)))
    return found


def samples_to_reach(spans: Sequence[Span], loss: float | None) -> float | None:
    """Samples after which the running mean of the loss first is as low; None where it never is."""
    if loss is None:
        return None
    return next((span.samples for span, mean in smoothed(spans) if mean <= loss), None)


def schedule_rows(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Stretches with the same batch and the same micro-batches, in order; of very many, neighbours together."""
    groups: list[list[Span]] = []
    for span in spans:
        if span.micro_high is None:
            continue
        if groups and _sizes(groups[-1][-1]) == _sizes(span):
            groups[-1].append(span)
        else:
            groups.append([span])
    if len(groups) > MOST_STRETCHES:
        width = math.ceil(len(groups) / MOST_STRETCHES)
        groups = [
            [span for group in groups[start : start + width] for span in group]
            for start in range(0, len(groups), width)
        ]
    return [_stretch(group) for group in groups]


def _sizes(span: Span) -> tuple[float | None, ...]:
    return (span.effective_batch, span.micro_low, span.micro_high, span.accumulation)


def _stretch(group: Sequence[Span]) -> dict[str, Any]:
    steps = sum(span.steps for span in group)
    last = group[-1].last_step
    first = group[0].last_step - group[0].steps + 1
    rates = [span.learning_rate for span in group if span.learning_rate is not None]
    return {
        "span": f"{count_text(first)} to {count_text(last)}" if steps > 1 else count_text(last),
        "start_samples": group[0].start_samples,
        "effective": _between([span.effective_batch for span in group]),
        "micro": _between([size for span in group for size in (span.micro_low, span.micro_high)]),
        "accumulation": _between([span.accumulation for span in group]),
        "learning_rate": rates[-1] if rates else None,
        "oom_events": sum(span.oom_events for span in group),
    }


def _between(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return count_text(low) if low == high else f"{count_text(low)} to {count_text(high)}"


def read_epochs(folder: Path, *, best: float | None = None) -> list[dict[str, Any]]:
    """The rows of epochs.csv with their figures as numbers; epochs count from 1, and the best one is marked."""
    rows: list[dict[str, Any]] = []
    for figures in epoch_rows(folder):
        epoch = figures.get("epoch")
        if epoch is None:
            continue
        row: dict[str, Any] = dict(figures)
        row |= {"epoch": epoch + 1, "best": epoch == best}
        row["label"] = f"{count_text(epoch + 1)}{' (best)' if row['best'] else ''}"
        rows.append(row)
    return rows


def figure_names(epochs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The columns of validation but for its loss, and how people call them: `val_top1` is top1."""
    names = dict.fromkeys(name for row in epochs for name in row if name.startswith("val_") and name != "val_loss")
    return {name: name.removeprefix("val_") for name in names if any(row.get(name) is not None for row in epochs)}


def seed_rows(metrics: object, seeds: Sequence[Any]) -> list[dict[str, Any]]:
    """A row for each metric: mean, deviation over seeds, and `seed 0`, `seed 1`, … for each value."""
    rows = []
    for name, figure in mapping(metrics).items():
        if not isinstance(figure, dict) or (mean := number(figure.get("mean"))) is None:
            continue
        values = [number(value) for value in figure["values"]] if isinstance(figure.get("values"), list) else []
        deviation = number(figure.get("deviation"))
        named = {f"seed {seed}": value for seed, value in zip(seeds, values, strict=False)}
        rows.append({"name": str(name), "mean": mean, "deviation": deviation, "values": values,
                     "shown": spread_text(mean, deviation), **named})  # fmt: skip
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A supervised training: its run, its steps folded to what a screen shows, and its epochs."""

    run: Run
    steps: StepDigest
    epochs: list[dict[str, Any]]
    damaged: int  # lines of steps.jsonl that could not be read

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.run.summary


def read_training(run: Run) -> TrainingRun:
    """The files of a supervised training."""
    lines = Samples(run.folder / "steps.jsonl")
    digest = digest_steps(lines)
    epochs = read_epochs(run.folder, best=number(run.summary.get("best_epoch")))
    return TrainingRun(run=run, steps=digest, epochs=epochs, damaged=lines.damaged)


def is_preference(run: Run) -> bool:
    """Whether the run is one of `brim ood`: a table of methods instead of epochs."""
    return run.request.get("command") == "train dpo" or isinstance(run.summary.get("table"), list)


def read_cells(run: Run) -> list[dict[str, Any]]:
    """Every cell of a preference training, as the journal has it; of one that was made again, the last."""
    found = {}
    for line in Samples(run.folder / "cells.jsonl"):
        if "method" in line:
            found[tuple(str(line.get(field)) for field in ("data", "encoder", "method", "seed"))] = line
    return list(found.values())
