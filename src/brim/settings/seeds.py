"""How many seeds, or which, and how their trainings are run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from brim.errors import RequestError
from brim.settings.caller import given, written
from brim.settings.setting_checks import numbers

__all__ = ["FAST_PATHS", "MOST_RUNS", "FastPath", "read_seeds", "seeds_from"]

FastPath = Literal["off", "resident", "stacked"]
FAST_PATHS: tuple[FastPath, ...] = get_args(FastPath)
MOST_RUNS = 100_000  # of one training: as many as a sweep may repeat an experiment


def read_seeds(value: Any) -> int | tuple[int, ...]:
    """How many seeds (`10`), or which (`3,5,8`; `7,` is one)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        found: tuple[int, ...] = numbers(int)(value)
    except ValueError:
        raise ValueError("write numbers, several by commas") from None
    if not found:
        raise ValueError("give how many, from 1, or which, by commas")
    return found[0] if isinstance(value, str) and "," not in value else found


def seeds_from(asked: int | Sequence[int], *, first: int) -> tuple[int, ...]:
    """So many seeds from the first on, or those that are named."""
    if not isinstance(asked, int):
        return tuple(asked)
    if asked < 1:
        raise RequestError(f"{given('seeds', asked)}: give how many, from 1, or which, by commas")
    if asked > MOST_RUNS:
        raise RequestError(
            f"{given('seeds', asked)}: {MOST_RUNS:,} at most; one seed alone is written {written('seeds', f'{asked},')}"
        )
    return tuple(range(first, first + asked))
