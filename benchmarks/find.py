"""brim, accelerate and Lightning look for a batch size on the same workloads, each in a fresh process.

    python -m benchmarks.find --limit 24GiB --json results.json       # the table
    python -m benchmarks.find --limit 24GiB --curves                  # fill the exhaustive curves first
    python -m benchmarks.find --contenders brim --workloads vit       # a part of it, also of those without a curve

The curves (every size worth knowing, measured over several steps) live in benchmarks/data/curves-<gpu>.json; a size
that is there is not measured again. brim's rate is judged in the same process: in turns with further steps at its
size, steps are made at the fastest sizes of the curve that fit (no allocator retry), since a machine's speed changes
from day to day by more than what is judged. Other contenders, and workloads without a curve, are judged against the
best rate that the curve, or any contender, reached.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import FIRST_FIVE, WORKLOADS

CONTENDERS = ("brim", "accelerate-1024", "accelerate-128", "lightning-power")
DATA = Path(__file__).parent / "data"
SECONDS_BESIDE, STEPS_BESIDE = 0.7, (3, 12)  # a turn takes so long, in so many steps
BESIDE, ROUNDS_BESIDE = 3, 2  # of the fastest sizes on a curve, timed in turns with brim's, so many times


def main() -> None:
    arguments = _parse()
    if arguments.worker is not None:
        _worker(json.loads(arguments.worker))
        return
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for job, result in _run_jobs(_jobs(arguments), arguments.patience):
        if job["task"] == "find":
            rows.append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "probes"}), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps({"environment": _facts(), "rows": rows}, indent=1))
        if arguments.deadline and time.monotonic() - started > arguments.deadline:
            print(f"stopped after {arguments.deadline:g} s (--deadline); what is missing can be run on its own")
            break
    print(table(rows, Curves(arguments.limit)))


def _jobs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    workloads = [name for name in (WORKLOADS if arguments.workloads else FIRST_FIVE) if arguments.workloads in name]
    contenders = [name for name in arguments.contenders.split(",") if name]
    jobs: list[dict[str, Any]] = [
        {"task": "find", "workload": workload, "limit": arguments.limit, "contender": contender,
         "further_steps": arguments.further_steps if contender == "brim" else 5,
         "fastest_known": Curves(arguments.limit).fastest(workload) if contender == "brim" else []}
        for contender in contenders
        for workload in workloads
    ]  # fmt: skip
    if arguments.curves:
        jobs += [{"task": "curve", "workload": workload, "limit": arguments.limit} for workload in workloads]
    return jobs


def table(rows: list[dict[str, Any]], curves: Curves) -> str:
    """The rows as Markdown, with every rate over the best one known for its workload."""
    lines = [
        "| workload | contender | size | rate /s | of best | probes | OOM in search | seconds | then: OOM | retries |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seen = [r["rate"] for r in rows if r["workload"] == row["workload"] and r.get("rate")]
        best = row.get("best_rate_beside") or max(curves.rates(row["workload"]) or seen, default=None)
        share = f"{row['rate'] / best:.3f}" if row.get("rate") and best else "—"
        cells = [row["workload"], row["contender"], row.get("size"), _number(row.get("rate")), share]
        cells += [row.get("tries"), row.get("ooms"), _number(row.get("seconds")), row.get("later_ooms")]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, row.get("later_retries")]) + " |")
        if row.get("error"):
            lines[-1] += f" {row['error']}"
    return "\n".join(lines)


class Curves:
    """The exhaustive curves: one JSON file per GPU, filled bit by bit and written after every size."""

    def __init__(self, limit: str | None) -> None:
        self.limit = limit or "uncapped"

    def path(self, gpu: str) -> Path:
        DATA.mkdir(exist_ok=True)
        return DATA / f"curves-{gpu}.json"

    def load(self, gpu: str) -> dict[str, Any]:
        path = self.path(gpu)
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"curves": {}}
        return data

    def points(self, data: dict[str, Any], workload: str) -> dict[str, Any]:
        found: dict[str, Any] = data["curves"].setdefault(self.limit, {}).setdefault(workload, {})
        return found

    def rates(self, workload: str) -> list[float]:
        return [rate for rate, _ in self._fitting(workload)]

    def fastest(self, workload: str) -> list[int]:
        """The sizes with the best rates on the stored curve, the fastest first."""
        return [size for _, size in sorted(self._fitting(workload), reverse=True)[:BESIDE]]

    def _fitting(self, workload: str) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        for path in DATA.glob("curves-*.json"):
            points = self.points(json.loads(path.read_text()), workload)
            found += [(point["rate"], int(size)) for size, point in points.items() if point["verdict"] == "fits"]
        return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", help="memory limit such as 24GiB; none: the whole card")
    parser.add_argument("--workloads", default="", help="workloads whose name contains this; else the five with curves")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--curves", action="store_true", help="measure the exhaustive curves first")
    parser.add_argument("--further-steps", type=int, default=50, help="steps at brim's size after the search")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a search is ended")
    parser.add_argument("--deadline", type=float, help="start no further job after this many seconds")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_jobs(jobs: list[dict[str, Any]], patience: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each job in a fresh process, one at a time; the next one imports and builds its model while one runs."""
    waiting = [_start(job) for job in jobs[:1]]
    try:
        for position, job in enumerate(jobs):
            process = waiting.pop(0)
            if position + 1 < len(jobs):
                waiting.append(_start(jobs[position + 1]))
            yield job, _result(job, process, patience)
    finally:
        for process in waiting:
            process.kill()


