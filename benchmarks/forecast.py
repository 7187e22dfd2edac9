"""Forecasts against measured peaks, case by case (benchmarks/forecast_cases.py).

    python -m benchmarks.forecast                               # on a CUDA machine: forecast, measure, run capped
    python -m benchmarks.forecast --part video --jobs 4         # a part of it, four processes at a time
    python -m benchmarks.forecast --compare benchmarks/data/peaks-h200.json       # anywhere: against stored peaks

On CUDA every case is a fresh process: it forecasts the peaks without touching the card, then runs three steps under a
cap of the forecast reserved bytes plus the default margin, which must not run out of memory, and reads the real peaks.
Where the cap was felt they are read in another process without it. Measured peaks go to
benchmarks/data/peaks-<gpu>.json, tagged with the versions they were made with; several processes may share the card,
since no time is measured on it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
PEAKS_SCHEMA = "brim.peaks/1"
STEPS = 3

Row = dict[str, Any]


def main() -> None:
    arguments = _parse()
    if arguments.worker is not None:
        print(json.dumps(_worker(json.loads(arguments.worker))))
        return
    rows = compared(arguments.compare, arguments.part) if arguments.compare else list(_measured(arguments))
    print(table(rows))
    print("\n" + summary(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"environment": _environment(), "rows": rows}, indent=1))


# --- comparing with stored peaks, on any machine ---------------------------------------------------------------------


def compared(files: Sequence[str], part: str = "") -> list[Row]:
    """A row for each stored peak of the cases asked for."""
    rows: list[Row] = []
    for file in files:
        stored = json.loads(Path(file).read_text())
        assert stored["schema"] == PEAKS_SCHEMA, f"{file}: {stored['schema']}"
        for measurement in stored["measurements"]:
            rows += _compared_measurement(stored["gpu"], measurement, part)
    return rows


def _compared_measurement(gpu: str, measurement: dict[str, Any], part: str) -> list[Row]:
    from benchmarks.forecast_cases import case_named
    from brim.forecasting.overheads import version_pair

    version = version_pair(measurement["environment"]["packages"]["torch"])
    peaks: dict[str, list[Row]] = {}
    for peak in measurement["cases"]:
        case = case_named(peak["case"])
        if case is not None and case.is_of(part):
            peaks.setdefault(case.name, []).append(peak)
    rows = []
    for name, measured in peaks.items():
        rows += _compared_case(name, gpu, version, measurement.get("after"), measured)
    return rows


def _compared_case(
    name: str, gpu: str, version: tuple[int, int], after: int | None, measured: Sequence[Row]
) -> list[Row]:
    """Two traces serve all sizes of a case. `after` is the size that a process began with: that one it ran afresh."""
    from benchmarks.forecast_cases import build, case_named
    from brim.forecasting.forecast import Forecaster, TracedWorkload
    from brim.forecasting.gpus import find_gpu
    from brim.forecasting.shape_tensor import without_initialisation

    case = case_named(name)
    assert case is not None
    with without_initialisation():
        workload = build(case, "cpu")
    traced = TracedWorkload(workload)
    first, later = (Forecaster(traced, find_gpu(gpu), torch_version=version, after=size) for size in (None, after))
    rows = []
    for peak in sorted(measured, key=lambda peak: int(peak["batch_size"])):
        started = time.perf_counter()
        forecast = (first if peak["batch_size"] == after else later).at(peak["batch_size"])
        rows.append(
            {
                **peak,
                "part": case.part,
                "forecast_allocated_bytes": forecast.peak_allocated_bytes,
                "forecast_reserved_bytes": forecast.peak_reserved_bytes,
                "seconds": time.perf_counter() - started,
                "approximate": forecast.approximate,
            }
        )
    return rows


# --- measuring, on a CUDA machine ------------------------------------------------------------------------------------


def _measured(arguments: argparse.Namespace) -> Iterator[Row]:
    """Every chosen case in a process of its own; what is measured is stored as it comes."""
    from benchmarks.forecast_cases import CASES

    started = time.monotonic()
    cases = [case for case in CASES if case.is_of(arguments.part)]

    def run(name: str) -> Row:
        if arguments.deadline and time.monotonic() - started > arguments.deadline:
            return {"case": name, "error": f"not started: --deadline {arguments.deadline:g}"}
        job = {"case": name, "device": arguments.device, "record": arguments.record}
        row = _in_a_process(job)
        if row.get("capped", "fits") == "fits":
            return row
        return {**_in_a_process({**job, "free": True}), "capped": row["capped"]}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(run, [case.name for case in cases]):
            print(json.dumps(row), flush=True)
            if "error" not in row and arguments.device.startswith("cuda"):
                _store(row)
            yield row


def _in_a_process(job: Row) -> Row:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.forecast", "--worker", json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"case": job["case"], "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: Row = json.loads(lines[-1])
    return result


def _worker(job: Row) -> Row:
    import torch

    from benchmarks.forecast_cases import build, case_named
    from brim.memory.devices import DEFAULT_MARGIN, memory_of

    case = case_named(job["case"])
    assert case is not None
    row: Row = {"case": case.name, "part": case.part, "batch_size": case.batch_size}
    row.update(_forecast_row(case, job["device"]))
    torch.manual_seed(0)
    with _recorded(job.get("record"), case.name):
        workload = build(case, job["device"])
        memory = memory_of(workload.device)
        cap = None if job.get("free") else int(row["forecast_reserved_bytes"] / (1 - DEFAULT_MARGIN))
        row.update(_run(workload, memory, case.batch_size, cap))
    return row


def _forecast_row(case: Any, device: str) -> Row:
    """The forecast, made before anything is put on the card."""
    from benchmarks.forecast_cases import build
    from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
    from brim.forecasting.shape_tensor import without_initialisation

    with without_initialisation():
        workload = build(case, "cpu")
    gpu = choose_gpu(None, None) if device.startswith("cuda") else choose_gpu("h200", None)
    started = time.perf_counter()
    forecast = Forecaster(TracedWorkload(workload), gpu).at(case.batch_size)
    return {
        "seconds": time.perf_counter() - started,
        "forecast_allocated_bytes": forecast.peak_allocated_bytes,
        "forecast_reserved_bytes": forecast.peak_reserved_bytes,
        "approximate": forecast.approximate,
    }


def _run(workload: Any, memory: Any, size: int, cap: int | None) -> Row:
    """A few steps: their peaks, and how they went under the cap; one that it does not touch changes nothing."""
    from brim.memory.failures import FailureKind, classify

    try:
        with contextlib.ExitStack() as limits:
            if cap is not None:
                limits.enter_context(memory.limited(cap))
            reading = limits.enter_context(memory.metered(_resident(workload)))
            batch = workload.make_batch(size)
            for _ in range(STEPS):
                workload.step(batch)
    except Exception as error:
        kind = "OUT OF MEMORY" if classify(error).kind is FailureKind.OUT_OF_MEMORY else "failed"
        return {"capped": f"{kind}: {str(error).splitlines()[0][:300]}"}
    peaks: Row = {
        "peak_allocated_bytes": reading.peak_allocated_bytes,
        "peak_reserved_bytes": reading.peak_reserved_bytes,
    }
    if cap is None:
        return peaks
    return {**peaks, "capped": f"fits after {reading.alloc_retries} retries" if reading.alloc_retries else "fits"}


@contextlib.contextmanager
def _recorded(folder: str | None, case: str) -> Iterator[None]:
    """Write what the allocator of the card is asked for meanwhile, to lay beside a forecast's own timeline."""
    import torch

    if folder is None:
        yield
        return
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
    yield
    torch.cuda.synchronize()
    traces = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    events = [(entry["action"], entry["addr"], entry["size"], entry["stream"]) for entry in traces]
    with gzip.open(Path(folder) / f"{case.replace(' ', '-')}.json.gz", "wt", encoding="utf-8") as file:
        json.dump(events, file)


