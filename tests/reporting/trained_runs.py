"""Folders of trainings as `brim train` and `brim train dpo` leave them, with figures like those of a real card."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.reported_runs import GIB, LIMIT, write_run, write_trace

EPOCHS, TRAIN_SAMPLES = 12, 9_000
GROWS_AT = 36_000  # samples, where the effective batch doubles
PROBES = [(2, 61.0, 4.1), (4, 118.0, 5.0), (16, 371.0, 10.4), (32, 502.0, 17.6), (40, None, None)]


def step_lines(
    *,
    batch: int = 256,
    micro: int = 32,
    grows: bool = True,
    ooms: Sequence[int] = (90, 91),
    pace: float = 1.0,
    rate: float = 480.0,
) -> list[dict[str, Any]]:
    """steps.jsonl: a loss that falls, a batch that doubles once, and steps that ran out of memory."""
    lines: list[dict[str, Any]] = []
    samples, step, events, cap = 0, 0, 0, micro
    for epoch in range(EPOCHS):
        position = 0
        while position < TRAIN_SAMPLES:
            effective = batch * 2 if grows and samples >= GROWS_AT else batch
            window = min(effective, TRAIN_SAMPLES - position)  # the last one of an epoch is shorter
            step, position, samples = step + 1, position + window, samples + window
            if step in ooms:
                events, cap = events + 1, max(cap // 2, 1)
            elif step % 40 == 0:
                cap = micro
            noise = 0.09 * math.sin(step * 12.9898) * math.sqrt(256 / window)
            lines.append(
                {
                    "step": step, "epoch": epoch, "samples": samples,
                    "loss": 0.35 + 2.1 * math.exp(-pace * samples / 26_000) + noise,
                    "learning_rate": 3e-4 * min(step / 35, 1.0) * (math.sqrt(effective / batch)),
                    "effective_batch": window, "seconds": window / (rate if cap == micro else 0.8 * rate),
                    "micro_batches": [min(cap, window - done) for done in range(0, window, cap)],
                    "oom_events": events,
                }
            )  # fmt: skip
    return lines


def epoch_lines(
    steps: Sequence[Mapping[str, Any]], figures: Sequence[str] = ("top1", "top5"), *, pace: float = 1.0
) -> list[dict[str, Any]]:
    """epochs.csv of these steps; `mae` is no fraction."""
    rows = []
    for epoch in range(steps[-1]["epoch"] + 1):
        own = [line for line in steps if line["epoch"] == epoch]
        done = pace * own[-1]["samples"] / 40_000
        known = {"top1": 0.83 - 0.7 * math.exp(-done), "top5": 0.97 - 0.5 * math.exp(-2 * done), "mae": 4 / (1 + done)}
        rows.append(
            {
                "epoch": epoch, "step": own[-1]["step"], "samples": own[-1]["samples"],
                "train_loss": statistics.fmean(line["loss"] for line in own),
                "val_loss": 0.52 + 1.8 * math.exp(-done * 1.4) + 0.02 * max(epoch - 8, 0),
                **{f"val_{name}": known[name] for name in figures}, "seconds": sum(line["seconds"] for line in own),
                "samples_per_second": TRAIN_SAMPLES / sum(line["seconds"] for line in own),
                "learning_rate": own[-1]["learning_rate"], "effective_batch": own[-1]["effective_batch"],
                "micro_batch": max(own[-1]["micro_batches"]), "eval_batch": 96, "oom_events": own[-1]["oom_events"],
                "peak_reserved_bytes": int((17.4 + 0.2 * min(epoch, 3)) * GIB),
            }
        )  # fmt: skip
    return rows


def training_summary(
    steps: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]], **changes: Any
) -> dict[str, Any]:
    last, best = steps[-1], epochs[-1]
    seconds = sum(line["seconds"] for line in steps)
    names = {name: name.removeprefix("val_") for name in best if name.startswith("val_") and name != "val_loss"}
    figures = {"train_loss": best["train_loss"], "val_loss": best["val_loss"]}
    figures |= {title: best[name] for name, title in names.items()}
    effective = max(line["effective_batch"] for line in steps)
    micro = max(max(line["micro_batches"]) for line in steps)
    return {
        "metrics": {name: {"mean": value, "deviation": None, "values": [value]} for name, value in figures.items()},
        "last_metrics": figures, "seeds": [0], "best_epoch": best["epoch"], "epochs": len(epochs),
        "steps": last["step"], "samples": last["samples"], "skipped_steps": 0, "stopped_early": False,
        "samples_per_second": last["samples"] / seconds, "micro_batch_size": micro,
        "effective_batch_size": effective, "accumulation_steps": math.ceil(effective / micro), "eval_batch_size": 96,
        "batch_size_used": micro, "batch_size_max": micro, "batch_sizes": {"smallest": 8, "median": micro,
        "largest": micro, "per_rank": None},
        "effective_batches": [{"effective_batch": 512, "learning_rate": 4.2e-4, "noise_scale": 690, "step": 144,
                               "samples": GROWS_AT}],
        "learning_rate": {"base": 3e-4, "base_batch": 256, "rule": "sqrt", "factor": math.sqrt(2), "warmup_steps": 35},
        "noise_scale": {"noise_scale": 688.2, "useful_batch": 688, "measurements": 61, "gradient_square": 0.07,
                        "gradient_variance": 48.0},
        "oom_events": last["oom_events"], "alloc_retries": 0, "peak_allocated_bytes": int(16.9 * GIB),
        "peak_reserved_bytes": 18 * GIB, "gpu_utilisation_mean": 0.93, "fast_path": "off", "seconds": seconds,
        "eval_seconds": 21.5, "loader": {"num_workers": 4, "wait_seconds": 1.2}, "loss_curve": [], "ranks": 1,
        "notes": ["the model has batch normalisation: accumulated micro-batches are not equivalent to one big batch"],
        **changes,
    }  # fmt: skip


def training_plan() -> dict[str, Any]:
    probes = [
        {
            "batch_size": size, "verdict": "oom" if rate is None else "fits", "samples_per_second": rate,
            "peak_reserved_bytes": None if gib is None else int(gib * GIB), "needed_bytes": None, "cost": size,
            "detail": "",
        }
        for size, rate, gib in PROBES
    ]  # fmt: skip
    return {
        "schema": "brim.plan/1", "unit": "samples", "size": 32, "batch_size_max": 32, "objective": "fastest",
        "reason": "twice the size brings less than 3%; confirmed after the second optimizer step", "device": "cuda:0",
        "memory": {"limit_bytes": LIMIT, "headroom_bytes": 6 * GIB, "used_by_others_bytes": 0}, "probes": probes,
        "notes": [],
    }  # fmt: skip


def train_request(**changes: Any) -> dict[str, Any]:
    settings = {
        "model": {"type": "r3d_18"}, "data": {"type": "auto", "root": "UCF101"},
        "hp": {"effective_batch": "auto", "learning_rate": 3e-4, "epochs": EPOCHS, **changes},
        "training": {"monitor": "auto", "dtype": "bfloat16"},
    }  # fmt: skip
    argv = ["brim", "train", "ucf101.yaml", "--effective-batch", "auto"]
    return {"settings": settings, "file": "ucf101.yaml", "command": "train", "task": "classify", "argv": argv}


def write_training(
    folder: Path,
    *,
    steps: Sequence[Mapping[str, Any]] | None = None,
    epochs: Sequence[Mapping[str, Any]] | None = None,
    summary: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    gpu: bool = True,
) -> Path:
    """The folder of a supervised training."""
    lines = step_lines() if steps is None else list(steps)
    rows = epoch_lines(lines) if epochs is None else list(epochs)
    figures = training_summary(lines, rows) if summary is None else dict(summary)
    asked = train_request() if request is None else dict(request)
    write_run(
        folder, kind="train", request=asked, plan=training_plan() if plan is None else dict(plan), summary=figures
    )
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if rows:
        with (folder / "epochs.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    write_trace(folder, 60.0, peak=18 * GIB, gpu=gpu)
    return folder


def write_seeds(folder: Path) -> Path:
    """The folder of a training of three seeds at two learning rates; the last run failed."""
    steps = step_lines(grows=False, ooms=())
    rows: list[dict[str, Any]] = []
    for rate in (1e-3, 3e-4):
        for seed in range(3):
            name = f"seed-{seed}-lr-{rate:g}"
            row = {"name": name, "seed": seed, "learning_rate": rate, "folder": name, "epochs": 12,
                   "best_epoch": 9 + seed, "top1": 0.7 + 0.02 * seed, "val_loss": 0.6, "stopped_early": seed == 0,
                   "fast_path": "stacked", "error": None}  # fmt: skip
            if name == "seed-2-lr-0.0003":
                rows.append({"name": name, "seed": seed, "learning_rate": rate, "folder": name, "epochs": 0,
                             "best_epoch": None, "error": "the loss became nan in epoch 1"})  # fmt: skip
                continue
            own = [{**line, "train_loss": (1 + 0.1 * seed) * line["train_loss"]} for line in epoch_lines(steps)]
            write_training(folder / name, steps=steps, epochs=own)
            rows.append(row)
    figure = {"mean": 0.72, "deviation": 0.02, "values": [0.7, 0.72, 0.74]}
    summary = training_summary(
        steps, epoch_lines(steps), metrics={"top1": figure}, seeds=[0, 1, 2], best_epoch=None, runs=rows,
        fast_path="stacked", errors={rows[-1]["name"]: rows[-1]["error"]},
    )  # fmt: skip
    return write_training(folder, steps=steps, summary=summary)


def preference_cells(sets: Sequence[str] = ("lbap-assay", "lbap-scaffold"), seeds: int = 10) -> list[dict[str, Any]]:
    """cells.jsonl: a head over seeds and two baselines on each data set; on the second, one baseline is better."""
    cells: list[dict[str, Any]] = []
    for place, name in enumerate(sets):
        for seed in range(seeds):
            auroc = 0.81 - 0.09 * place + 0.012 * math.sin(7 * seed + place)
            details = {"epochs": 31 + seed, "best_epoch": 21 + seed, "validation_auroc": auroc + 0.01,
                       "last_loss": 0.41 + 0.01 * seed, "skipped_steps": 0,
                       "losses": [0.41 + 0.01 * seed + 0.3 / (1 + epoch) for epoch in range(31 + seed)]}  # fmt: skip
            cells.append(_cell(name, "dpo", seed, auroc, details))
        cells.append(_cell(name, "mahalanobis", None, 0.74 + 0.04 * place, {}))
        cells.append(_cell(name, "mc_dropout", None, 0.68, {}))
    return cells


def _cell(data: str, method: str, seed: int | None, auroc: float, details: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {"auroc": auroc, "aupr": auroc - 0.05, "fpr95": 1.3 - auroc}
    return {"data": data, "encoder": "morgan", "method": method, "seed": seed, "lr": 1e-3 if details else None,
            "metrics": metrics, "error": None, "details": dict(details)}  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}


def preference_summary(cells: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["data"], cell["method"]), []).append(cell)
    table = []
    for (data, method), group in groups.items():
        good = [cell for cell in group if cell["metrics"]]
        row = {"data": data, "encoder": "morgan", "method": method, "failed": len(group) - len(good),
               "seeds": [cell["seed"] for cell in good if cell["seed"] is not None]}  # fmt: skip
        for name in ("auroc", "aupr", "fpr95"):
            row[name] = spread([cell["metrics"][name] for cell in good]) if good else None
        table.append(row)
    own = [row for row in table if row["method"] == "dpo"]
    peaks = {"peak_allocated_bytes": 2 * GIB, "peak_reserved_bytes": 3 * GIB}
    return {
        "method": "dpo", "metrics": {name: own[0][name] for name in ("auroc", "aupr", "fpr95")} if own else {},
        "seeds": own[0]["seeds"] if own else [], "table": table, "num_cells": len(cells),
        "num_failed": sum(cell["error"] is not None for cell in cells),
        "errors": [cell["error"] for cell in cells if cell["error"]],
        "molecules_left_out": {}, "samples": 400_000, "samples_per_second": 310_000.0, "pairs_per_second": 160_000.0,
        "effective_batch_size": 512, "micro_batch_size": 512, "accumulation_steps": 1, "eval_batch_size": 4096,
        "fast_path": "stacked", "oom_events": 0, **peaks,
        "peaks": {"encoding": dict.fromkeys(peaks), "training": peaks,
                  "evaluation": {**peaks, "peak_reserved_bytes": GIB}},
        "trainings": [
            {"data": data, "encoder": "morgan", "method": "dpo", "runs": 10, "fast_path": "stacked",
             "fast_path_choice": {"reason": "a stack of 10 has 8.9 times the rate"}, "effective_batch_size": 512,
             "micro_batch_size": 512, "accumulation_steps": 1, "samples_per_second": 310_000.0,
             "pairs_per_second": 160_000.0, "oom_events": 0, "train_seconds": 1.3, **peaks}
            for data in dict.fromkeys(cell["data"] for cell in cells)
        ],
        "encodings": [], "gpu_utilisation_mean": 0.88, "seconds": 9.5, "notes": [], **changes,
    }  # fmt: skip


def write_preference(folder: Path, cells: Sequence[Mapping[str, Any]] | None = None, **changes: Any) -> Path:
    """The folder of a preference training."""
    made = preference_cells() if cells is None else list(cells)
    request = {"data": ["lbap-assay.json"], "encoders": ["morgan"], "losses": ["energy"], "command": "train dpo",
               "argv": ["brim", "train", "dpo", "--data", "lbap-assay.json", "--seeds", "10"]}  # fmt: skip
    write_run(folder, kind="train", request=request, plan=None, summary=preference_summary(made, **changes))
    (folder / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in made), encoding="utf-8")
    write_trace(folder, 9.5)
    return folder
