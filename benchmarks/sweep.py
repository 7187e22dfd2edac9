"""Sweeps on a CUDA machine: planned batch sizes beside hand-picked ones, and many small experiments on one card.

    python -m benchmarks.sweep planned --json planned.json                       # nine video models at auto
    python -m benchmarks.sweep planned --memory-limit 24GiB --json planned24.json
    python -m benchmarks.sweep ladder planned24.json --memory-limit 24GiB --json ladder24.json   # fixed sizes beside
    python -m benchmarks.sweep given --json given.json                           # the hand-picked sizes, exactly
    python -m benchmarks.sweep packing --json packing.json                       # 12 small ones, packed and in turn
    python -m benchmarks.sweep packing --tiny                                    # to try it out, without a card
    python -m benchmarks.sweep tables planned24.json ladder24.json given.json    # the rows beside each other

Training is 16 frames at 224² (112² for the *_18 models), bfloat16, AdamW, on built-in clips. A rate is that of the run
as a whole; `of best` is the rate at the size used over the best of a ladder of fixed sizes under the same limit, where
there is one among the files, else over the best that any size tried in the run itself had. A ladder times forward and
backward alone, as micro-batches are. Each part takes less than ten minutes; `--models` and `--steps` make it shorter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from brim.memory.devices import memory_of
from brim.settings.config_files import read_sweep
from brim.settings.sizes import format_bytes, parse_bytes
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.forecast_process import ForecastProcess
from brim.sweeps.forecasts import SizeForecast, forecast_experiments
from brim.sweeps.job import AttemptOutcome, Job, SweepListener
from brim.sweeps.launch_local import LocalLauncher
from brim.sweeps.run import SweepPlan, SweepResult, run_sweep
from brim.sweeps.scheduler import local_devices, mps_is_running
from brim.training.run_files import read_steps

GIVEN = {  # by hand, for no card in particular
    "r3d_18": 128, "mc3_18": 64, "r2plus1d_18": 128, "s3d": 32, "mvit_v1_b": 16, "mvit_v2_s": 16, "swin3d_b": 16,
    "swin3d_s": 16, "swin3d_t": 16,
}  # fmt: skip
QUICK = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")  # they try larger sizes, which takes more steps
LADDER = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
RISES = 1.01  # a doubling that brings less: the rate has stopped rising
LOOK_SECONDS = 0.6


def main() -> None:
    arguments = parse()
    if arguments.part == "tables":
        print(side_by_side([json.loads(Path(file).read_text()) for file in arguments.files]))
        return
    parts = {"planned": video, "given": video, "packing": packing, "ladder": ladder}
    with tempfile.TemporaryDirectory() as folder:
        document = {
            "part": arguments.part,
            "arguments": vars(arguments),
            **parts[arguments.part](arguments, Path(folder)),
        }
    document["environment"] = environment()
    if arguments.part == "packing":
        print(packing_table(document))
    else:
        print(json.dumps(document, indent=2) if arguments.part == "ladder" else side_by_side([document]))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("planned", "given", "packing", "ladder", "tables"))
    parser.add_argument("files", nargs="*", help="with tables and ladder: what the other parts wrote")
    parser.add_argument("--models", default=",".join(GIVEN))
    parser.add_argument("--memory-limit", default=None)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a model; of a quick one thrice")
    parser.add_argument(
        "--samples", type=int, default=1024, help="clips; the effective batch is an eighth, 128 at most"
    )
    parser.add_argument("--small", type=int, default=12, help="experiments of the packing part")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default=None)
    return parser.parse_args()


def video(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each model for a few steps, at a planned size or at the one given by hand."""
    models = arguments.models.split(",")
    planned = arguments.part == "planned"
    training: dict[str, Any] = {"dtype": "bfloat16"}
    if arguments.memory_limit:
        training["memory_limit"] = arguments.memory_limit
    source = {
        "data": {"type": "moving_shapes", "val_split": "none", "params": {"samples": arguments.samples}},
        "hp": {"epochs": 100, "frames": 16},
        "optimizer": {"name": "adamw"},
        "training": training,
        "grid_search": {
            "grid": {
                "model.type": models,
                "hp.size": [112 if model.endswith("_18") else 224 for model in models],
                "hp.max_steps": [arguments.steps * (3 if model in QUICK and planned else 1) for model in models],
                "hp.batch_size": ["auto"] if planned else [GIVEN[model] for model in models],
            },
            "zip": [["model.type", "hp.size", "hp.max_steps", *([] if planned else ["hp.batch_size"])]],
        },
    }
    result, seconds, forecast_seconds = sweep(source, folder / "sweep", jobs_per_gpu=1, retry=planned)
    return {
        "seconds": seconds,
        "forecast_seconds": forecast_seconds,
        "rows": [video_row(result, entry) for entry in result.document["experiments"]],
    }


