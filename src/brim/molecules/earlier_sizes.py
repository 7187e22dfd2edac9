"""`--plan RUN` of `brim ood`: the sizes of an earlier run, or the size that a comparison recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import given
from brim.settings.molecule_settings import OodRequest
from brim.storage.files import read_json

__all__ = ["with_earlier_sizes"]


def with_earlier_sizes(request: OodRequest) -> OodRequest:
    """The request with the sizes that its plan holds; sizes that the request names itself stay."""
    if request.plan is None:
        return request
    record: Any = read_json(Path(request.plan) / "run.json")
    asked, summary = (_part(record, name) for name in ("request", "summary"))
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind == "comparison" and asked.get("command") == "ood --compare-batch":
        sizes: dict[str, Any] = {"effective_batch": _recommended(request.plan, summary)}
    elif kind == "train" and asked.get("command") == "train dpo":
        split = (summary.get("accumulation_steps") or 1) > 1
        sizes = {
            "effective_batch": asked.get("effective_batch") or asked.get("batch_size"),
            "batch_size": summary.get("micro_batch_size") if split else None,
            "eval_batch_size": summary.get("eval_batch_size"),
        }
    else:
        raise RequestError(
            f"{given('plan', request.plan)}: it holds no run of brim ood; give the folder of one, or of its comparison"
        )
    wanted: dict[str, Any] = {
        name: size
        for name, size in sizes.items()
        if isinstance(size, int) and size > 0 and getattr(request, name) is None
    }
    return dataclasses.replace(request, **wanted)


def _recommended(folder: str, summary: Mapping[str, Any]) -> int:
    advice = _part(summary, "recommendation")
    size = advice.get("batch_size")
    if not isinstance(size, int):
        raise RequestError(
            f"{given('plan', folder)}: that comparison recommends no size ({advice.get('text')}); compare again, or "
            "name a size"
        )
    return size


def _part(document: object, name: str) -> Mapping[str, Any]:
    found = document.get(name) if isinstance(document, Mapping) else None
    return found if isinstance(found, Mapping) else {}
