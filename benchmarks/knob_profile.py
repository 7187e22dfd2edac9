"""A profile over max_crops against the best fixed sizes: how fast, how much planning, how many out-of-memory errors.

    python -m benchmarks.knob_profile --questions 2000 --memory-limit 24GiB --json profile.json     # a CUDA machine
    python -m benchmarks.knob_profile --tiny --questions 24 --values 1,2 --exhaustive 1             # to try it out

Every value of the profile is one row. For the values of `--exhaustive`, fixed sizes are tried on the same questions,
each once the pictures have been prepared; the size that the profile used is tried among them, in the same way. Rates
are the device's: samples over the time in which it had a batch. How long a run of 2,000 questions takes is reckoned by
that rate as well, which makes it shorter and the share of planning larger than where pictures are waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.vision_language import save_model, write_questions
from brim.evaluation.worker import EvalListener
from brim.memory.transfer import replaced
from brim.running.results import ExecutionFigures

STEP = 1.3  # between two sizes of the exhaustive side
BEHIND = 0.93  # of the best rate so far: sizes beyond one that is slower are not tried
BATCHES = 3  # of the size under trial; the first is not counted, of the others the faster one
PICTURES = 64  # distinct ones
FIXED_QUESTIONS = 640  # that fixed sizes have to draw from
KEPT = ("max_crops", "state", "error", "batch_size_used", "samples_per_second", "plan_seconds", "oom_events",
        "peak_reserved_bytes", "crops_used_mean", "vision_tokens_mean", "gpu_wait_fraction", "gpu_utilisation_mean",
        "duration_seconds", "probes")  # fmt: skip


def main() -> None:
    import torch

    arguments = parse()
    weights_on = "cuda" if torch.cuda.is_available() else None
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", tiny=arguments.tiny, weights_on=weights_on)
        pixels = 160 if arguments.tiny else 1000
        count = max(arguments.questions, FIXED_QUESTIONS)
        data = write_questions(Path(folder) / "data", count, pixels=pixels, pictures=PICTURES)
        document = {"environment": environment(), "arguments": vars(arguments), **measure(arguments, model, data)}
    print(markdown(document))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--values", default="2,3,4,5,6,7,8,9,10,11,12,13")
    parser.add_argument("--exhaustive", default="2,7,13")
    parser.add_argument("--batch-size", type=int, default=None, help="a ceiling; by default brim chooses")
    parser.add_argument("--memory-limit", default=None)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default=None)
    return parser.parse_args()


def measure(arguments: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    from brim.models.load import KeptModel
    from brim.profiling.run import ProfileListener, profile
    from brim.settings.eval_settings import EvalRequest
    from brim.settings.profile_settings import ProfileRequest

    device_rates: list[float | None] = []

    class Progress(ProfileListener):
        def point(self, *_: Any) -> None:
            self.batches = BatchTimes()

        def batch(self, figures: Any, *, cap: int, reserved_bytes: int | None) -> None:
            self.batches.batch(figures, cap=cap, reserved_bytes=reserved_bytes)

        def note(self, line: str) -> None:
            print(line, flush=True)

        def point_done(self, entry: Mapping[str, Any]) -> None:
            device_rates.append(self.batches.rate_near(entry.get("batch_size_used")))
            batches = [(items, round(taken, 3)) for items, taken in self.batches.batches]
            print({name: entry.get(name) for name in KEPT}, device_rates[-1], batches, flush=True)

    base = EvalRequest(
        model=str(model),
        data=str(data),
        dtype="float32" if arguments.tiny else "bfloat16",
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        memory_limit=arguments.memory_limit,
        use_cache=False,
    )
    request = ProfileRequest(
        base=dataclasses.replace(base, limit=arguments.questions),
        axes={"max_crops": tuple(arguments.values.split(","))},
        latency_samples=0,
    )
    started = time.perf_counter()
    result = profile(request, output=data.parent / "run", listener=Progress())
    seconds = time.perf_counter() - started
    print(f"profiled in {seconds:.0f} s", flush=True)
    exhaustive = {}
    load = KeptModel()
    for value in [text for text in arguments.exhaustive.split(",") if text]:
        used = next(entry["batch_size_used"] for entry in result.entries if entry["max_crops"] == int(value))
        exhaustive[value] = best_fixed(dataclasses.replace(base, knobs={"max_crops": value}), used, load)
        print(f"max_crops={value}: {exhaustive[value]}", flush=True)
    entries = [
        {**{name: entry.get(name) for name in KEPT}, "device_rate": rate}
        for entry, rate in zip(result.entries, device_rates, strict=True)
    ]
    return {"seconds": seconds, "entries": entries, "exhaustive": exhaustive}


class BatchTimes(EvalListener):
    """Every batch of a run: samples, and the seconds that the device had it for."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, float]] = []
        self._items, self._seconds = 0, 0.0

    def note(self, line: str) -> None:
        print(line, flush=True)

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        del cap, reserved_bytes
        self.batches.append((figures.items - self._items, figures.busy_seconds - self._seconds))
        self._items, self._seconds = figures.items, figures.busy_seconds

    def rate_near(self, size: int | None) -> float | None:
        """The best rate of a batch of about this size."""
        near = [(items, taken) for items, taken in self.batches if size and 0.8 * size <= items <= 1.25 * size]
        return max((items / max(taken, 1e-9) for items, taken in near), default=None)


