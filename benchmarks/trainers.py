"""LoRA fine-tuning by transformers' `Trainer` and TRL's `SFTTrainer` with brim around it: does it keep its word?

    python -m benchmarks.trainers            # 1 B Llama shape in bfloat16 on the card, some minutes
    python -m benchmarks.trainers --tiny     # the same on the CPU with two layers, in under a minute
    python -m benchmarks.trainers --json trainers.json --deadline 540

Random weights, random tokens, no dropout. For each trainer: the forecast against what its training really allocated, at
every size that ran; the rate after `fit_to_memory`, before and after all others, against the best of all fixed sizes
with the same effective batch; and a neighbour that takes memory in the middle: whether the run ends, and how far its
losses and gradient norms are from the undisturbed ones. What rounding alone does is beside that: the same distance of
the fixed sizes, which nobody disturbed. Each of these is a part: `--json` is written after every one, one that fails is
an error in its row, and none begins after the trainer's share of `--deadline`. Where TRL is not installed its loss over
its collator's batches runs in a `Trainer`, and the row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.made_trainers import Shape, clear, described, shape_of, trainer_of
from benchmarks.neighbour import Neighbour
from brim.integrations.transformers import TrainerFit, fit_to_memory, forecast
from brim.storage.files import write_json

TRAINERS = ("Trainer", "SFTTrainer")
COLUMNS = (
    ("trainer", "trainer"),
    ("batch_size", "batch × accumulation"),
    ("forecast", "forecast"),
    ("measured", "measured"),
    ("error", "off by"),
    ("worst", "over all sizes"),
    ("rate", "samples/s"),
    ("best", "best fixed"),
    ("ratio", "of best"),
    ("neighbour", "with a neighbour"),
    ("loss_difference", "losses differ by"),
    ("norm_difference", "gradient norms"),
    ("rounding", "rounding alone"),
)


def timed_run(trainer: Any, shape: Shape) -> dict[str, Any]:
    """Train; samples a second of the last steps, losses and gradient norms, and the peak allocated on a card."""
    from transformers import PrinterCallback, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if shape.on_card:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    if shape.on_card:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if shape.on_card else None
    times = [after - before for before, after in itertools.pairwise(ends[1:])]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rate": shape.effective / statistics.median(times),
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "peak": peak,
        "steps": len(ends),
    }


def largest_difference(values: Sequence[float], plain: Sequence[float]) -> float:
    """Of two runs, relative, step by step."""
    return max(abs(value - other) / abs(other) for value, other in zip(values, plain, strict=True))


def disturb(trainer: Any, shape: Shape, neighbour: Neighbour | None, peak_bytes: int | None) -> None:
    """At one step somebody takes the memory but two fifths of what a step needs, and gives it back at the next but one.

    `peak_bytes`: the most that the undisturbed run allocated.
    """
    from transformers import TrainerCallback

    class Disturbance(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if neighbour is not None and state.global_step == shape.disturbed_at:
                assert peak_bytes is not None
                torch.cuda.empty_cache()  # or what is cached already would last
                neighbour.leave((peak_bytes - torch.cuda.memory_allocated()) * 2 // 5)
            if neighbour is not None and state.global_step == shape.disturbed_at + 2:
                neighbour.leave(-1)

    trainer.add_callback(Disturbance())
    if neighbour is None:
        taken: list[int] = []

        def take(*_: Any) -> None:
            if trainer.state.global_step == shape.disturbed_at and not taken:
                taken.append(1)
                torch.zeros(shape.neighbour_bytes, dtype=torch.uint8)

        trainer.model.get_input_embeddings().register_forward_pre_hook(take)


class Measurement:
    """The parts of one trainer's row, one after the other; `row` holds what is known so far."""

    def __init__(self, name: str, shape: Shape, neighbour: Neighbour | None) -> None:
        self.name = name
        self.shape = shape
        self.neighbour = neighbour
        self.row: dict[str, Any] = {"trainer": described(name), "fixed_rates": {}, "peaks": {}}

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is measured, by name; sizes are those beside the fitted one first, whose rates count most."""
        yield "fitted", self.fitted
        if "undisturbed" not in self.row:
            return  # everything else is about that size
        yield "forecast", self.forecast
        yield "neighbour", self.disturbed
        powers = range(self.shape.effective.bit_length())
        sizes = [2**power for power in powers if self.shape.effective % 2**power == 0]
        for size in sorted(sizes, key=lambda one: abs(math.log2(one / self.row["batch_size"]))):
            yield f"fixed {size}", functools.partial(self.fixed, size)
        yield "fitted again", self.fitted_again

    def fitted(self) -> None:
        """Sizes by `fit_to_memory`, and training with them undisturbed."""
        shape, started = self.shape, time.perf_counter()
        with trainer_of(self.name, shape, shape.effective) as trainer:
            fit = fit_to_memory(trainer, memory_limit=shape.memory_limit)
            self.row |= {
                "batch_size": fit.per_device_train_batch_size,
                "accumulation": fit.gradient_accumulation_steps,
                "search_seconds": time.perf_counter() - started,
                "probes": _probes(fit),
            }
            if shape.memory_limit is not None:
                fit.guard.limit_bytes = None  # the meter of the CPU would be what is timed
            found = timed_run(trainer, shape)
        self.row |= {"rate": found["rate"], "measured_bytes": found["peak"], "undisturbed": found}

    def fitted_again(self) -> None:
        """The same training after all others: the best fixed rate is the highest of several runs as well."""
        with trainer_of(self.name, self.shape, self.row["batch_size"]) as trainer:
            fit = fit_to_memory(trainer, batch_size=self.row["batch_size"], memory_limit=self.shape.memory_limit)
            fit.guard.limit_bytes = None
            again = timed_run(trainer, self.shape)
        self.row["rates"] = [self.row["rate"], again["rate"]]
        self.row["rate"] = max(self.row["rates"])

    def forecast(self) -> None:
        """Peaks at the fitted size and at all others that fit, without running them."""
        shape, size = self.shape, self.row["batch_size"]
        cards = () if shape.on_card else "rtx 4090"
        with trainer_of(self.name, shape, size) as trainer:
            found = forecast(trainer, gpu=cards, batch_size=size).forecasts[0]
            others = forecast(trainer, gpu=cards, max_batch_size=shape.effective).forecasts
        self.row["forecast_bytes"] = found.peak_allocated_bytes
        self.row["forecast_breakdown"] = dict(found.breakdown)
        self.row["forecasts"] = {one.batch_size: one.peak_allocated_bytes for one in (*others, found)}

    def disturbed(self) -> None:
        """The same training with a neighbour in the middle of it."""
        shape, plain = self.shape, self.row["undisturbed"]
        with trainer_of(self.name, shape, shape.effective) as trainer:
            fit = fit_to_memory(trainer, batch_size=self.row["batch_size"], memory_limit=shape.memory_limit)
            disturb(trainer, shape, self.neighbour, plain["peak"])
            try:
                found = timed_run(trainer, shape)
            finally:
                self.row["oom_events"] = fit.oom_events
                if self.neighbour is not None:
                    self.neighbour.leave(-1)
        self.row |= {"steps": found["steps"], "steps_asked": shape.steps, "disturbed": found}
        self.row["largest_loss_difference"] = largest_difference(found["losses"], plain["losses"])
        self.row["largest_norm_difference"] = largest_difference(found["norms"], plain["norms"])

    def fixed(self, size: int) -> None:
        """Samples a second at a fixed size with the same effective batch; None where it does not fit."""
        rates = self.row["fixed_rates"]
        if any(rate is None and other < size for other, rate in rates.items()):
            return  # a smaller one did not fit
        rates[size] = None
        with trainer_of(self.name, self.shape, size) as trainer, contextlib.suppress(torch.OutOfMemoryError):
            found, plain = timed_run(trainer, self.shape), self.row["undisturbed"]
            rates[size] = found["rate"]
            self.row["peaks"][size] = found["peak"]
            for kind, name in (("losses", "rounding_loss_difference"), ("norms", "rounding_norm_difference")):
                self.row[name] = max(self.row.get(name, 0.0), largest_difference(found[kind], plain[kind]))
        self.row["best_rate"] = max((rate for rate in rates.values() if rate is not None), default=None)


def measure(measurement: Measurement, *, seconds: float, save: Callable[[], None]) -> None:
    """Every part that begins within so many seconds; what fails is an error in the row, and the next part begins."""
    started, row = time.monotonic(), measurement.row
    row["seconds"], row["errors"], row["not_started"] = {}, {}, []
    for part, run in measurement.parts():
        if time.monotonic() - started > seconds:
            row["not_started"].append(part)
            continue
        begun = time.monotonic()
        try:
            run()
        except Exception as error:  # the other parts are worth having
            row["errors"][part] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if part in row["errors"]:
            clear(measurement.shape)  # the traceback, which held the part's tensors, is gone
        row["seconds"][part] = time.monotonic() - begun
        log(f"{measurement.name}: {part}: {row['errors'].get(part) or 'done'} in {row['seconds'][part]:.1f} s")
        save()
    save()


def _probes(fit: TrainerFit) -> str:
    assert fit.plan is not None
    return ", ".join(f"{probe.batch_size} {probe.verdict}" for probe in fit.plan.probes)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; what was not measured is a dash."""
    lines = ["| " + " | ".join(title for _, title in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        found, measured, rate, best = (
            row.get(key) for key in ("forecast_bytes", "measured_bytes", "rate", "best_rate")
        )
        cells = {
            "trainer": row["trainer"],
            "batch_size": f"{row['batch_size']} × {row['accumulation']}" if "batch_size" in row else None,
            "forecast": found and f"{found / 2**30:.2f} GiB",
            "measured": measured and f"{measured / 2**30:.2f} GiB",
            "error": found and measured and f"{found / measured - 1:+.1%}",
            "worst": _worst_forecast(row),
            "rate": rate and f"{rate:.1f}",
            "best": best and f"{best:.1f}",
            "ratio": rate and best and f"{rate / best:.3f}",
            "neighbour": f"{row['steps']} of {row['steps_asked']} steps, {row['oom_events']} OOM"
            if "steps" in row
            else None,
            "loss_difference": _exponent(row.get("largest_loss_difference")),
            "norm_difference": _exponent(row.get("largest_norm_difference")),
            "rounding": _rounding(row),
        }
        lines.append("| " + " | ".join(cells[name] or "—" for name, _ in COLUMNS) + " |")
    remarks = [f"{row['trainer']}: {part}: {what}" for row in rows for part, what in row.get("errors", {}).items()] + [
        f"{row['trainer']}: not started within --deadline: {', '.join(row['not_started'])}"
        for row in rows
        if row.get("not_started")
    ]
    return "\n".join([*lines, *(f"\n{remark}" for remark in remarks)])


def _exponent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def _rounding(row: dict[str, Any]) -> str | None:
    """Losses, then gradient norms, of the fixed sizes."""
    found = [_exponent(row.get(f"rounding_{name}_difference")) for name in ("loss", "norm")]
    return ", ".join(one for one in found if one is not None) or None


def _worst_forecast(row: dict[str, Any]) -> str | None:
    """The forecast that is farthest from what its fixed size allocated."""
    peaks, expected = row.get("peaks", {}), row.get("forecasts", {})
    errors = [expected[size] / peak - 1 for size, peak in peaks.items() if peak is not None and size in expected]
    return f"{max(errors, key=abs):+.1%} of {len(errors)}" if errors else None


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two layers on the CPU")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything into this file, part by part")
    parser.add_argument("--deadline", type=float, default=math.inf, help="start no further part after these seconds")
    options = parser.parse_args(argv)
    logging.getLogger("brim.integrations").setLevel(logging.ERROR)
    shape = shape_of(tiny=options.tiny)
    rows: list[dict[str, Any]] = []

    def save() -> None:
        if options.json is not None:
            document = {"schema": "brim.benchmark.trainers/1", "tiny": options.tiny, "environment": environment()}
            write_json(options.json, {**document, "rows": rows})

    started = time.monotonic()
    neighbour = Neighbour() if shape.on_card else None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trainers print what they log
            for place, name in enumerate(options.trainers, 1):
                measurement = Measurement(name, shape, neighbour)
                rows.append(measurement.row)
                until = started + options.deadline * place / len(options.trainers)
                measure(measurement, seconds=until - time.monotonic(), save=save)
    finally:
        if neighbour is not None:
            neighbour.close()
    print(table(rows))
    if any(row["errors"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
