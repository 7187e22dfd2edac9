"""One decode step as a CUDA graph: captured once, then replayed.

As `torch.cuda.graph`, but without synchronising, collecting garbage and emptying the cache at every capture: the step
before ran with the same shapes, and the device is busy with it while this one is recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from brim.memory.failures import FailureKind, classify

__all__ = ["CaptureFailedError", "GraphPool", "capture", "graphs_work_on", "shared_pool"]

# Device index: the stream that captures. One for all: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream.
_streams: dict[int, torch.cuda.Stream] = {}


class CaptureFailedError(Exception):
    """The step cannot be captured (a synchronisation inside it, an unsupported call); it can still run eagerly."""


class GraphPool:
    """The memory that the graphs of one device share.

    It exists as long as this object or a graph captured in it is referenced; afterwards `torch.cuda.empty_cache` frees
    it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.open()

    def open(self) -> None:
        """Begin with memory of its own; graphs captured before keep theirs."""
        self.handle: Any = torch.cuda.graph_pool_handle()  # None once a capture in it became void
        # A trivial graph keeps the memory alive between two captures, when there is no other graph.
        self._keeper = _record(lambda: torch.zeros(1, device=self.device), self)


_pools: weakref.WeakValueDictionary[int, GraphPool] = weakref.WeakValueDictionary()  # by device index


def shared_pool(device: torch.device) -> GraphPool:
    """The pool of the device; callers that capture repeatedly keep a reference to it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    pool = _pools.get(index)
    if pool is None:
        pool = _pools[index] = GraphPool(device)
    return pool


def graphs_work_on(device: torch.device) -> bool:
    """Whether steps on this device can be captured at all."""
    return device.type == "cuda"


def capture(step: Callable[[], Any], pool: GraphPool) -> torch.cuda.CUDAGraph:
    """Record `step` without running it; it must have run once with the same shapes.

    Out of memory is raised as it is; any other failure is a `CaptureFailedError`.
    """
    try:
        return _record(step, pool)
    finally:
        if pool.handle is None:
            pool.open()


def _record(step: Callable[[], Any], pool: GraphPool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(pool.device)
    if current.device_index not in _streams:
        _streams[current.device_index] = torch.cuda.Stream(pool.device)
    stream = _streams[current.device_index]
    stream.wait_stream(current)
    problem: Exception | None = None
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            step()
        except Exception as error:
            problem = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            problem = error if problem is None else problem
            _end_allocating(current.device_index, pool)
    current.wait_stream(stream)
    try:
        if problem is None:
            return graph
        if classify(problem).kind is FailureKind.OUT_OF_MEMORY:
            raise problem
        raise CaptureFailedError(f"{type(problem).__name__}: {problem}") from problem
    finally:
        del problem  # its traceback has this frame: together they would keep the step's tensors


def _end_allocating(index: int, pool: GraphPool) -> None:
    """End a void capture for torch's allocators, which torch does not notify: for them it would never end.

    The device's allocator would no longer free cached memory where an allocation fails. That of pinned memory cannot be
    notified, and refuses the handle. Random generators wait for the end of any capture: that of the pool's keeper.
    """
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is None:  # its name before torch 2.8
        end = torch._C._cuda_endAllocateCurrentStreamToPool  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # the allocator knows, and something later has failed
        end(index, pool.handle)
        torch._C._cuda_releasePool(index, pool.handle)
    pool.handle = None