def best_fixed(request: Any, used: int, load: Any) -> dict[str, Any]:
    """The rate at fixed sizes on both sides of the one used, until one does not fit or falls well behind."""
    rates: dict[int, float] = {}
    ready = prepared(request, load)
    for sizes in ([used], larger(used), smaller(used)):
        for size in sizes:
            rate = rate_at(request, size, load, ready)
            if rate is None:
                break
            rates[size] = rate
            if rate < BEHIND * max(rates.values()):
                break
    best = max(rates, key=rates.__getitem__)
    return {"rates": rates, "best": best, "used": used, "ratio": rates.get(used, 0.0) / rates[best]}


def larger(used: int) -> list[int]:
    """Six steps up; rounding never stands still."""
    sizes = [used]
    for _ in range(6):
        sizes.append(max(round(sizes[-1] * STEP), sizes[-1] + 1))
    return sizes[1:]


def smaller(used: int) -> list[int]:
    """Six steps down, to one at least."""
    sizes = [used]
    while sizes[-1] > 1 and len(sizes) <= 6:
        sizes.append(min(round(sizes[-1] / STEP), sizes[-1] - 1))
    return sizes[1:]


def prepared(request: Any, load: Any) -> dict[Any, Any]:
    """A question about every picture as the model takes it, by the picture: all ask the same."""
    import torch

    from brim.evaluation.setup import open_setup

    setup = open_setup(request, load=load)
    first = {picture_of(setup, item): item for item in reversed(range(len(setup.costs)))}
    with ThreadPoolExecutor() as pool:
        ready = dict(zip(first, pool.map(setup.task.prepare, first.values()), strict=True))
    if setup.device.type != "cuda":
        return ready
    return {picture: replaced(one, torch.Tensor, torch.Tensor.pin_memory) for picture, one in ready.items()}


def picture_of(setup: Any, item: int) -> Any:
    return setup.task.samples[item].images[0]


def rate_at(request: Any, size: int, load: Any, ready: Mapping[Any, Any]) -> float | None:
    """Samples per second at exactly this size, pictures prepared beforehand; None where it does not run whole."""
    from brim.evaluation.run import run_setup
    from brim.evaluation.setup import open_setup

    fixed = dataclasses.replace(request, limit=BATCHES * size, batch_size=size, fixed=True, num_workers=0)
    setup = open_setup(fixed, load=load)
    setup.task.prepare = lambda item: ready[picture_of(setup, item)]  # type: ignore[method-assign]
    times = BatchTimes()
    with tempfile.TemporaryDirectory() as folder:
        run_setup(fixed, setup, Path(folder), times)
    setup.task.release()
    if any(items != size for items, _ in times.batches):
        return None
    return max(items / taken for items, taken in times.batches[1:])


def markdown(document: dict[str, Any]) -> str:
    lines = [
        "| max_crops | crops used | batch | samples/s | of the device | of the best size | planning | of 2,000 | OOM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    planning = whole = 0.0
    for entry in document["entries"]:
        if entry["state"] == "failed":
            lines.append(f"| {entry['max_crops']} | failed: {entry['error']} |")
            continue
        found = document["exhaustive"].get(str(entry["max_crops"]))
        ratio = "" if found is None else f"{found['ratio']:.3f} (best at {found['best']})"
        rate = entry["device_rate"] or entry["samples_per_second"]
        run = 2000 / rate
        planning, whole = planning + entry["plan_seconds"], whole + run
        lines.append(
            f"| {entry['max_crops']} | {entry['crops_used_mean']:.1f} | {entry['batch_size_used']} "
            f"| {entry['samples_per_second']:.1f} | {rate:.1f} | {ratio} | {entry['plan_seconds']:.1f} s "
            f"| {entry['plan_seconds'] / run:.1%} | {entry['oom_events']} |"
        )
    lines.append(f"\nplanning in all: {planning:.1f} s, {planning / whole:.1%} of runs of 2,000 questions")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
