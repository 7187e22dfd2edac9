"""Run folders as the commands leave them, with figures like those of a real card: for tests of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.monitor.trace_file import COLUMNS

GIB = 2**30
LIMIT = 24 * GIB
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"brim": "0.1.0", "torch": "2.11.0", "transformers": "5.22.2"},
    "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "deterministic": False,
    "driver": "570.86",
}
TIMES = {
    "started_at": "2026-11-15T09:00:00+00:00", "ended_at": "2026-11-15T10:42:30+00:00", "duration_seconds": 6150.0,
}  # fmt: skip


def profile_entry(crops: int, *, start_minute: int = 0) -> dict[str, Any]:
    """One value of `max_crops` on a card of 24 GiB: pictures saturate at 12 crops."""
    used = min(crops, 11.4)
    accuracy = 0.42 + 0.36 * (1 - math.exp(-(used - 1) / 3.2))
    tokens = 144 + 144 * used
    per_sample = 0.02 * GIB + tokens * 190e3
    largest = int((LIMIT - 6.2 * GIB) / per_sample)
    size = min(64, largest)
    rate = 92 / (0.35 + tokens / 900)
    step = 1000 * size / rate
    duration = 2000 / rate + 4

    def parts(batch: int, scale: float) -> dict[str, Any]:
        vision, prefill, decode = (scale * share for share in (0.36, 0.31, 0.33))
        spread = {"p50": 1.0, "p95": 1.14, "p99": 1.31}
        shown = {"total": vision + prefill + decode, "vision": vision, "prefill": prefill, "decode": decode}
        few = batch > 1  # the 99th percentile needs more batches than there were
        return {
            "batch_size": batch,
            "num_batches": 20,
            **{
                name: {p: None if few and p == "p99" else value * by for p, by in spread.items()}
                for name, value in shown.items()
            },
        }

    return {
        "max_crops": crops, "state": "done", "error": None, "folder": f"values/max_crops={crops}",
        "accuracy": accuracy, "accuracy_std": 0.41, "accuracy_ci95": 0.018, "batch_size_used": size,
        "batch_sizes": {"smallest": 4, "median": size, "largest": size, "per_rank": None},
        "batch_size_max": largest, "batch_size_ceiling": 64, "samples_per_second": rate,
        "latency_ms": {"batch_1": parts(1, 38 + tokens / 22), "batch_used": parts(size, step)},
        "peak_allocated_bytes": int(5.6 * GIB + size * per_sample * 0.93),
        "peak_reserved_bytes": int(6.2 * GIB + size * per_sample), "limit_bytes": LIMIT, "vision_tokens_mean": tokens,
        "crops_used_mean": used, "saturated": crops > 12, "num_samples": 2000, "num_failed": 0,
        "oom_events": int(size < 64), "plan_seconds": 3.1, "started_at": f"2026-11-15T09:{start_minute:02}:00+00:00",
        "ended_at": f"2026-11-15T09:{start_minute + 1:02}:00+00:00", "duration_seconds": duration,
        "probes": profile_probes(size, largest, per_sample, rate),
    }  # fmt: skip


def profile_probes(size: int, largest: int, per_sample: float, rate: float) -> list[dict[str, Any]]:
    tried = sorted({2, 8, 32, size, min(2 * size, 96)})
    return [
        {
            "batch_size": n, "cost": n * 600, "verdict": "fits" if n <= largest else "oom",
            "samples_per_second": rate * n / (n + 3) if n <= largest else None,
            "peak_reserved_bytes": int(6.2 * GIB + n * per_sample) if n <= largest else None,
            "phase": "climbing" if n < size else "comparing",
        }
        for n in tried
    ]  # fmt: skip


def profile_document(
    entries: Sequence[Mapping[str, Any]] | None = None, *, knobs: Sequence[str] = ("max_crops",), **changes: Any
) -> dict[str, Any]:
    """A profile over the values 2…13, or over these entries, with a recommendation as the rules make it."""
    summary = [profile_entry(crops, start_minute=crops) for crops in range(2, 14)] if entries is None else list(entries)
    return {
        "schema": "brim.profile/1", "knobs": list(knobs), "metric": "vqa",
        "request": {
            "argv": ["brim", "profile", "-m", "models/molmo2-1b", "-d", "vqa/val", "--knob", "max_crops"],
            "model": "models/molmo2-1b", "data": "vqa/val", "batch_size": 64, "limit": 2000, "command": "profile",
        },
        "environment": ENVIRONMENT, **TIMES, "notes": ["crops saturate at 12: no picture uses more"],
        "summary": summary, "recommendation": recommendation_of(summary), **changes,
    }  # fmt: skip


def recommendation_of(summary: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = [i for i, entry in enumerate(summary) if entry["accuracy"] is not None and entry["samples_per_second"]]
    front: list[int] = []
    for index in sorted(known, key=lambda i: (-summary[i]["samples_per_second"], -summary[i]["accuracy"])):
        if not front or summary[index]["accuracy"] > summary[front[-1]]["accuracy"]:
            front.append(index)
    best = max(known, key=lambda i: summary[i]["accuracy"], default=None)
    enough = [i for i in known if best is not None and summary[i]["accuracy"] >= 0.99 * summary[best]["accuracy"]]
    within = max(enough, key=lambda i: summary[i]["samples_per_second"], default=None)
    return {
        "cost": "seconds_per_sample", "within": 0.01, "front": front, "best": best, "cheapest_within": within,
        "target_latency_ms": None, "cheapest_meeting_latency": None, "target_memory_bytes": None,
        "cheapest_meeting_memory": None,
        "text": [] if within is None else ["Within 1 % of the best accuracy, it is the cheapest value."],
    }  # fmt: skip


def failed_entry(**knobs: Any) -> dict[str, Any]:
    """A value that did not run: every figure is unknown."""
    unknown = dict.fromkeys([*profile_entry(2)], None)
    return {
        **unknown,
        **knobs,
        "state": "failed",
        "error": "no sample fits, even alone",
        "saturated": False,
        "probes": [],
    }


def two_knob_entries() -> list[dict[str, Any]]:
    """`max_crops` crossed with `max_new_tokens`."""
    entries = []
    for tokens in (8, 16, 32):
        for crops in (2, 4, 8, 12):
            entry = profile_entry(crops)
            slower = entry["samples_per_second"] * 8 / (tokens / 4 + 6)
            entry |= {
                "max_new_tokens": tokens,
                "samples_per_second": slower,
                "accuracy": entry["accuracy"] + tokens / 900,
            }
            entry["folder"] = f"values/max_crops={crops},max_new_tokens={tokens}"
            entries.append(entry)
    return entries


def write_profile(folder: Path, document: Mapping[str, Any], *, gpu: bool = True) -> Path:
    """The folder of a profile: its documents, and every value's trace."""
    write_json(folder / "profile.json", document)
    run = {"schema": "brim.run/1", "kind": "profile", "plan": None, "summary": {}}
    write_json(folder / "run.json", {**run, **{name: document[name] for name in ("request", "environment", *TIMES)}})
    for entry in document["summary"]:
        if entry.get("folder") and entry.get("samples_per_second"):
            seconds = float(entry["duration_seconds"])
            write_trace(folder / entry["folder"], seconds, peak=entry["peak_reserved_bytes"] or GIB, gpu=gpu)
    return folder


