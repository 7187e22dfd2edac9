"""The settings of a search, checked once, wherever they came from."""

from __future__ import annotations

import dataclasses

from brim.errors import RequestError
from brim.records import Objective

__all__ = ["DEFAULT_MAX_SIZE", "LARGEST_SIZE", "SearchSettings"]

DEFAULT_MAX_SIZE = 65536
LARGEST_SIZE = 2**31 - 1  # kernels count samples with 32 bits
_RANGE = f"from 1 to {LARGEST_SIZE}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What the user asked of a search; the batch-size flags of docs/interface.md, one field each."""

    batch_size: int | None = None  # None is auto; a number is a ceiling, or fixed
    fixed: bool = False  # exactly `batch_size` (--no-auto-batch-size)
    fail_on_oom: bool = False  # a fixed size that does not fit is an error, not split
    objective: Objective = "fastest"
    memory_limit_bytes: int | None = None
    margin: float | None = None
    tolerance: float = 0.02
    max_probes: int | None = None
    probe_timeout_seconds: float | None = None
    multiple_of: int = 1
    power_of_two: bool = False
    max_size: int = DEFAULT_MAX_SIZE
    use_cache: bool = True
    per_rank: bool = False

    def __post_init__(self) -> None:
        _check(self.objective in ("fastest", "largest"), "--objective", self.objective, "choose fastest or largest")
        _check(
            _is_size(self.batch_size),
            "--batch-size",
            self.batch_size,
            f"give auto or a whole number {_RANGE}",
        )
        _check(not self.fixed or self.batch_size is not None, "--no-auto-batch-size", "", "needs --batch-size N")
        _check(not self.fail_on_oom or self.fixed, "--fail-on-oom", "", "goes with --no-auto-batch-size and -b N")
        _check(_positive(self.memory_limit_bytes), "--memory-limit", self.memory_limit_bytes, "give a size above 0")
        _check(
            self.margin is None or 0 <= self.margin < 1, "--margin", self.margin, "give a fraction from 0 to below 1"
        )
        _check(0 <= self.tolerance < 1, "--tolerance", self.tolerance, "give a fraction from 0 to below 1")
        _check(_positive(self.max_probes), "--max-probes", self.max_probes, "give a whole number from 1")
        _check(
            self.probe_timeout_seconds is None or self.probe_timeout_seconds > 0,
            "--probe-timeout", self.probe_timeout_seconds, "give seconds above 0",
        )  # fmt: skip
        _check(_positive(self.multiple_of), "--multiple-of", self.multiple_of, "give a whole number from 1")
        _check(_is_size(self.max_size), "--max-batch-size", self.max_size, f"give a whole number {_RANGE}")
        _check(
            not self.power_of_two or self.multiple_of & (self.multiple_of - 1) == 0,
            "--multiple-of", self.multiple_of, "with --power-of-two it must be a power of two itself",
        )  # fmt: skip


def _positive(value: int | None) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_size(value: int | None) -> bool:
    return _positive(value) and (value is None or value <= LARGEST_SIZE)


def _check(ok: bool, argument: str, value: object, fix: str) -> None:
    if not ok:
        raise RequestError(f"{argument} {value}: {fix}" if value != "" else f"{argument} {fix}")
