"""What a trace cannot see, put where it would be asked for: workspaces of cuBLAS and cuDNN, buffers of reductions.

All are taken from torch's own allocator, so they compete with tensors for the same segments and count in torch's
peaks. An `AllocatorTimeline` is a trace as the allocator would see it, with those requests added. The CUDA context and
communication buckets lie outside the allocator's peaks; a forecast adds them to its sum.

Pure Python: no torch, no device. A comment at each figure says whether it was measured or comes from torch's source.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib.metadata
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from brim.forecasting.allocator import FREE
from brim.forecasting.events import Event, Trace
from brim.forecasting.workspaces import convolution_workspaces, reduction_buffer

__all__ = ["PARTS", "AllocatorTimeline", "Environment", "installed_torch", "make_timeline", "version_pair"]

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
_SHARED = "(kept workspaces)"  # whose a workspace is that all products share
_TRANSIENT_WORKSPACES = (2, 15)  # from this torch on a product's workspace is given back when it ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What decides the size and the life of a workspace: the card's architecture and torch's version."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int]
    multiprocessors: int = 132  # those of Hopper's large cards

    @property
    def threads_per_multiprocessor(self) -> int:
        """As the compute capability says (CUDA programming guide): fewer on Turing and on cards for screens."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}.get(
            self.compute_capability, 1536 if self.compute_capability[0] >= 11 else 2048
        )

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
class AllocatorTimeline:
    """What torch's allocator is asked for, in order: block numbers, bytes (or `FREE`), and the part each belongs to."""

    blocks: tuple[int, ...]
    requests: tuple[int, ...]
    parts: tuple[str, ...]
    pools: tuple[int, ...]  # 0: the default one; else the private pool of CUDA graphs
    owners: tuple[str, ...] = ()  # the module that each belongs to; none: it is not known
    last_step: int = 0  # where the last step begins

    def like(self, other: AllocatorTimeline) -> bool:
        """Whether both are the same requests but for their bytes."""
        if (self.blocks, self.parts, self.pools) != (other.blocks, other.parts, other.pools):
            return False
        pairs = zip(self.requests, other.requests, strict=True)
        return all((mine == FREE) == (theirs == FREE) for mine, theirs in pairs)


def make_timeline(trace: Trace, environment: Environment, *, workspaces: bool = True) -> AllocatorTimeline:
    """The trace as the allocator would see it; with the workspaces of a GPU's libraries, unless it runs on the host."""
    after: dict[int, list[_Workspace]] = defaultdict(list)
    for workspace in _workspaces(trace, environment) if workspaces else ():
        after[workspace.event].append(workspace)
    rows: list[tuple[int, int, str, int, str]] = []
    numbers: dict[int, int] = {}
    taken = 0
    last_event = trace.step_starts[-1] if trace.step_starts else 0
    last_step = 0
    for place, event in enumerate(trace.events):
        if place == last_event:
            last_step = len(rows)
        # Numbered by first appearance, so that traces of two sizes can be laid side by side.
        name = numbers.setdefault(event.block, len(numbers))
        request = event.bytes if event.kind == "alloc" else FREE
        rows.append((name, request, _PART_OF[event.category], event.pool, event.module))
        for workspace in after.get(place, ()):
            # Those of a trace are not negative.
            taken -= len(workspace.requests)
            asked = list(enumerate(workspace.requests, start=taken))
            owner = _SHARED if workspace.kept else event.module
            rows += [(number, size, "workspaces", workspace.pool, owner) for number, size in asked]
            if not workspace.kept:
                rows += [(number, FREE, "workspaces", workspace.pool, owner) for number, _ in reversed(asked)]
    blocks, requests, parts, pools, owners = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return AllocatorTimeline(
        blocks=blocks, requests=requests, parts=parts, pools=pools, owners=owners, last_step=last_step
    )


@dataclasses.dataclass(frozen=True)
class _Workspace:
    event: int  # it is taken right after this one
    requests: tuple[int, ...]  # in bytes, held together
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
            yield _Workspace(index, (size,), pool=trace.events[index].pool)
    trains = any(call.direction != "forward" for call in trace.convolutions)
    # What needs none at this size asks for no bytes, so that sizes stay alike.
    for call in trace.convolutions:
        yield _Workspace(call.event, convolution_workspaces(call, trains=trains))
    for reduction in trace.reductions:
        size = reduction_buffer(
            reduction,
            multiprocessors=environment.multiprocessors,
            threads_per_multiprocessor=environment.threads_per_multiprocessor,
        )
        yield _Workspace(reduction.event, (size,))


def _kept_workspaces(trace: Trace, products: Sequence[int], environment: Environment) -> Iterator[_Workspace]:
    """One for the thread of the forward pass, one for autograd's, one for the stream that a graph is captured on.

    Each is taken when its first product is made, the last one from the graph's own pool. Where graphs are captured, the
    loop was tried out on two short prompts before the first step.
    """
    events = trace.events
    eager = [index for index in products if events[index].pool == 0]
    backwards = _backwards(trace) if trace.backward_gemm_calls else []
    in_backward = {index for index in eager if any(index in span for span in backwards)}
    backward = [index for index in eager if index in in_backward]
    forward = [index for index in eager if index not in in_backward]
    captured = [index for index in products if events[index].pool != 0]
    tried = trace.step_starts[0] - 1 if captured and trace.step_starts else len(events)
    for indices in (forward, backward, captured):
        if indices:
            pool = events[indices[0]].pool
            latest = tried if indices is forward else len(events)
            yield _Workspace(min(indices[0], latest), (environment.cublas_bytes,), kept=True, pool=pool)
            biased = [index for index in indices if _is_alloc_of(events[index], _LT_PRODUCTS)] if trace.lt_calls else []
            if biased:
                yield _Workspace(min(biased[0], latest), (environment.cublaslt_bytes,), kept=True, pool=pool)


def _backwards(trace: Trace) -> list[range]:
    """Where the backward of each step is among the events: from its first operation to the end of the step."""
    edges = [0, *trace.step_starts[1:], len(trace.events)]
    made = [index for index, event in enumerate(trace.events) if event.kind == "alloc" and "backward" in event.op]
    spans = []
    for start, end in itertools.pairwise(edges):
        first = bisect.bisect_left(made, start)
        spans.append(range(made[first] if first < len(made) else end, end))
    return spans


def _is_alloc_of(event: Event, names: Sequence[str]) -> bool:
    return event.kind == "alloc" and _operation(event.op) in names


@functools.cache
def _operation(op: str) -> str:
    """`aten.mm.default`, `aten::mm` and `aten.mm` are all `mm`."""
    parts = re.split(r"::|\.", op)
    return parts[1] if len(parts) > 1 else op


@functools.cache
def installed_torch() -> tuple[int, int]:
    """The version of torch on this machine."""
    return version_pair(importlib.metadata.version("torch"))


def version_pair(text: str) -> tuple[int, int]:
    """`2.11.0+cu130` → (2, 11)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
