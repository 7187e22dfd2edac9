"""An evaluation as it was asked for, in plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from brim.errors import RequestError
from brim.settings.sizes import parse_bytes

__all__ = ["EvalRequest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """What `brim eval` and `brim.evaluate` take; None means that brim chooses."""

    model: str
    data: str
    split: str | None = None
    limit: int | None = None
    mapping: Mapping[str, str] = dataclasses.field(default_factory=dict)
    images: str | None = None
    skip_bad: bool = False
    task: str | None = None
    metrics: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    chat: bool | None = None
    system: str | None = None
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "auto"
    trust_remote_code: bool = False
    batch_size: int | None = None  # None: auto
    cost_cap: int | None = None  # a batch's padded cost at most, in the task's unit; None: found as the run goes
    fixed: bool = False
    fail_on_oom: bool = False
    memory_limit: int | str | None = None
    margin: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    offload: str | None = None
    num_workers: int | None = None
    pin_memory: bool = True
    prefetch_factor: int = 4
    use_cache: bool = True
    graphs: bool = True
    overlap: bool = True  # start a batch before the last one's answers are read and scored
    non_blocking: bool = True  # copy to the device without holding up the host
    decode_loop: bool = True  # brim's own where it fits the model; else transformers' generate
    fail_fast: bool = False
    resume: bool = False
    retry_failed: bool = False  # with resume: samples that failed are tried again

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise RequestError(f"--batch-size {self.batch_size}: give auto or a whole number from 1")
        if self.cost_cap is not None and (self.cost_cap < 1 or self.batch_size is not None):
            raise RequestError(f"--cost-cap {self.cost_cap}: give a whole number from 1, and not together with -b N")
        if self.fixed and self.batch_size is None:
            raise RequestError("--no-auto-batch-size needs a size: add -b N")
        if self.fail_on_oom and not self.fixed:
            raise RequestError("--fail-on-oom goes with --no-auto-batch-size and -b N")
        if self.retry_failed and not self.resume:
            raise RequestError("--retry-failed goes with --resume -o DIR: it tries the failed samples of a run again")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise RequestError(f"--margin {self.margin:g}: give a fraction from 0 to below 1")
        _ = self.memory_limit_bytes  # a size that cannot be read is refused before anything is loaded
        if self.offload not in (None, "cpu"):
            raise RequestError(f"--offload {self.offload}: only cpu can be asked for")
        if self.num_workers is not None and self.num_workers < 0:
            raise RequestError(f"--num-workers {self.num_workers}: it must be 0 or more")
        if self.prefetch_factor < 1:
            raise RequestError(f"--prefetch-factor {self.prefetch_factor}: it must be at least 1")
        if "dtype" in self.knobs and self.dtype not in ("auto", self.knobs["dtype"]):
            raise RequestError(f"--dtype {self.dtype} and --knob dtype={self.knobs['dtype']} differ; keep one")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"--max-tokens {self.max_new_tokens}: the smallest is 1")

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**dataclasses.asdict(self), "mapping": dict(self.mapping), "knobs": dict(self.knobs)}