def video_row(result: SweepResult, entry: Mapping[str, Any]) -> dict[str, Any]:
    outcome = entry["result"]
    forecast = entry["forecast"] or {}
    found = found_in(result.folder / outcome["folder"])
    rates = found["rates"]
    used = outcome.get("batch_size_used")
    best = max(rates.values(), default=None)
    return {
        "model": entry["settings"]["model"]["type"],
        "state": outcome["state"],
        "error": outcome["error"],
        "batch_size": used,
        "samples_per_second": outcome.get("samples_per_second"),
        "of_best": rates[used] / best if best and used in rates else None,
        **found,
        "oom_events": outcome.get("oom_events"),
        "peak_reserved_bytes": outcome.get("peak_reserved_bytes"),
        "forecast_bytes": forecast.get("peak_reserved_bytes"),
        "forecast_size": forecast.get("batch_size"),
    }


def ladder(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Fixed sizes of every model, the one given by hand and those that the documents named used among them."""
    del folder
    documents = [json.loads(Path(file).read_text()) for file in arguments.files]
    limit = arguments.memory_limit
    memory = memory_of("cuda")
    started, rows = time.perf_counter(), []
    for model in arguments.models.split(","):
        used = {GIVEN[model]} | {
            row["batch_size"]
            for document in documents
            for row in document["rows"]
            if row["model"] == model and row["batch_size"]
        }
        with memory.limited(parse_bytes(limit) if limit is not None else memory.total_bytes()):
            rows.append({"model": model, "rates": ladder_rates(model, sorted({*LADDER, *used}), used)})
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "seconds": time.perf_counter() - started}


def ladder_rates(model: str, sizes: Sequence[int], used: set[int]) -> dict[int, float]:
    """Samples per second of forward and backward; past those used, until the rate has stopped rising."""
    import torch

    from brim.models.build import build_workload
    from brim.settings.find_settings import WorkloadRequest

    knobs = {"frames": 16, "size": 112 if model.endswith("_18") else 224}
    request = WorkloadRequest(model=f"torchvision:{model}", mode="train", knobs=knobs, dtype="bfloat16")
    workload: Any = build_workload(request)[0]
    rates: dict[int, float] = {}
    try:
        workload.step(workload.make_batch(2))  # the optimizer's state takes its room
        for size in sizes:
            rates[size] = backward_rate(workload, size)
            best = max(rates.values())
            lately = [rate for earlier, rate in rates.items() if earlier >= size / 2]
            if size > max(used, default=0) and len(rates) > 2 and max(lately[1:], default=0) < RISES * lately[0]:
                break
            if size > max(used, default=0) and rates[size] < 0.9 * best:
                break
    except torch.OutOfMemoryError:
        pass  # the end of the ladder
    return rates


def backward_rate(workload: Any, size: int) -> float:
    """The median of a few, or a long one, after one that warms up; the optimizer steps once a window, at any size."""
    import torch

    memory_of("cuda").release()
    batch = workload.make_batch(size)
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < 9 and sum(taken) < LOOK_SECONDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        workload._backward(batch)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return size / statistics.median(taken[1:])


def found_in(run: Path) -> dict[str, Any]:
    """The sizes in a run's folder: the rates measured, and the cost of finding them."""
    return {"rates": probe_rates(run / "run.json"), "planning_seconds": planning_seconds(run / "steps.jsonl")}


def probe_rates(record: Path) -> dict[int, float]:
    """Samples per second of every size that a run has tried."""
    try:
        plan = json.loads(record.read_text())["plan"]
    except (OSError, ValueError, KeyError):
        return {}
    return {
        probe["batch_size"]: probe["samples_per_second"] for probe in plan["probes"] if probe.get("samples_per_second")
    }


def planning_seconds(steps: Path) -> float | None:
    """What finding the size has cost a run: its steps against as many of the steady ones of its second half."""
    seconds = [line["seconds"] for line in read_steps(steps)]
    if len(seconds) < 2:
        return None
    return float(sum(seconds) - len(seconds) * statistics.median(seconds[len(seconds) // 2 :]))


def packing(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same small experiments one after the other, and as many at once as fit."""
    size, samples, epochs = (32, 64, 1) if arguments.tiny else (64, 2048, 4)
    source = {
        "data": {
            "type": "moving_shapes",
            "num_workers": 0,
            "params": {"samples": samples, "val_samples": samples // 8},
        },
        "hp": {"epochs": epochs, "size": size, "batch_size": 32},
        "training": {"device": "cpu" if arguments.tiny else "auto"},
        "grid_search": {
            "grid": {"model.type": ["resnet18"], "hp.learning_rate": [1e-4 * (1 + i) for i in range(arguments.small)]}
        },
    }
    found: dict[str, Any] = {"mps": mps_is_running()}
    for name, jobs in (("one_after_another", 1), ("packed", 2 if arguments.tiny else None)):
        result, seconds, _ = sweep(source, folder / name, jobs_per_gpu=jobs, retry=True, forecasting=not arguments.tiny)
        found[name] = {"seconds": seconds, "counts": result.document["counts"]}
    found["times_sooner"] = found["one_after_another"]["seconds"] / found["packed"]["seconds"]
    return found


def packing_table(found: Mapping[str, Any]) -> str:
    """Both ways as Markdown."""
    base = found["one_after_another"]["seconds"]
    lines = ["| way | seconds | times sooner | experiments |", "|---|---|---|---|"]
    for way in ("one_after_another", "packed"):
        seconds, counts = found[way]["seconds"], found[way]["counts"]
        ended = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        lines.append(f"| {way.replace('_', ' ')} | {seconds:.1f} | {base / seconds:.2f} | {ended} |")
    return "\n".join(lines) + f"\n\nCUDA MPS: {'running' if found['mps'] else 'not running'}"


def sweep(
    source: Mapping[str, Any], folder: Path, *, jobs_per_gpu: int | None, retry: bool, forecasting: bool = True
) -> tuple[SweepResult, float, float]:
    """Run it on this machine; gives the result, the seconds of the experiments and those of the forecasts."""
    file = read_sweep(source)
    expansion = file.expand()
    began = time.perf_counter()
    with ForecastProcess() as forecaster:
        found = forecaster.devices()
        forecaster.card = {"here": True} if found else {}
        forecasts: dict[str, SizeForecast] = {}
        if forecasting:
            forecasts = forecast_experiments(expansion.experiments, forecaster.forecast)
    planned = time.perf_counter()
    launcher = LocalLauncher(local_devices(found, jobs_per_gpu=jobs_per_gpu), shares=jobs_per_gpu is not None)
    request = SweepRequest(file="benchmark", retry=retry, use_cache=False)
    plan = SweepPlan(expansion=expansion, forecasts=forecasts)
    result = run_sweep(plan, request, launcher, output=folder, listener=Progress())
    return result, time.perf_counter() - planned, planned - began


class Progress(SweepListener):
    """Prints each attempt as it ends: a part that is cut short has printed its results."""

    def ended(self, job: Job, outcome: AttemptOutcome, retried: Job | None) -> None:
        print(json.dumps({
            "model": job.settings["model"]["type"], "asked": job.batch_size, "state": outcome.state,
            "error": outcome.error[:200], "seconds": outcome.seconds, "retried": retried is not None,
            "batch_size": outcome.figures.get("batch_size_used"),
            "samples_per_second": outcome.figures.get("samples_per_second"), **found_in(Path(job.folder)),
        }), flush=True)  # fmt: skip


def side_by_side(documents: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table: a row for each model, columns for each document."""
    titles = ["model"]
    ladders = {document["arguments"].get("memory_limit"): document for document in documents if is_ladder(document)}
    documents = [document for document in documents if not is_ladder(document)]
    for document in documents:
        limit = document["arguments"].get("memory_limit") or "uncapped"
        name = f"{document['part']}, {limit}"
        titles += [f"{name}: size", "samples/s", "of best", "OOM", "reserved", "forecast"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    models = [row["model"] for row in documents[0]["rows"]]
    for model in models:
        cells = [model]
        for document in documents:
            row = next((one for one in document["rows"] if one["model"] == model), None)
            beside = ladders.get(document["arguments"].get("memory_limit"))
            cells += ["—"] * 6 if row is None else row_cells(with_ladder(row, beside))
        lines.append("| " + " | ".join(cells) + " |")
    for document in documents:
        finding = sum(row["planning_seconds"] or 0.0 for row in document["rows"])
        seconds = f"experiments {document['seconds']:.0f} s, forecasts {document['forecast_seconds']:.0f} s"
        seconds += f", finding sizes in the runs {finding:.0f} s (their first steps against steady ones)"
        lines.append(f"\n{document['part']}: {seconds}")
    return "\n".join(lines)


def is_ladder(document: Mapping[str, Any]) -> bool:
    return bool(document["part"] == "ladder")


def with_ladder(row: Mapping[str, Any], beside: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The row with its rate over the best of the ladder, where that has its size."""
    rows = [] if beside is None else beside["rows"]
    rates: dict[str, float] = next((one["rates"] for one in rows if one["model"] == row["model"]), {})
    own = rates.get(str(row["batch_size"]))
    return row if own is None else {**row, "of_best": own / max(rates.values())}


def row_cells(row: Mapping[str, Any]) -> list[str]:
    if row["state"] != "completed":
        return [f"failed: {str(row['error']).splitlines()[0][:60]}", "—", "—", "—", "—", "—"]
    rate, part = row["samples_per_second"], row["of_best"]
    return [
        str(row["batch_size"]),
        "—" if rate is None else f"{rate:.1f}",
        "—" if part is None else f"{part:.2f}",
        str(row["oom_events"]),
        format_bytes(row["peak_reserved_bytes"]),
        format_bytes(row["forecast_bytes"]),
    ]


if __name__ == "__main__":
    main()
