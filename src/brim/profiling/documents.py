"""`profile.json`, `profile.csv` and the profile's `run.json`, rewritten after every point."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.profiling.pareto import recommend
from brim.settings.profile_settings import ProfileRequest
from brim.storage.files import write_atomic, write_json
from brim.storage.run_folder import write_run

__all__ = ["PROFILE_SCHEMA", "write_documents"]

PROFILE_SCHEMA = "brim.profile/1"

_COLUMNS = (
    "state", "accuracy", "accuracy_std", "accuracy_ci95", "metric", "batch_size_used", "batch_size_max",
    "samples_per_second", "peak_allocated_bytes", "peak_reserved_bytes", "limit_bytes", "vision_tokens_mean",
    "crops_used_mean", "saturated", "num_samples", "num_failed", "oom_events", "gpu_wait_fraction", "plan_seconds",
    "duration_seconds", "started_at", "ended_at", "folder", "error",
)  # fmt: skip
_LATENCY = [
    (batch, stage, percent)
    for batch in ("batch_1", "batch_used")
    for stage in ("total", "vision", "prefill", "decode")
    for percent in ("p50", "p95", "p99")
]


def write_documents(
    folder: Path,
    request: ProfileRequest,
    environment: Mapping[str, Any],
    started_at: datetime.datetime,
    entries: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Write all three files of a profile's folder; returns the document of profile.json."""
    ended_at = datetime.datetime.now(datetime.UTC)
    recommendation = recommend(
        entries,
        list(request.axes),
        within=request.within,
        target_latency_ms=request.target_latency_ms,
        target_memory_bytes=request.target_memory_bytes,
    )
    document: dict[str, Any] = {
        "schema": PROFILE_SCHEMA,
        "knobs": list(request.axes),
        "metric": next((entry["metric"] for entry in entries if entry.get("metric")), None),
        "summary": list(entries),
        "recommendation": recommendation,
        "notes": list(notes),
        "request": request.to_json(),
        "environment": dict(environment),
        "started_at": started_at.isoformat(),
        "ended_at": ended_at.isoformat(),
        "duration_seconds": (ended_at - started_at).total_seconds(),
    }
    write_json(folder / "profile.json", document)
    write_atomic(folder / "profile.csv", _csv(entries, list(request.axes)))
    write_run(
        folder,
        kind="profile",
        request={**request.to_json(), "command": "profile"},
        environment=dict(environment),
        plan=None,
        summary=_run_summary(entries, recommendation, notes),
        started_at=started_at,
    )
    return document


def _run_summary(
    entries: Sequence[Mapping[str, Any]], recommendation: Mapping[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    done = [entry for entry in entries if entry["state"] == "done"]
    return {
        "num_points": len(entries),
        "num_failed": len(entries) - len(done),
        "num_samples": sum(entry["num_samples"] for entry in done),
        "oom_events": sum(entry["oom_events"] for entry in done),
        "plan_seconds": sum(entry["plan_seconds"] for entry in done),
        "peak_allocated_bytes": max((entry["peak_allocated_bytes"] or 0 for entry in done), default=0) or None,
        "peak_reserved_bytes": max((entry["peak_reserved_bytes"] or 0 for entry in done), default=0) or None,
        "recommendation": dict(recommendation),
        "notes": list(notes),
    }


def _csv(entries: Sequence[Mapping[str, Any]], knobs: Sequence[str]) -> str:
    out = io.StringIO()
    names = [f"latency_ms_{batch}_{stage}_{percent}" for batch, stage, percent in _LATENCY]
    writer = csv.writer(out)
    writer.writerow([*knobs, *_COLUMNS, *names])
    for entry in entries:
        latency = entry.get("latency_ms") or {}
        cells = [((latency.get(batch) or {}).get(stage) or {}).get(percent) for batch, stage, percent in _LATENCY]
        writer.writerow([*(entry[knob] for knob in knobs), *(entry.get(column) for column in _COLUMNS), *cells])
    return out.getvalue()