def _start(job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.find", "--worker", json.dumps(job)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _result(job: dict[str, Any], process: subprocess.Popen[str], patience: float) -> dict[str, Any]:
    """Let the process go; the last line of its output is its result."""
    try:
        output, errors = process.communicate("go\n", timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {**job, "error": f"ended after {patience:g} s, start-up included"}
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        return {**job, "error": (errors.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _worker(job: dict[str, Any]) -> None:
    import torch

    from benchmarks.workloads import build
    from brim.settings.sizes import parse_bytes

    limit = parse_bytes(job["limit"]) if job.get("limit") else None
    workload = build(WORKLOADS[job["workload"]])
    torch.cuda.synchronize()
    sys.stdin.readline()  # wait for the job before this one to end
    if job["task"] == "curve":
        print(json.dumps(_measure_curve(job, workload, limit)))
        return
    contender = job["contender"]
    search = {"brim": _with_brim, "accelerate": _with_accelerate, "lightning": _with_lightning}[contender.split("-")[0]]
    if limit is not None and contender != "brim":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    started = time.perf_counter()
    found = search(workload, limit, contender)
    torch.cuda.synchronize()
    row = {"workload": job["workload"], "contender": contender, "seconds": time.perf_counter() - started, **found}
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    row.update(_afterwards(workload, found["size"], job["further_steps"]))
    if job["fastest_known"] and row["rate"] is not None:
        row.update(_beside(workload, found["size"], row["rate"], job["fastest_known"]))
    print(json.dumps(row))


def _beside(workload: Any, chosen: int, rate: float, sizes: Sequence[int]) -> dict[str, Any]:
    """The rates of the chosen size and of others, in turns: of each the median of its turns."""
    fewest, most = STEPS_BESIDE
    turns: dict[int, list[float]] = {size: [] for size in (chosen, *sizes)}
    for _ in range(ROUNDS_BESIDE):
        for size, rates in turns.items():
            turn = _afterwards(workload, size, min(max(math.ceil(SECONDS_BESIDE * rate / size), fewest), most))
            if size == chosen and turn["rate"] is None:
                return turn  # it ran out of memory, which the row has to say
            if turn["rate"] is not None and not (turn["later_retries"] and size != chosen):
                rates.append(turn["rate"])
    medians = {size: statistics.median(rates) for size, rates in turns.items() if rates}
    others = {size: median for size, median in medians.items() if size != chosen}
    own = medians[chosen]
    return {"rate": own, "rate_alone": rate, "rates_beside": others, "best_rate_beside": max([own, *others.values()])}


def _with_brim(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    from brim.searching.find import SearchListener, find_plan
    from brim.settings.find_settings import SearchSettings

    del contender
    walls: list[float] = []

    class Clock(SearchListener):
        def trying(self, size: int) -> None:  # noqa: ARG002
            walls.append(-time.perf_counter())

        def tried(self, probe: Any) -> None:  # noqa: ARG002
            walls[-1] += time.perf_counter()

    plan = find_plan(workload, SearchSettings(memory_limit_bytes=limit, use_cache=False), listener=Clock())
    return {
        "size": plan.size,
        "tries": len(plan.probes),
        "ooms": plan.oom_events,
        "largest": plan.batch_size_max,
        "estimate": plan.batch_size_max_estimate,
        "reason": plan.reason,
        "probes": [{**probe.to_json(), "wall": wall} for probe, wall in zip(plan.probes, walls, strict=True)],
    }


def _with_accelerate(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    import torch
    from accelerate.utils import find_executable_batch_size

    del limit
    tried: list[int] = []

    @find_executable_batch_size(  # type: ignore[untyped-decorator]
        starting_batch_size=int(contender.split("-")[1])
    )
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        workload.step(workload.make_batch(batch_size))
        torch.cuda.synchronize()
        return batch_size

    size = run()
    return {"size": size, "tries": len(tried), "ooms": len(tried) - 1}


def _with_lightning(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    import logging
    import warnings

    import torch

    try:
        pl = importlib.import_module("lightning.pytorch")
    except ImportError:
        pl = importlib.import_module("pytorch_lightning")

    del limit
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tried: list[int] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]  # only known at run time
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.batch_size = 2
            self.unused = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> None:
            if not tried or tried[-1] != len(batch):
                tried.append(len(batch))
            workload.step(workload.make_batch(len(batch)))

        def configure_optimizers(self) -> Any:
            return None

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(100_000), batch_size=self.batch_size)  # type: ignore[arg-type]

    trainer = pl.Trainer(
        accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    tuner_class = importlib.import_module(pl.__name__ + ".tuner").Tuner
    module = Module()
    mode = "binsearch" if contender.endswith("binsearch") else "power"
    size = tuner_class(trainer).scale_batch_size(module, mode=mode, max_trials=16)
    return {"size": size, "tries": len(tried), "ooms": sum(n > size for n in tried)}


def _afterwards(workload: Any, size: int, steps: int) -> dict[str, Any]:
    """Further steps at the chosen size, as a run would make them: its rate, its retries, its OOMs."""
    import gc

    import torch

    workload.release()  # what another size has left
    gc.collect()
    torch.cuda.empty_cache()
    try:
        batch = workload.make_batch(size)
        for _ in range(2):
            workload.step(batch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        seconds: list[float] = []
        while len(seconds) < steps:
            started = time.perf_counter()
            workload.step(batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        return {"rate": None, "later_ooms": 1, "error": str(error)[:120]}
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    rate = size / statistics.median(seconds)
    return {"rate": rate, "later_ooms": 0, "later_retries": retries, "further_steps": steps}


def _measure_curve(job: dict[str, Any], workload: Any, limit: int | None) -> dict[str, Any]:
    """Measure what is missing of one curve: coarse sizes first, then every sixteenth of the largest."""
    import torch

    from brim.searching.probe import DeviceProber, ProbeSettings

    curves = Curves(job.get("limit"))
    gpu = torch.cuda.get_device_name().split()[-1].lower()
    data = curves.load(gpu)
    points = curves.points(data, job["workload"])
    data.setdefault("environments", {})[curves.limit] = _facts()
    settings = ProbeSettings(memory_limit_bytes=limit, margin=0.0, steady_seconds=0.4, timeout_seconds=15)
    with DeviceProber(workload, settings, preserve_state=False) as prober:

        def fits(size: int) -> bool:
            if str(size) not in points:
                probe = prober.probe(size)
                points[str(size)] = {
                    "verdict": probe.verdict,
                    "rate": probe.samples_per_second if probe.verdict in ("fits", "thrashes") else None,
                    "allocated": probe.peak_allocated_bytes,
                    "reserved": probe.peak_reserved_bytes,
                    "retries": probe.alloc_retries,
                }
                curves.path(gpu).write_text(json.dumps(data, indent=1))
            return str(points[str(size)]["verdict"]) == "fits"

        largest = _coarse_then_fine(fits)
    return {"workload": job["workload"], "points": len(points), "largest": largest}


def _coarse_then_fine(fits: Callable[[int], bool]) -> int:
    size, largest = 1, 0
    while fits(size):
        size, largest = size * 2, size
    low, high = largest, size
    while high - low > max(low // 50, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for part in range(3, 16):
        fits(max(low * part // 16, 1))
    return low


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f}"


def _facts() -> dict[str, Any]:
    from benchmarks.environment import environment

    return environment()


if __name__ == "__main__":
    main()
