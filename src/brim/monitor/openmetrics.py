"""Cards, host and runs as OpenMetrics text, for a node exporter's textfile collector; nothing listens on a port."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.storage.files import write_atomic

__all__ = ["metrics_text", "write_metrics"]

# Name, unit at its end, of each gauge; what it is; and the field of the document that it shows.
_GPU = (
    ("brim_gpu_utilisation_ratio", "Fraction of the last sample period in which a kernel ran.", "utilisation"),
    ("brim_gpu_memory_total_bytes", "Memory of the card.", "memory_total_bytes"),
    ("brim_gpu_memory_used_bytes", "Memory in use by all processes.", "memory_used_bytes"),
    ("brim_gpu_memory_runs_bytes", "Memory in use by runs of brim.", "memory_runs_bytes"),
    ("brim_gpu_memory_others_bytes", "Memory in use by other processes.", "memory_others_bytes"),
    ("brim_gpu_power_watts", "Power drawn.", "power_watts"),
    ("brim_gpu_power_limit_watts", "Power that the card may draw.", "power_limit_watts"),
    ("brim_gpu_temperature_celsius", "Temperature.", "temperature_c"),
)
_HOST = (
    ("brim_host_cpu_ratio", "Busy fraction of all cores.", "cpu"),
    ("brim_host_memory_total_bytes", "Memory of the host.", "memory_total_bytes"),
    ("brim_host_memory_available_bytes", "Memory that a process can still take.", "memory_available_bytes"),
)
_RUN = (
    ("brim_run_done", "Work that is done, in the run's unit.", "done"),
    ("brim_run_size", "Work in all, in the run's unit.", "total"),
    ("brim_run_batch_size", "Size of the last batch or micro-batch.", "batch_size"),
    ("brim_run_samples_per_second", "Samples per second.", "samples_per_second"),
    ("brim_run_left_seconds", "Estimate of the time left.", "seconds_left"),
    ("brim_run_oom_events", "Out-of-memory errors so far.", "oom_events"),
    ("brim_run_loss", "Loss of the last step.", "loss"),
    ("brim_run_waiting_ratio", "Fraction of the time spent waiting for data.", "waiting_fraction"),
    ("brim_run_idle_ratio", "Fraction of the time in which the device had nothing to do.", "gpu_wait_fraction"),
    ("brim_run_peak_reserved_bytes", "Peak of the memory that the allocator reserved.", "peak_reserved_bytes"),
)
_STATES = ("starting", "running", "validating", "killed")


def write_metrics(path: Path, document: Mapping[str, Any]) -> None:
    """Write the text whole, so that a collector never reads a part."""
    write_atomic(path, metrics_text(document))


def metrics_text(document: Mapping[str, Any]) -> str:
    """The text of a snapshot; a figure that is not known has no line."""
    gpus = [(_gpu_labels(gpu), gpu) for gpu in document["gpus"]]
    runs = [({"folder": run["folder"], "kind": run.get("kind"), "unit": run.get("unit")}, run)
            for run in document["runs"]]  # fmt: skip
    lines: list[str] = []
    for name, help, field in _HOST:
        lines += _family(name, help, [({}, document["host"].get(field))])
    for name, help, field in _GPU:
        lines += _family(name, help, [(labels, gpu.get(field)) for labels, gpu in gpus])
    throttled = [
        ({**labels, "reason": reason}, 1) for labels, gpu in gpus for reason in gpu.get("throttle_reasons") or ()
    ]
    lines += _family("brim_gpu_throttled", "What holds the clocks down.", throttled)
    for name, help, field in _RUN:
        lines += _family(name, help, [(labels, run.get(field)) for labels, run in runs])
    metrics = [
        ({**labels, "metric": run["metric"].get("name")}, run["metric"].get("value"))
        for labels, run in runs
        if isinstance(run.get("metric"), Mapping)
    ]
    lines += _family("brim_run_metric", "The run's first metric so far.", metrics)
    states = [({**labels, "state": state}, int(run.get("state") == state)) for labels, run in runs for state in _STATES]
    lines += _family("brim_run_state", "1 for the state that the run is in.", states)
    return "\n".join([*lines, "# EOF", ""])


def _family(name: str, help: str, samples: Sequence[tuple[Mapping[str, Any], Any]]) -> Iterator[str]:
    """The lines of one gauge; none where it has no sample."""
    known = [(labels, value) for labels, value in samples if _is_number(value)]
    if not known:
        return
    yield f"# TYPE {name} gauge"
    unit = name.rpartition("_")[2]
    if unit in ("ratio", "bytes", "watts", "celsius", "seconds"):
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {help}"
    for labels, value in known:
        written = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items() if text is not None)
        yield f"{name}{{{written}}} {value}" if written else f"{name} {value}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _gpu_labels(gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {"gpu": gpu["index"], "uuid": gpu.get("uuid"), "name": gpu.get("name")}
