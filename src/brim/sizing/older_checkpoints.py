"""Checkpoints of versions that kept a size's state under the names of private attributes: the one bridge to them.

Everything else reads the schemas of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["live_state", "micro_batch_state", "validation_state"]

_LIVE = {
    "cap": "size",
    "ceiling": "ceiling",
    "phase": "phase",
    "shares_of": "shares_of",
    "_grows": "grows",
    "_wanted": "goal_size",
    "_quiet": "quiet_batches",
    "_best_cap": "best_size",
    "_best_rate": "best_rate",
    "_larger": "larger_size",
    "_looks_far": "compares_far",
    "_fallback": "proven_size",
    "_small": "small_batches_left",
    "_dearest": "settled_item_cost",
    "_before_trouble": "before_trouble",
    "_blamed": "item_blamed",
    "_undisturbed": "before_others",
    "_calm_readings": "calm_readings",
    "_returns": "returns",
}


def live_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of live work in today's schema, whichever version saved it."""
    if "schema" in data:
        return data
    return {
        **{name: data[old] for old, name in _LIVE.items() if old in data},
        "comparison": {name.removeprefix("_"): value for name, value in data["comparison"].items()},
        "evidence": {
            "points": data["points"],
            "smallest_failing": data["_failed"],
            "largest_since_release": data["_cached"],
        },
    }


def micro_batch_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a training run's micro-batches in today's schema."""
    if "schema" in data:
        return data
    return {
        "sizer": data["governor"],
        "warm_size": data["warm_cap"],
        "oom_events": data["oom_events"],
        "troubled_windows": data["troubles"],
        "lengths": data["lengths"],
        "steady_lengths": data.get("steady_lengths", ()),
        "trials": data["probes"],
    }


def validation_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of validation's batches in today's schema."""
    if "governor" not in data:
        return data
    return {"asked": data["asked"], "sizer": data["governor"], "oom_events": data["oom_events"]}
