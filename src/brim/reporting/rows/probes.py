"""Probes, those of a plan and those of a profile, as rows: size, memory, speed, and whether it fitted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.reporting.units import number

__all__ = ["VERDICTS", "probe_rows", "probes_of"]

# A probe's verdict, and what it is called for people; all but the first did not fit.
VERDICTS = {
    "fits": "fits",
    "oom": "out of memory",
    "thrashes": "short of memory",
    "size_limit": "size limit of a kernel",
    "timeout": "timed out",
    "fatal": "crashed",
}


def probes_of(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The probes of a plan or of a profile's entry; none where there is no list of them."""
    probes = document.get("probes")
    return [probe for probe in probes if isinstance(probe, dict)] if isinstance(probes, list) else []


def probe_rows(
    probes: Iterable[Mapping[str, Any]], *, place: Mapping[str, Any] | None = None, limit_bytes: float | None = None
) -> list[dict[str, Any]]:
    """One row per probe that has a size, in the order they were made.

    A probe that ran out of memory has no peak to speak of: it is drawn at what it needed, or at the limit.
    """
    rows: list[dict[str, Any]] = []
    for step, probe in enumerate(probes, 1):
        size = number(probe.get("batch_size"))
        if size is None:
            continue
        verdict = str(probe.get("verdict"))
        reserved = number(probe.get("peak_reserved_bytes"))
        needed = number(probe.get("needed_bytes"))
        fits = verdict == "fits"
        rows.append(
            {
                **(place or {}),
                "step": step,
                "batch_size": size,
                "fits": fits,
                "verdict": VERDICTS.get(verdict, verdict),
                "reserved_bytes": reserved,
                "allocated_bytes": number(probe.get("peak_allocated_bytes")),
                "drawn_bytes": reserved if fits else _first(needed, reserved, limit_bytes),
                "rate": number(probe.get("samples_per_second")),
                "cost": number(probe.get("cost")),
                "phase": probe.get("phase"),
                "detail": probe.get("detail"),
            }
        )
    return rows


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def sizes_tried(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Every size once, in order."""
    return sorted({row["batch_size"] for row in rows})
