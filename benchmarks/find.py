"""brim, accelerate and Lightning look for a batch size on the same workloads, each in a fresh process.

`brim` is `brim.find`; `brim-decorator-1024` is `brim.find_executable_batch_size` from a start of 1,024, in the place of
accelerate's decorator (`accelerate-1024`) and around the same function: one step.

    python -m benchmarks.find --limit 24GiB --json results.json       # the table
    python -m benchmarks.find --limit 24GiB --before runs/before      # with an older checkout of brim in the same run
    python -m benchmarks.find --limit 24GiB --curves                  # fill the exhaustive curves first
    python -m benchmarks.find --contenders brim --workloads vit       # a part of it, also of those without a curve
    python -m benchmarks.find --tiny --contenders brim,accelerate-64  # to try it out, on a CPU
    python -m benchmarks.find --limit 24GiB --contenders brim-decorator-1024,accelerate-1024   # the two decorators
    python -m benchmarks.find --tiny --limit 1GiB --contenders brim-decorator-1024,accelerate-1024

Seconds are those from a built model to an answer, whoever searches. `--before PATH` is an old commit unpacked, for
instance below runs/, which git ignores: `mkdir -p runs/before; git archive COMMIT src | tar -x -C runs/before`; it is
searched with in processes of its own as the contender `brim-before`. The contenders take turns on each workload.

The curves (every size worth knowing, measured over several steps) live in benchmarks/data/curves-<gpu>.json; a size
that is there is not measured again. brim's rate is judged in the same process: in turns with further steps at its
size, steps are made at the fastest sizes of the curve that fit (no allocator retry), since a machine's speed changes
from day to day by more than what is judged. Other contenders, and workloads without a curve, are judged against the
best rate that the curve, or any contender, reached.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.find_contenders import IMPORTED, SEARCHES, is_installed, kind_of, synchronize
from benchmarks.workloads import FIRST_FIVE, WORKLOADS

CONTENDERS = ("brim", "accelerate-1024", "accelerate-128", "lightning-power")
BEFORE = "brim-before"
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"
PARTS = ("forecast", "warm_up", "steady", "release", "state", "ranks", "other")  # of `seconds` in a plan
SECONDS_BESIDE, STEPS_BESIDE = 0.7, (3, 12)  # a turn takes so long, in so many steps
SECONDS_AFTERWARDS = 8.0  # of further steps at most, but one: short of memory, a step takes seconds
FAR_TOO_SLOW = 3  # times a step at brim's rate: a size whose steps take longer is short of memory
BESIDE, ROUNDS_BESIDE = 3, 2  # of the fastest sizes on a curve, timed in turns with brim's, so many times


def main() -> None:
    arguments = _parse()
    if arguments.worker is not None:
        _worker(json.loads(arguments.worker))
        return
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for job, result in _run_jobs(_jobs(arguments), arguments.patience, ahead=not arguments.tiny):
        if job["task"] == "find":
            rows.append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "probes"}), flush=True)
        if arguments.json:
            document = {"environment": _facts(), "rows": rows, "totals": _totals(rows)}
            Path(arguments.json).write_text(json.dumps(document, indent=1))
        if arguments.deadline and time.monotonic() - started > arguments.deadline:
            print(f"stopped after {arguments.deadline:g} s (--deadline); what is missing can be run on its own")
            break
    print(table(rows, Curves(arguments.limit)), totals(rows), sep="\n\n")


def _jobs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    workloads = [name for name in (WORKLOADS if arguments.workloads else FIRST_FIVE) if arguments.workloads in name]
    contenders = [name for name in arguments.contenders.split(",") if name and is_installed(name)]
    if arguments.before is not None:
        if not (Path(arguments.before) / "src" / "brim").is_dir():
            raise SystemExit(f"--before {arguments.before}: there is no src/brim in it")
        contenders.insert(contenders.index("brim") + 1 if "brim" in contenders else 0, BEFORE)
    curves = Curves(arguments.limit)
    jobs: list[dict[str, Any]] = [
        {"task": "find", "workload": workload, "limit": arguments.limit, "contender": contender, "tiny": arguments.tiny,
         "before": str(Path(arguments.before).resolve()) if contender == BEFORE else None,
         "further_steps": arguments.further_steps if contender == "brim" else 5,
         "fastest_known": curves.fastest(workload) if contender == "brim" and not arguments.tiny else []}
        for workload in workloads
        for contender in contenders
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


def totals(rows: list[dict[str, Any]]) -> str:
    """The seconds of each contender over all workloads, and where brim's went, as Markdown."""
    lines = [
        "| contender | workloads | seconds | of accelerate's on these | " + " | ".join(PARTS) + " |",
        "|---|---|---|---|" + "---|" * len(PARTS),
    ]
    for name, total in _totals(rows).items():
        parts = total["parts"] or {}
        ratio = total["of_accelerate"]
        cells = [name, total["workloads"], _number(total["seconds"]), "—" if ratio is None else f"{ratio:.2f}"]
        cells += [_number(parts.get(part)) for part in PARTS]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contender: its seconds, those over accelerate's for the same workloads, and its parts."""
    found: dict[str, dict[str, Any]] = {}
    done = [row for row in rows if row.get("seconds") is not None]
    peer = next((row["contender"] for row in done if row["contender"].startswith("accelerate")), None)
    theirs = {row["workload"]: row["seconds"] for row in done if row["contender"] == peer}
    for name in dict.fromkeys(row["contender"] for row in done):
        own = {row["workload"]: row for row in done if row["contender"] == name}
        both = [workload for workload in own if workload in theirs]
        ratio = sum(own[one]["seconds"] for one in both) / sum(theirs[one] for one in both) if both else None
        timed = [row["parts"] for row in own.values() if row.get("parts")]
        parts = {part: sum(one[part] for one in timed) for part in PARTS} if len(timed) == len(own) else None
        seconds = sum(row["seconds"] for row in own.values())
        found[name] = {"workloads": len(own), "seconds": seconds, "of_accelerate": ratio, "parts": parts}
    return found


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
    parser.add_argument("--before", metavar="PATH", help="an older checkout, whose brim searches as well")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try this script out")
    parser.add_argument("--curves", action="store_true", help="measure the exhaustive curves first")
    parser.add_argument("--further-steps", type=int, default=50, help="steps at brim's size after the search")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a search is ended")
    parser.add_argument("--deadline", type=float, help="start no further job after this many seconds")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_jobs(
    jobs: list[dict[str, Any]], patience: float, *, ahead: bool
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each job in a fresh process, one at a time.

    `ahead`: all import and build their models before the first one is let go, so that none does so beside one that is
    timed; on a CPU, with little memory and few cores, each starts when the one before it has ended.
    """
    waiting: list[subprocess.Popen[str]] = []
    try:
        waiting += [_start(job) for job in jobs] if ahead else []
        for process in waiting:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready, or has ended
        for job in jobs:
            yield job, _result(job, waiting.pop(0) if waiting else _start(job), patience)
    finally:
        for process in waiting:
            process.kill()


def _start(job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.find", "--worker", json.dumps(job)]
    pipe = subprocess.PIPE
    source = Path(job.get("before") or ROOT) / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def _result(job: dict[str, Any], process: subprocess.Popen[str], patience: float) -> dict[str, Any]:
    """Let the process go; the last line of its output is its result, also of one that has to be ended."""
    kept: dict[str, Any] = {name: job[name] for name in ("task", "workload", "contender", "limit") if name in job}
    error = ""
    try:
        output, errors = process.communicate("go\n", timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        error = f"ended after {patience:g} s, start-up included"
    if process.returncode and not error:
        error = (errors.strip().splitlines() or ["no output"])[-1][:300]
    lines = output.strip().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines and lines != ["ready"] else kept  # found until then
    return {**result, "error": error} if error else result


def _worker(job: dict[str, Any]) -> None:
    import brim
    from benchmarks.workloads import build, tiny
    from brim.settings.sizes import parse_bytes

    source = Path(job.get("before") or ROOT) / "src"
    assert Path(brim.__file__).is_relative_to(source), f"another brim is imported than that of {source}"
    limit = parse_bytes(job["limit"]) if job.get("limit") else None
    spec = WORKLOADS[job["workload"]]
    workload = build(tiny(spec), "cpu") if job.get("tiny") else build(spec)
    synchronize(workload)
    contender = job.get("contender", "brim")
    kind = kind_of(contender)
    importlib.import_module(IMPORTED.get(kind, "brim.searching.find"))
    print("ready", flush=True)
    sys.stdin.readline()  # wait for the job before this one to end
    if job["task"] == "curve":
        print(json.dumps(_measure_curve(job, workload, limit)))
        return
    if kind != "brim":
        _cap(workload, limit)
    started = time.perf_counter()
    found = SEARCHES[kind](workload, limit, contender)
    synchronize(workload)
    row = {"workload": job["workload"], "contender": contender, "seconds": time.perf_counter() - started, **found}
    print(json.dumps(row), flush=True)
    _cap(workload, limit)
    row.update(_afterwards(workload, found["size"], job["further_steps"]))
    print(json.dumps(row), flush=True)
    if job["fastest_known"] and row["rate"] is not None:
        row.update(_beside(workload, found["size"], row["rate"], job["fastest_known"]))
        print(json.dumps(row))


def _beside(workload: Any, chosen: int, rate: float, sizes: Sequence[int]) -> dict[str, Any]:
    """The rates of the chosen size and of others, in turns: of each the median of its turns."""
    fewest, most = STEPS_BESIDE
    turns: dict[int, list[float]] = {size: [] for size in (chosen, *sizes)}
    short: set[int] = set()  # of memory in this process, although not when the curve was measured
    for _ in range(ROUNDS_BESIDE):
        for size in [one for one in turns if one not in short]:
            steps = min(max(math.ceil(SECONDS_BESIDE * rate / size), fewest), most)
            turn = _afterwards(workload, size, steps, longest=FAR_TOO_SLOW * size / rate)
            if size == chosen and turn["rate"] is None:
                return turn  # it ran out of memory, which the row has to say
            if size != chosen and (turn["rate"] is None or turn["later_retries"]):
                short.add(size)
                continue
            turns[size].append(turn["rate"])
    medians = {size: statistics.median(rates) for size, rates in turns.items() if rates}
    others = {size: median for size, median in medians.items() if size != chosen}
    own = medians[chosen]
    return {"rate": own, "rate_alone": rate, "rates_beside": others, "best_rate_beside": max([own, *others.values()])}


def _afterwards(workload: Any, size: int, steps: int, *, longest: float = math.inf) -> dict[str, Any]:
    """Further steps at the chosen size, as a run would make them: its rate, its retries, its OOMs.

    A size whose steps take more seconds than `longest` has no rate.
    """
    import gc

    import torch

    workload.release()  # what another size has left
    gc.collect()
    torch.cuda.empty_cache()
    try:
        batch = workload.make_batch(size)
        warm = _timed_step(workload, batch)
        if warm < SECONDS_AFTERWARDS / 4:  # else the first one's start is no part of it worth waiting for
            warm = _timed_step(workload, batch)
        if warm > longest:
            return {"rate": None, "later_ooms": 0, "error": f"a step at {size} takes {warm:.1f} s"}
        before = _retries(workload)
        seconds: list[float] = []
        while len(seconds) < steps and sum(seconds) < SECONDS_AFTERWARDS:
            seconds.append(_timed_step(workload, batch))
    except torch.OutOfMemoryError as error:
        return {"rate": None, "later_ooms": 1, "error": str(error)[:120]}
    retries = _retries(workload) - before
    rate = size / statistics.median(seconds)
    return {"rate": rate, "later_ooms": 0, "later_retries": retries, "further_steps": len(seconds)}


def _timed_step(workload: Any, batch: Any) -> float:
    started = time.perf_counter()
    workload.step(batch)
    synchronize(workload)
    return time.perf_counter() - started


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


def _cap(workload: Any, limit: int | None) -> None:
    """Let torch's allocator reserve no more than the limit; the CPU has none."""
    import torch

    if limit is not None and workload.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)


def _retries(workload: Any) -> int:
    import torch

    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if workload.device.type == "cuda" else 0


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f}"


def _facts() -> dict[str, Any]:
    from benchmarks.environment import environment

    return environment()


if __name__ == "__main__":
    main()
