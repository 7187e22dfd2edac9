"""One workload, one batch size, a few steps without running them: what they would allocate on a CUDA card.

    trace = trace_workload(workload, 8, target=Target(name="h200", compute_capability=(9, 0), total_bytes=…))
    trace.peak_allocated(), trace.live_at_peak(), trace.events

The step that runs is the workload's own, on its own modules and optimizers: their tensors are only looked at, and what
a step puts into them is taken out again. Nothing outside the trace changes, and no device is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from brim.errors import BrimError, RequestError
from brim.forecasting.approximation import approximate_trace
from brim.forecasting.cuda_autocast import cuda_autocast_on_cpu
from brim.forecasting.cuda_kernels import as_on_cuda
from brim.forecasting.events import Category, Target, Trace
from brim.forecasting.foreach import foreach_as_on_cuda
from brim.forecasting.generation_trace import prepare_generation
from brim.forecasting.ghost import Ghost
from brim.forecasting.ghost_model import give_meta_tensors_ghosts
from brim.forecasting.ledger import Ledger
from brim.forecasting.tracer import Tracer
from brim.forecasting.untraceable import UntraceableError, obstacle_in_words
from brim.memory.collector import without_collector
from brim.memory.snapshot import StateSnapshot
from brim.ranks.unwrap import without_collectives
from brim.workloads.base import Workload
from brim.workloads.inference import GenerateWorkload

__all__ = ["UntraceableError", "trace_workload"]


def trace_workload(
    workload: Workload,
    batch_size: int,
    *,
    target: Target | None = None,
    steps: int = 2,
    or_approximately: bool = True,
) -> Trace:
    """The memory events of a few steps at a batch size, as they would be on the target card.

    Two steps at least, if the optimizer's state is to be seen: it appears in the first. `target` decides which
    attention kernels would run; without one they are those of a Hopper card. A workload that cannot be traced is run
    for real on the CPU at its two smallest sizes, and what it holds there is extended in a line (`Trace.approximate`
    says why); where that does not work either, or without `or_approximately`, an `UntraceableError` says what is in the
    way.
    """
    if batch_size < 1:
        raise RequestError(f"batch_size={batch_size}: the smallest is 1")
    try:
        return _trace(workload, batch_size, target, steps)
    except BrimError as error:
        if not isinstance(error, UntraceableError):
            raise
        problem: Exception = error
    except Exception as error:
        problem = error
    # The except block has ended, so the traceback no longer holds the tensors of the step that failed.
    reason = obstacle_in_words(problem)
    if not or_approximately:
        raise UntraceableError(reason) from problem
    try:
        return approximate_trace(workload, batch_size, steps=steps, why=reason)
    except UntraceableError as error:
        raise UntraceableError(f"{error}; it cannot be traced either: {reason}") from problem


def _trace(workload: Workload, batch_size: int, target: Target | None, steps: int) -> Trace:
    started = time.perf_counter()
    ledger = Ledger()
    tracer = Tracer(ledger, device_type="cuda" if workload.device.type == "cuda" else "cpu")
    starts = (workload.modules(), workload.optimizers(), [*workload.stateful(), workload])
    snapshot = _References.take(*starts)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_collector())  # what a cycle holds, it holds until the trace ends
            give_meta_tensors_ghosts(workload.modules(), workload.optimizers())
            stack.enter_context(without_collectives(workload.modules()))
            stack.enter_context(_settings_of_cuda(tracer, target))
            _adopt(tracer, workload)
            stack.enter_context(tracer)
            guess = _run(tracer, workload, batch_size, steps)
    finally:
        ledger.close()
        tracer.values.release()
        snapshot.restore()
    facts = tracer.facts
    guesses = [*([guess] if guess else []), *facts.guesses]
    return Trace(
        batch_size=batch_size,
        events=ledger.events(),
        step_starts=ledger.step_starts(),
        seconds=time.perf_counter() - started,
        attention=tuple(facts.attention),
        gemm_calls=facts.gemm_calls,
        backward_gemm_calls=facts.backward_gemm_calls,
        lt_calls=facts.lt_calls,
        convolutions=tuple(dataclasses.replace(call, event=ledger.index_of(call.event)) for call in facts.convolutions),
        reductions=tuple(dataclasses.replace(call, event=ledger.index_of(call.event)) for call in facts.reductions),
        approximate="; ".join(guesses) or None,
    )


def _run(tracer: Tracer, workload: Workload, batch_size: int, steps: int) -> str | None:
    """Make the batch and take the steps; says what is not as it would be, if anything is not."""
    batch = workload.make_batch(batch_size)
    length = workload.batch_length(batch)
    if length != batch_size:
        raise RequestError(
            f"make_batch({batch_size}) returned a batch of {length}: it must return exactly the size asked for "
            "(if the first tensor's leading dimension is not the batch size, pass batch_length=)"
        )
    _label(tracer, tree_leaves(batch), "inputs")
    guess = prepare_generation(workload, tracer, batch) if isinstance(workload, GenerateWorkload) else None
    for _ in range(steps):
        tracer.ledger.begin_step()
        workload.step(batch)
        _label_state(tracer, workload)
    return guess


@contextlib.contextmanager
def _settings_of_cuda(tracer: Tracer, target: Target | None) -> Iterator[None]:
    """Everything that is otherwise on CUDA, for the block; a trace on a machine with a GPU has some of it anyway."""
    with contextlib.ExitStack() as stack:
        if tracer.device_type == "cpu":
            stack.enter_context(cuda_autocast_on_cpu())
            stack.enter_context(foreach_as_on_cuda())
        stack.enter_context(as_on_cuda(tracer, target))
        # Compiled code runs as it is written: what a compiler would fuse is not known here.
        stance: Any = getattr(torch.compiler, "set_stance", None)
        if stance is not None and "torch._dynamo" in sys.modules:  # else nothing here is compiled
            stack.enter_context(stance("force_eager"))
        # A gradient's label must be there before a step drops it.
        handle = register_optimizer_step_pre_hook(_label_gradients_for(tracer))
        stack.callback(handle.remove)
        yield


def _label_gradients_for(tracer: Tracer) -> Any:
    def label(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        _label(tracer, (parameter.grad for parameter in parameters), "gradients")

    return label


def _label_state(tracer: Tracer, workload: Workload) -> None:
    """What the step has left behind: gradients and the optimizer's state."""
    for module in workload.modules():
        _label(tracer, (parameter.grad for parameter in module.parameters()), "gradients")
    for optimizer in workload.optimizers():
        _label(tracer, tree_leaves(list(optimizer.state.values())), "optimizer")


def _adopt(tracer: Tracer, workload: Workload) -> None:
    """Weights, buffers, and what earlier steps have left: there before the first step.

    In the order in which `nn.Module.to` moves them: of each module its children first, then its own.
    """
    for module in workload.modules():
        for part in _children_first(module):
            for parameter in part._parameters.values():
                if parameter is not None:
                    tracer.values.adopt(parameter, "weights")
                    if parameter.grad is not None:
                        tracer.values.adopt(parameter.grad, "gradients")
            for buffer in part._buffers.values():
                if buffer is not None:
                    tracer.values.adopt(buffer, "buffers")
    for optimizer in workload.optimizers():
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, torch.Tensor) and value.dim() > 0:  # a step count stays on the host
                tracer.values.adopt(value, "optimizer")


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _label(tracer: Tracer, values: Iterable[Any], category: Category) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and (isinstance(value, Ghost) or value.layout is torch.strided):
            tracer.ledger.label(tracer.values.block_of(value), category)


class _References(StateSnapshot):
    """A snapshot of what refers to what, without the bytes: a trace writes into no real tensor."""

    def __init__(self, inventory: Any, rng: Any) -> None:
        inventory.storages.clear()
        inventory.without_storage.clear()
        super().__init__(inventory, rng)
