"""What a trace says: every block of memory a step would take and give back, in order.

The contract between the tracer, which fills a `Trace`, and those who read it: the simulation of the allocator, the
byte model, the breakdown. Bytes are what torch would ask of its allocator, before any rounding. What no trace can see
(the CUDA context, the workspaces of cuBLAS and cuDNN) is not in the events, only the facts that it depends on.

Pure Python: no torch, no device, no clock.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

from brim.errors import BrimError, RequestError, first_line

__all__ = [
    "BATCH",
    "CATEGORIES",
    "DTYPE_BYTES",
    "OUTSIDE",
    "Category",
    "ConvCall",
    "Event",
    "ReductionCall",
    "Target",
    "Trace",
    "UntraceableError",
    "obstacle_in_words",
]

Category = Literal["weights", "buffers", "gradients", "optimizer", "inputs", "activations", "temporary", "cache"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
BATCH = "(batch)"  # the owner of the batch that a step is given
OUTSIDE = "(outside modules)"  # the owner of what no module takes, such as a loss function
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # of one element


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The card that a step would run on, as far as it decides what a step allocates."""

    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    torch_version: tuple[int, int] | None = None  # of the machine it is in; None: the one installed here


class Event(NamedTuple):
    """A block taken or given back. A block's number is never used twice; both of its events carry its bytes.

    A named tuple: a trace has tens of thousands, and a frozen dataclass takes five times as long to make.
    """

    kind: Literal["alloc", "free"]
    block: int
    bytes: int  # unrounded, as torch would ask of the allocator
    category: Category
    op: str = ""  # the operation that asked for it, such as "aten.convolution"; "" for what was there before
    pool: int = 0  # 0: the default pool; 1: the private pool that CUDA graphs share
    module: str = OUTSIDE  # to which it belongs (`modules.py`)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvCall:
    """One convolution, for those who know what workspace cuDNN would take for it."""

    direction: Literal["forward", "dgrad", "wgrad"]
    input: tuple[int, ...]  # shapes of the forward call, whatever the direction
    weight: tuple[int, ...]
    output: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16"
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    channels_last: bool
    event: int  # the one that takes memory for its result: its workspace is held right after
    copies_weight: bool = False  # into the other memory format, before its workspace is taken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCall:
    """One sum, mean or the like, for those who know whether thread blocks would share its results."""

    outputs: int
    inputs: int  # for each output
    along_memory: bool  # whether the values of one output are nearest to each other
    reads_vectors: bool
    output_vector: int  # neighbouring outputs that a thread works on
    accumulator_bytes: int
    event: int  # the one that takes memory for its result: its buffer is held right after


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The memory of a few steps on one batch size, event by event."""

    batch_size: int
    events: tuple[Event, ...]
    step_starts: tuple[int, ...]  # index of the first event of each step; before the first: what is resident
    seconds: float  # how long tracing took
    attention: tuple[str, ...] = ()  # the backends met: "flash", "efficient", "cudnn", "math"
    gemm_calls: int = 0  # matrix products through cuBLAS outside of the backward
    backward_gemm_calls: int = 0  # those in the backward, which has a thread, handle and workspace of its own on CUDA
    lt_calls: int = 0  # products through cuBLASLt: a bias added in the epilogue
    convolutions: tuple[ConvCall, ...] = ()
    reductions: tuple[ReductionCall, ...] = ()
    approximate: str | None = None  # why the events are not quite those of the real step, or None

    def peak_allocated(self) -> int:
        """The most bytes held at once, unrounded."""
        return self._peak()[0]

    def peak_event(self) -> int:
        """The index of the event that first reaches the peak; -1 of an empty trace."""
        return self._peak()[1]

    def live_at_peak(self) -> dict[Category, int]:
        """The bytes held at the peak, by category; they sum to `peak_allocated()`."""
        return self._live_after(self.peak_event() + 1)

    def resident(self) -> dict[Category, int]:
        """The bytes held before the first step, by category: weights, buffers, the batch."""
        return self._live_after(self.step_starts[0] if self.step_starts else 0)

    def _peak(self) -> tuple[int, int]:
        live = peak = 0
        at = -1
        for index, event in enumerate(self.events):
            if event.kind == "free":
                live -= event.bytes
                continue
            live += event.bytes
            if live > peak:
                peak, at = live, index
        return peak, at

    def _live_after(self, count: int) -> dict[Category, int]:
        live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for event in self.events[:count]:
            live[event.category] += event.bytes if event.kind == "alloc" else -event.bytes
        return live


class UntraceableError(RequestError):
    """A step does something whose memory cannot be worked out without running it."""


def obstacle_in_words(error: Exception) -> str:
    """The first line, with the kind of error before it where it is not one of brim's own."""
    return first_line(error) if isinstance(error, BrimError) else f"{type(error).__name__}: {first_line(error)}"
