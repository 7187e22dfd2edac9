"""What is drawn and tabled of a sweep: its experiments as rows, the best first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.reporting.units import number
from brim.settings.nested_keys import flatten

__all__ = ["against_rows", "experiment_rows", "mapping_of", "size_rows", "varied_settings"]


def experiment_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for every experiment: settings, forecast and result side by side; those with the metric first, by it."""
    metric = document.get("metric")
    name = str(metric.get("name")) if isinstance(metric, dict) else ""
    places = {one: place for place, one in enumerate(_list(document.get("ranking")))}
    rows = []
    for entry in _list(document.get("experiments")):
        if not isinstance(entry, dict):
            continue
        settings = flatten(_mapping(entry.get("settings")))
        forecast, result = _mapping(entry.get("forecast")), _mapping(entry.get("result"))
        rows.append(
            {
                **{f"setting {key}": value for key, value in settings.items()},
                **{key: result.get(key) for key in _FIGURES},
                "id": str(entry.get("id")),
                "model": str(settings.get("model.type", "—")),
                "asked": settings.get("hp.batch_size", "auto"),
                "planned": number(forecast.get("batch_size")),
                "forecast_bytes": number(forecast.get("peak_reserved_bytes")),
                "score": number(_mapping(result.get("best")).get(name)),
                "final": number(_mapping(result.get("final")).get(name)),
            }
        )
    return sorted(rows, key=lambda row: places.get(row["id"], len(places)))


_FIGURES = (
    "state", "failure", "error", "seconds", "epochs", "best_epoch", "samples_per_second", "batch_size_used",
    "batch_size_reason", "oom_events", "peak_reserved_bytes", "peak_allocated_bytes", "attempts", "device", "folder",
)  # fmt: skip


def varied_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dotted keys in which experiments differ, but for model and batch size, which have columns of their own."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("setting "))
    own = ("setting model.type", "setting hp.batch_size")
    return [
        key.removeprefix("setting ") for key in keys if key not in own and len({str(row.get(key)) for row in rows}) > 1
    ]


def against_rows(
    rows: Sequence[Mapping[str, Any]], cost: str, *, divide_by: float, higher_is_better: bool
) -> list[dict[str, Any]]:
    """The score against what it cost, with whether any experiment of the same model is as good for less."""
    drawn = [
        {"line": row["model"], "label": row["id"], "y": row["score"], "cost": known / divide_by}
        for row in rows
        if row["score"] is not None and (known := number(row.get(cost))) is not None
    ]
    sign = 1 if higher_is_better else -1
    for row in drawn:
        rivals = [other for other in drawn if other["line"] == row["line"] and other is not row]
        row["front"] = not any(
            other["cost"] <= row["cost"]
            and sign * other["y"] >= sign * row["y"]
            and (other["cost"], other["y"]) != (row["cost"], row["y"])
            for other in rivals
        )
    return sorted(drawn, key=lambda row: row["cost"])


def size_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batch sizes given, planned and used; an experiment that asked for auto was given none."""
    found = []
    for row in rows:
        for line, value in (("given", row["asked"]), ("forecast", row["planned"]), ("used", row["batch_size_used"])):
            found.append({"x": row["id"], "label": row["id"], "line": line, "y": number(value)})
    return found


def mapping_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a document that holds fields; none where it is no such part."""
    return _mapping(document.get(name))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