def _resident(workload: Any) -> Iterator[Any]:
    for module in workload.modules():
        yield from module.parameters()
        yield from module.buffers()


def _store(row: Row) -> None:
    """Put one measured peak into the file of this card, under the versions of today."""
    import torch

    from brim.forecasting.gpus import find_gpu

    card = find_gpu(torch.cuda.get_device_name())
    DATA.mkdir(exist_ok=True)
    path = DATA / f"peaks-{card.key.split('-')[0]}.json"
    stored: dict[str, Any] = {"schema": PEAKS_SCHEMA, "gpu": card.key, "measurements": []}
    if path.exists():
        stored = json.loads(path.read_text())
    environment = _environment()
    measurements: list[dict[str, Any]] = stored["measurements"]
    method = f"benchmarks/forecast.py: a fresh process, {STEPS} steps"
    mine = next((m for m in measurements if m["environment"] == environment and m["method"] == method), None)
    if mine is None:
        mine = {"environment": environment, "method": method, "cases": []}
        measurements.append(mine)
    fields = ("case", "batch_size", "peak_allocated_bytes", "peak_reserved_bytes")
    kept = [c for c in mine["cases"] if (c["case"], c["batch_size"]) != (row["case"], row["batch_size"])]
    mine["cases"] = [*kept, {field: row[field] for field in fields}]
    path.write_text(json.dumps(stored, indent=1))