def write_trace(folder: Path, seconds: float, *, peak: int = 8 * GIB, gpu: bool = True) -> None:
    """monitor.csv: a card that warms up, then works."""
    rows = [",".join(COLUMNS)]
    count = max(int(seconds * 2), 3)
    for step in range(count):
        at = seconds * step / (count - 1)
        busy = 0.12 if at < 2 else 0.9 + 0.07 * math.sin(at * 1.7)
        values: dict[str, Any] = {"time_seconds": round(at, 3), "host_cpu": round(0.3 + 0.2 * busy, 3)}
        values |= {"host_memory_available_bytes": 40 * GIB, "process_rss_bytes": int(3 * GIB + at * 1e6)}
        if gpu:
            values |= {
                "gpu_utilisation": round(busy, 3), "gpu_memory_used_bytes": int(peak * min(1.0, 0.3 + at / 4)),
                "gpu_power_watts": round(150 + 400 * busy, 1), "throttle_reasons": "none",
            }  # fmt: skip
        rows.append(",".join(str(values.get(column, "")) for column in COLUMNS))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "monitor.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def plan_document(*, probes: bool = True) -> dict[str, Any]:
    """A plan as `brim find` writes it: five sizes, of which one did not fit."""
    tried = [(1, 2.1, 8.2), (4, 343.0, 8.3), (64, 461.0, 30.7), (153, None, 63.7), (145, 513.0, 62.0)]
    made = [
        {
            "batch_size": size, "verdict": "oom" if rate is None else "fits", "samples_per_second": rate,
            "peak_allocated_bytes": int(mib * 2**20), "peak_reserved_bytes": int(mib * 2**20),
            "needed_bytes": int(68.5 * 2**20) if rate is None else None,
            "detail": "device out of memory" if rate is None else "",
        }
        for size, rate, mib in tried
    ]  # fmt: skip
    return {
        "schema": "brim.plan/1", "unit": "samples", "size": 145, "batch_size_max": 145, "batch_size_max_estimate": 150,
        "objective": "fastest", "reason": "the smallest size within 2% of the best rate in reach", "cached": False,
        "device": "cpu", "memory": {"limit_bytes": 64 * 2**20, "headroom_bytes": 2 * 2**20, "used_by_others_bytes": 0},
        "probes": made if probes else [], "fingerprint": None, "notes": [], "batch_size": 145,
    }  # fmt: skip


