"""What stands in for a trace that cannot be made: the step run for real on the CPU at two small sizes, and extended.

An operation without a shape rule or a step that leaves torch (numpy, a library of its own) can still be run. What its
tensors hold at the two smallest sizes is booked as in a trace, block by block, and each block is extended in a line to
the size asked for. That is a guess, and marked as one: kernels and autocast are those of the CPU where they differ.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.forecasting.events import Category, Event, Trace
from brim.forecasting.foreach import foreach_as_on_cuda
from brim.forecasting.ledger import Block, Ledger
from brim.forecasting.untraceable import UntraceableError, obstacle_in_words
from brim.memory.snapshot import StateSnapshot, required_bytes
from brim.monitor.host import available_host_bytes
from brim.workloads.base import Workload

__all__ = ["approximate_trace"]

_HOST_SHARE = 0.4  # of the free host memory that a copy of the state may take


def approximate_trace(workload: Workload, batch_size: int, *, steps: int, why: str) -> Trace:
    """A trace extended from real steps at the two smallest sizes; `UntraceableError` where they cannot be run."""
    started = time.perf_counter()
    _check_can_run(workload)
    smallest = workload.smallest_size()
    first = _metered(workload, smallest, steps)
    second = _metered(workload, 2 * smallest, steps)
    events = _extended(first, second, batch_size)
    return Trace(
        batch_size=batch_size,
        events=events,
        step_starts=second.step_starts,
        seconds=time.perf_counter() - started,
        gemm_calls=1,
        backward_gemm_calls=int(workload.mode == "train"),
        approximate=f"extended from real steps at batch sizes {smallest} and {2 * smallest} on the CPU: {why}",
    )


def _check_can_run(workload: Workload) -> None:
    tensors = [tensor for module in workload.modules() for tensor in (*module.parameters(), *module.buffers())]
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise UntraceableError("the step was not run for real: the model was built without its weights")
    if workload.device.type != "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
        raise UntraceableError(f"the step was not run for real: it is on {workload.device}, not on the CPU")
    needed = required_bytes(workload.modules(), workload.optimizers(), workload.stateful())
    if needed > _HOST_SHARE * available_host_bytes():
        raise UntraceableError("the step was not run for real: the host has no room for a copy of the model's state")


def _metered(workload: Workload, size: int, steps: int) -> Trace:
    """Real steps at a size, booked; the state is as before afterwards."""
    ledger = Ledger()
    snapshot = StateSnapshot.take(workload.modules(), workload.optimizers(), [*workload.stateful(), workload])
    try:
        with foreach_as_on_cuda():
            meter = _Meter(ledger)
            for module in workload.modules():
                meter.label(module.parameters(), "weights", resident=True)
                meter.label(module.buffers(), "buffers", resident=True)
            with meter:
                batch = workload.make_batch(size)
                meter.label(tree_leaves(batch), "inputs")
                for _ in range(steps):
                    ledger.begin_step()
                    workload.step(batch)
                    for module in workload.modules():
                        meter.label((parameter.grad for parameter in module.parameters()), "gradients")
                    for optimizer in workload.optimizers():
                        meter.label(tree_leaves(list(optimizer.state.values())), "optimizer")
    except Exception as error:
        raise UntraceableError(
            f"run for real on the CPU at batch size {size} it raised {obstacle_in_words(error)}"
        ) from error
    finally:
        ledger.close()
        snapshot.restore()
    return Trace(batch_size=size, events=ledger.events(), step_starts=ledger.step_starts(), seconds=0.0)


class _Meter(TorchDispatchMode):
    """Books the storages of real tensors, and lets every operation run."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._graph_task = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if task != -1:
                self._ledger.begin_backward()
        result = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                continue
            if leaf.dim() > 0 or "lift" not in name:  # a bare number, such as Adam's count of steps, stays on the host
                self._block_of(leaf, name)
        return result

    def label(self, values: Any, category: Category, *, resident: bool = False) -> None:
        """Say what some tensors are for; `resident`: they were there before."""
        for value in values:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            storage = value.untyped_storage()
            if resident and self._ledger.bound(storage) is None:
                block = self._ledger.take_resident(storage.nbytes(), category)
                if block is not None:
                    self._ledger.bind(storage, block)
            self._ledger.label(self._ledger.bound(storage), category)

    def _block_of(self, tensor: torch.Tensor, op: str) -> Block | None:
        storage = tensor.untyped_storage()
        block = self._ledger.bound(storage)
        if block is None:
            block = self._ledger.take(storage.nbytes(), op)
            if block is not None:
                self._ledger.bind(storage, block)
        return block


def _extended(first: Trace, second: Trace, batch_size: int) -> tuple[Event, ...]:
    """Each block in a line through both sizes; where the steps differ, what is not resident in proportion."""
    if batch_size == second.batch_size:
        return second.events
    alike = [(event.kind, event.block) for event in first.events] == [(e.kind, e.block) for e in second.events]
    if alike:
        reach = (batch_size - first.batch_size) / (second.batch_size - first.batch_size)
        return tuple(
            dataclasses.replace(event, bytes=max(round(small.bytes + reach * (event.bytes - small.bytes)), 0))
            for small, event in zip(first.events, second.events, strict=True)
        )
    share = batch_size / second.batch_size
    fixed = ("weights", "buffers", "gradients", "optimizer")
    return tuple(
        event if event.category in fixed else dataclasses.replace(event, bytes=round(share * event.bytes))
        for event in second.events
    )
