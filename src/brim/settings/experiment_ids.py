"""The name of an experiment, from its settings alone: `r3d_18-b128-lr0.001-5d0c3f6a91b2`.

The first part is for people, the digits decide. Neither depends on the order of the keys, on other experiments of the
file, nor on its place among them; so a resumed or edited sweep finds the runs it has, and never takes one for another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["BATCH_KEY", "MODEL_KEY", "RATE_KEY", "SEED_KEY", "experiment_id", "same_value", "value_text"]

MODEL_KEY = "model.type"
BATCH_KEY = "hp.batch_size"
RATE_KEY = "hp.learning_rate"
SEED_KEY = "hp.seed"

_DIGITS = 12
_MODEL_LETTERS = 32
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def experiment_id(flat: Mapping[str, Any]) -> str:
    """The id of settings given by dotted keys. Seed 0 is what a run has anyway: naming it makes no other experiment."""
    counted = flat if flat.get(SEED_KEY, 0) != 0 else {key: value for key, value in flat.items() if key != SEED_KEY}
    digits = hashlib.sha256(value_text(counted).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return "-".join([*_words(flat), digits])


def value_text(value: Any) -> str:
    """A value as text that is the same only for the same value: 1, 1.0, true and "1" are four."""
    return _ENCODER.encode(value)


def same_value(one: Any, other: Any) -> bool:
    """Equal as settings are: 1 and 1.0 are, 1 and true are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _words(flat: Mapping[str, Any]) -> list[str]:
    words = [_model_word(flat.get(MODEL_KEY))]
    if BATCH_KEY in flat:
        size = flat[BATCH_KEY]
        words.append(f"b{size}" if isinstance(size, int) else str(size))
    if isinstance(flat.get(RATE_KEY), (int, float)):
        words.append(f"lr{flat[RATE_KEY]:g}")
    if flat.get(SEED_KEY, 0) != 0:
        words.append(f"s{flat[SEED_KEY]}")
    return [word for word in (re.sub(r"[^A-Za-z0-9_.]+", "_", word).strip("_.") for word in words) if word]


def _model_word(model: Any) -> str:
    """The last part of a model's name: no prefix, no folder."""
    if not isinstance(model, str):
        return "run"
    last = re.split(r"[:/\\]", model.rstrip(":/\\"))[-1]
    return last[:_MODEL_LETTERS] or "run"
