"""What a trace cannot see, put where it would be asked for: the workspaces of cuBLAS and cuDNN.

Both take them from torch's own allocator, so they compete with tensors for the same segments and count in torch's
peaks. A `Timeline` is a trace as the allocator would see it, with those requests added. The CUDA context and
communication buckets lie outside the allocator's peaks; a forecast adds them to its sum.

Pure Python: no torch, no device. Which figures were measured and which come from torch's source is said beside each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from brim.forecast.allocator import FREE
from brim.forecast.events import ConvCall, Event, Trace

__all__ = ["PARTS", "Environment", "Timeline", "make_timeline"]

MIB = 2**20

# The parts of a breakdown, and which of a trace's categories each one gathers.
PARTS = {
    "weights": ("weights", "buffers"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer",),
    "inputs": ("inputs",),
    "activations": ("activations",),
    "kv_cache": ("cache",),
    "temporary": ("temporary",),
    "workspaces": ("workspaces",),
}
_PART_OF = {category: part for part, categories in PARTS.items() for category in categories}

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_scaled_mm", "_grouped_mm", "linear")
_LT_PRODUCTS = ("addmm", "_addmm_activation", "_scaled_mm")
_TRANSIENT_WORKSPACES = (2, 15)  # from this torch on a product's workspace is given back when it ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What decides the size and the life of a workspace: the card's architecture and torch's version."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int]

    @classmethod
    def here(cls, compute_capability: tuple[int, int]) -> Environment:
        """With the torch that is installed on this machine."""
        return cls(compute_capability=compute_capability, torch_version=_installed_torch())

    @property
    def cublas_bytes(self) -> int:
        """cuBLAS's workspace: 32 MiB on Hopper and Blackwell, 4096:2:16:8 in KiB elsewhere (CublasHandlePool.cpp)."""
        return 32 * MIB if self.compute_capability[0] >= 9 else 2 * 4096 * 1024 + 8 * 16 * 1024

    @property
    def cublaslt_bytes(self) -> int:
        """cuBLASLt's workspace: 1 MiB unless CUBLASLT_WORKSPACE_SIZE says otherwise (CublasHandlePool.cpp)."""
        return MIB

    @property
    def keeps_workspaces(self) -> bool:
        """Whether each thread keeps its cuBLAS workspace once it has one, as torch did up to 2.14."""
        return self.torch_version < _TRANSIENT_WORKSPACES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """What torch's allocator is asked for, in order: block numbers, bytes (or `FREE`), and the part each belongs to."""

    blocks: tuple[int, ...]
    requests: tuple[int, ...]
    parts: tuple[str, ...]
    pools: tuple[int, ...]  # 0: the default one; else the private pool of CUDA graphs

    def like(self, other: Timeline) -> bool:
        """Whether both are the same requests but for their bytes."""
        if (self.blocks, self.parts, self.pools) != (other.blocks, other.parts, other.pools):
            return False
        pairs = zip(self.requests, other.requests, strict=True)
        return all((mine == FREE) == (theirs == FREE) for mine, theirs in pairs)


def make_timeline(trace: Trace, environment: Environment) -> Timeline:
    """The trace as the allocator would see it, workspaces included."""
    before: dict[int, list[_Workspace]] = defaultdict(list)
    for workspace in _workspaces(trace, environment):
        before[workspace.event].append(workspace)
    rows: list[tuple[int, int, str, int]] = []
    numbers: dict[int, int] = {}
    taken = 0
    for place, event in enumerate(trace.events):
        for workspace in before.get(place, ()):
            taken += 1
            rows.append((-taken, workspace.bytes, "workspaces", workspace.pool))  # a trace's own are not negative
            if not workspace.kept:
                rows.append((-taken, FREE, "workspaces", workspace.pool))
        # Numbered by first appearance, so that traces of two sizes can be laid side by side.
        name = numbers.setdefault(event.block, len(numbers))
        request = event.bytes if event.kind == "alloc" else FREE
        rows.append((name, request, _PART_OF[event.category], event.pool))
    blocks, requests, parts, pools = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Timeline(blocks=blocks, requests=requests, parts=parts, pools=pools)


@dataclasses.dataclass(frozen=True)
class _Workspace:
    event: int  # it is taken right before this one
    bytes: int
    kept: bool = False  # or else given back at once: the next workspace does not find it in use
    pool: int = 0


def _workspaces(trace: Trace, environment: Environment) -> Iterator[_Workspace]:
    products = [index for index, event in enumerate(trace.events) if _is_alloc_of(event, _PRODUCTS)]
    if environment.keeps_workspaces:
        yield from _kept_workspaces(trace, products, environment)
    else:
        for index in products:
            is_lt = _is_alloc_of(trace.events[index], _LT_PRODUCTS)
            size = environment.cublaslt_bytes if is_lt else environment.cublas_bytes
            yield _Workspace(index + 1, size, pool=trace.events[index].pool)
    for call in trace.convolutions:
        size = convolution_workspace(call, environment)
        if size:
            yield _Workspace(min(call.event, len(trace.events) - 1), size)


def _kept_workspaces(trace: Trace, products: Sequence[int], environment: Environment) -> Iterator[_Workspace]:
    """One for the thread of the forward pass, one for autograd's, one for the stream that a graph is captured on.

    Each is taken when its first product is made, the last one from the graph's own pool.
    """
    events = trace.events
    first_backward = next((index for index, event in enumerate(events) if "backward" in event.op), len(events))
    eager = [index for index in products if events[index].pool == 0]
    forward = [index for index in eager if index < first_backward]
    backward = [index for index in eager if index >= first_backward] if trace.backward_gemm_calls else []
    captured = [index for index in products if events[index].pool != 0]
    for indices in (forward, backward, captured):
        if indices:
            pool = events[indices[0]].pool
            yield _Workspace(indices[0] + 1, environment.cublas_bytes, kept=True, pool=pool)
            if trace.lt_calls:
                yield _Workspace(indices[0] + 1, environment.cublaslt_bytes, kept=True, pool=pool)


def convolution_workspace(call: ConvCall, environment: Environment) -> int:
    """What cuDNN takes for one convolution."""
    del environment
    if call.groups > 1 or call.channels_last or call.direction == "forward":
        return 0
    element = {"float32": 4, "float64": 8}.get(call.dtype, 2)
    return element * (math.prod(call.input) + math.prod(call.output) + math.prod(call.weight))


def _is_alloc_of(event: Event, names: Sequence[str]) -> bool:
    return event.kind == "alloc" and _operation(event.op) in names


@functools.cache
def _operation(op: str) -> str:
    """`aten.mm.default`, `aten::mm` and `aten.mm` are all `mm`."""
    parts = re.split(r"::|\.", op)
    return parts[1] if len(parts) > 1 else op


@functools.cache
def _installed_torch() -> tuple[int, int]:
    return version_pair(importlib.metadata.version("torch"))


def version_pair(text: str) -> tuple[int, int]:
    """`2.11.0+cu130` → (2, 11)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