def write_find(folder: Path, **changes: Any) -> Path:
    request = {"model": "py:brim.models.small:convnet", "mode": "train", "knobs": {}, "command": "find"}
    summary = {"batch_size_used": 145, "batch_size_max": 145}
    return write_run(
        folder, kind="find", **{"request": request, "plan": plan_document(), "summary": summary, **changes}
    )


def sample_line(
    number: int, score: float, *, prediction: str = "two", batch_size: int = 32, **more: Any
) -> dict[str, Any]:
    line = {
        "id": f"q{number}", "input": f"how many digits are on board {number}?", "reference": "2",
        "prediction": prediction, "score": score, "scores": {"vqa": score, "exact_match": float(score >= 1)},
        "batch_size": batch_size, "error": None, "tokens": 2, "truncated": False,
    }  # fmt: skip
    return {**line, **more}


def write_evaluation(
    folder: Path, scores: Sequence[float] = (1.0, 0.0, 0.6, 1.0) * 50, *, model: str = "models/molmo2-1b",
    gpu: bool = True, lines: Sequence[Mapping[str, Any]] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """The folder of an evaluation with these scores by VQA accuracy."""
    kept = (
        [sample_line(n, s, batch_size=2 if n < 6 else 32) for n, s in enumerate(scores)]
        if lines is None
        else list(lines)
    )
    mean = sum(scores) / len(scores)
    figure = {"value": mean, "mean": mean, "std": 0.4, "count": len(scores), "ci95": 1.96 * 0.4 / len(scores) ** 0.5}
    exact = sum(score >= 1 for score in scores) / len(scores)
    summary = {
        "num_samples": len(scores), "num_failed": 0, "num_bad_records": 0, "num_resumed": 0,
        "metrics": {"vqa": figure, "exact_match": {**figure, "value": exact, "mean": exact}},
        "samples_per_second": 43.1, "batch_size_used": 32,
        "batch_sizes": {"smallest": 2, "median": 32, "largest": 48, "per_rank": None}, "oom_events": 1,
        "padding_fraction": 0.13, "gpu_wait_fraction": 0.02, "loader": {"num_workers": 4, "wait_seconds": 0.2},
        "gpu_utilisation_mean": 0.91 if gpu else None, "peak_allocated_bytes": 9 * GIB,
        "peak_reserved_bytes": 11 * GIB,
        "answer_tokens": {"p50": 2, "p95": 4, "p99": 5, "max": 9, "truncated_fraction": 0.01},
        "seconds": 46.4, "ranks": 1, "notes": ["weights from safetensors"],
    }  # fmt: skip
    plan = {
        **plan_document(probes=False), "unit": "tokens", "size": 19_200, "device": "cuda:0" if gpu else "cpu",
        "memory": {"limit_bytes": LIMIT, "headroom_bytes": None},
    }  # fmt: skip
    request = {"model": model, "data": "vqa/val", "task": "vqa", "metrics": ["vqa", "exact_match"], "command": "eval"}
    write_run(folder, kind="eval", **{"request": request, "plan": plan, "summary": summary, **changes})
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (folder / "samples.jsonl").write_text(text, encoding="utf-8")
    write_trace(folder, 46.0, gpu=gpu)
    return folder


def write_run(folder: Path, *, kind: str, **parts: Any) -> Path:
    write_json(
        folder / "run.json", {"schema": "brim.run/1", "kind": kind, "environment": ENVIRONMENT, **TIMES, **parts}
    )
    return folder


def forecast_document(model: str = "resnet18", module: str = "layer1.0") -> dict[str, Any]:
    """A forecast of two sizes for one card, with the bytes by module."""
    sizes = [
        {
            "batch_size": size, "peak_allocated_bytes": size * 2**30, "peak_reserved_bytes": size * 2**30,
            "device_bytes": size * 2**30 + 2**29, "fits": size < 4,
            "breakdown": {"weights": 2**28, "activations": size * 2**30 - 2**28, "cached": 0, "context": 2**29},
            "by_module": [
                {"module": module, "bytes": size * 2**30 - 2**28, "parts": {"activations": size * 2**30 - 2**28}},
                {"module": "", "bytes": 2**28, "parts": {"weights": 2**28}},
            ],
        }
        for size in (2, 4)
    ]  # fmt: skip
    card = {"key": "t4-16gb", "name": "NVIDIA T4", "memory_bytes": 15 * 2**30, "context_bytes": 2**29}
    return {
        "schema": "brim.forecast/1", "model": model, "mode": "train", "knobs": {}, "max_batch_size": 65536,
        "limit_bytes": 3 * 2**30, "batch_size_max": 2, "approximate": None, "trace_seconds": 0.3, "notes": [],
        "made_for": {}, "gpu": card, "margin": 0.05, "sizes": sizes,
    }  # fmt: skip


def write_forecast(folder: Path, *names: str, module: str = "layer1.0") -> Path:
    """A forecast of some workloads, the first of which has grown."""
    compared = {
        "gpu": "t4-16gb", "batch_size": 2, "base_bytes": 2**30, "bytes": 2**31, "allowed_bytes": 0,
        "change_bytes": 2**30, "change_fraction": 1.0, "grew": True, "modules": [],
    }  # fmt: skip
    lines = [
        {"name": name, "verdict": "ok" if place else "grew", "text": "why", "allow": "0", "sizes": [compared]}
        for place, name in enumerate(names)
    ]
    workloads = [
        {"name": name, "error": None, "allow": None, "forecasts": [forecast_document(name, module)]} for name in names
    ]
    failed = {"name": "broken", "error": f"{module}: it raised", "allow": None, "forecasts": []}
    check = {"ok": False, "against": "base.json", "allow": "3%", "notes": ["a note"], "workloads": lines}
    summary = {"workloads": [*workloads, failed] if len(names) > 1 else workloads, "check": check, "notes": []}
    return write_run(folder, kind="forecast", request={"file": "forecasts.yaml"}, plan=None, summary=summary)


def gain(field: str, rate: float, factor: float | None, *, clear: bool | None = True) -> dict[str, Any]:
    """The figures of a compared row: its rate and its gain, each with an interval."""
    wide = 0.02 if clear else 0.3
    return {
        "samples_per_second": rate, "samples_per_second_low": 0.97 * rate, "samples_per_second_high": 1.03 * rate,
        "rates": [rate] * 3, "rounds": 3, field: factor,
        f"{field}_low": None if clear is None or factor is None else factor * (1 - wide),
        f"{field}_high": None if clear is None or factor is None else factor * (1 + wide),
        "clear": clear, "unclear_because": None,
    }  # fmt: skip


def write_compared_sizes(folder: Path, **more: Any) -> Path:
    """Four effective batches, of which the largest does not fit."""
    rates = {512: 900.0, 2048: 2400.0, 8192: 2420.0}
    rows: list[dict[str, Any]] = [
        {
            "batch_size": size, "micro_batch_size": min(size, 2048), "accumulation_steps": max(size // 2048, 1),
            "epoch_seconds": 50_000 / rate, "total_seconds": 500_000 / rate, "final_loss": 0.31 + size / 1e5,
            "forecast_peak_bytes": 2**30 + size * 2**20, "peak_reserved_bytes": 2**30 + size * 1.1 * 2**20,
            "limit_bytes": 16 * 2**30, "headroom_fraction": 0.4, "gpu_utilisation_mean": 0.83, "risk": "low",
            **gain("speed_up", rate, rate / 900, clear=None if size == 512 else True),
        }
        for size, rate in rates.items()
    ]  # fmt: skip
    rows.append({"batch_size": 32768, "failed": "not even one sample fits", "risk": "does not fit", "speed_up": None})
    advice = {"clear": True, "batch_size": 2048, "text": "batch size 2048: the smallest within 2% of the best rate"}
    request = {"command": "train --compare-batch", "compare_batch": [*rates, 32768], "file": "config.yaml"}
    summary = {"rows": rows, "recommendation": advice, "notes": ["a note"], "interrupted": False, **more}
    return write_run(folder, kind="comparison", request=request, plan=None, summary=summary)


def write_explained_speed(folder: Path) -> Path:
    """Three optimisations switched off in turn, one of which is not clear."""
    rows = [
        {"name": "everything on", "setting": "", "note": "", **gain("brings", 400.0, None, clear=None)},
        {"name": "batching at all", "setting": "one sample at a time", "note": "", **gain("brings", 40.0, 10.0)},
        {"name": "loading processes", "setting": "--num-workers 0", "note": "",
         **gain("brings", 390.0, 1.03, clear=False)},
        {"name": "scoring beside the device", "setting": "scored between batches", "note": "",
         **gain("brings", 440.0, 0.9)},
    ]  # fmt: skip
    advice = {"clear": True, "text": "keep on: batching at all (10.00×)", "keep": ["batching at all"]}
    request = {"command": "profile --explain-speed", "explain_speed": True, "model": "org/molmo2-1b", "data": "vqa"}
    summary = {"rows": rows, "recommendation": advice, "notes": [], "interrupted": False}
    return write_run(folder, kind="comparison", request=request, plan=None, summary=summary)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