# --- summary of the rows ---------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """All rows as Markdown, good and bad."""
    lines = [
        "| case | batch | allocated MiB | forecast | error | reserved MiB | forecast | error | s | capped |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | — | {row['error']} | | | | | | | |")
            continue
        cells = [row["case"], row["batch_size"]]
        for kind in ("allocated", "reserved"):
            real, forecast = row[f"peak_{kind}_bytes"], row[f"forecast_{kind}_bytes"]
            cells += [_mib(real), _mib(forecast), f"{forecast / real - 1:+.1%}"]
        cells += [f"{row['seconds']:.1f}", row.get("capped", "")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """The figures that the targets are about."""
    measured = [row for row in rows if "error" not in row]
    lines = [f"{len(measured)} cases, {len(rows) - len(measured)} not measured"]
    for kind in ("allocated", "reserved"):
        errors = [row[f"forecast_{kind}_bytes"] / row[f"peak_{kind}_bytes"] - 1 for row in measured]
        if errors:
            sizes = sorted(map(abs, errors))
            lines.append(
                f"peak {kind}: median error {statistics.median(sizes):.2%}, 95th percentile "
                f"{sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)]:.2%}, lowest {min(errors):+.2%}, "
                f"highest {max(errors):+.2%}"
            )
    if measured:
        lines.append(f"seconds for a forecast: median {statistics.median(row['seconds'] for row in measured):.2f}")
    capped = [row["capped"] for row in measured if "capped" in row]
    if capped:
        fine = sum(one.startswith("fits") for one in capped)
        lines.append(f"under a cap of the forecast plus the margin: {fine} of {len(capped)} run")
    return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def _environment() -> dict[str, Any]:
    from benchmarks.environment import environment
    from brim.monitor.nvml import driver_version

    return {**environment(), "driver": driver_version()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs="+", help="files of stored peaks to compare with, on any machine")
    parser.add_argument(
        "--part", default="", help="only cases whose name contains this, or of this part; or several: a,b"
    )
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--deadline", type=float, help="start no further case after this many seconds")
    parser.add_argument("--device", default="cuda", help="cpu tries the script out, with the meter of the CPU")
    parser.add_argument("--record", help="also write every request to the card's allocator into this folder")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
