"""One workload, one batch size, a few steps without running them: what they would allocate on a CUDA card.

    trace = trace_workload(workload, 8, target=Target(name="h200", compute_capability=(9, 0), total_bytes=…))
    trace.peak_allocated(), trace.live_at_peak(), trace.events

The step that runs is the workload's own, on its own modules and optimizers: their tensors are only read, and what a
step puts into them is removed again. Nothing outside the trace changes, and no device is touched.

Where a step cannot be traced (an operation without a shape rule, or a step that leaves torch for numpy or a library of
its own), it is run for real on the CPU at the two smallest sizes, and each block is extrapolated in a line to the size
asked for (`approximate_trace`). That is a guess, and marked as one: kernels and autocast are those of the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brim.errors import BrimError, RequestError
from brim.forecasting.cuda_autocast import cuda_autocast_on_cpu
from brim.forecasting.cuda_kernels import as_on_cuda
from brim.forecasting.events import BATCH, Category, Event, Target, Trace, UntraceableError, obstacle_in_words
from brim.forecasting.generation_trace import prepare_generation
from brim.forecasting.ledger import Block, Ledger
from brim.forecasting.modules import ModuleWatch
from brim.forecasting.shape_tensor import ShapeTensor, forget_cached, make_shape_tensor
from brim.forecasting.shapes import tensors_in
from brim.forecasting.torch_private import TorchDispatchMode, current_graph_task_id, foreach_as_on_cuda, tree_leaves
from brim.forecasting.tracer import Tracer
from brim.memory.collector import without_collector
from brim.memory.snapshot import StateSnapshot, required_bytes
from brim.monitor.host import available_host_bytes
from brim.ranks.unwrap import without_collectives
from brim.workloads.base import Workload
from brim.workloads.inference import GenerateWorkload

__all__ = ["UntraceableError", "approximate_trace", "replace_meta_tensors", "trace_workload"]


def trace_workload(
    workload: Workload,
    batch_size: int,
    *,
    target: Target | None = None,
    steps: int = 2,
    or_approximately: bool = True,
    real_steps: dict[int, Trace] | None = None,
) -> Trace:
    """The memory events of a few steps at a batch size, as they would be on the target card.

    Two steps at least, if the optimizer's state is to be seen: it appears in the first. `target` decides which
    attention kernels would run; without one they are those of a Hopper card. A workload that cannot be traced is run
    for real on the CPU at its two smallest sizes, and what it holds there is extended in a line (`Trace.approximate`
    says why); where that does not work either, or without `or_approximately`, an `UntraceableError` says what is in the
    way. `real_steps`, kept from call to call, lets further sizes be extended from the same real steps.
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
        return approximate_trace(workload, batch_size, steps=steps, why=reason, real_steps=real_steps)
    except UntraceableError as error:
        raise UntraceableError(f"{error}; it cannot be traced either: {reason}") from problem


def _trace(workload: Workload, batch_size: int, target: Target | None, steps: int) -> Trace:
    started = time.perf_counter()
    watch = ModuleWatch(workload.modules())
    ledger = Ledger(watch.owner)
    tracer = Tracer(ledger, device_type="cuda" if workload.device.type == "cuda" else "cpu")
    starts = (workload.modules(), workload.optimizers(), [*workload.stateful(), workload])
    snapshot = _References.take(*starts)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_collector())  # what a cycle holds, it holds until the trace ends
            replace_meta_tensors(workload.modules(), workload.optimizers())
            watch.learn_parameters()
            stack.enter_context(without_collectives(workload.modules()))
            stack.enter_context(_settings_of_cuda(tracer, target))
            _adopt(tracer, workload, watch)
            # A gradient's label must be there before a step drops it.
            handle = register_optimizer_step_pre_hook(_label_gradients_for(tracer, watch))
            stack.callback(handle.remove)
            stack.enter_context(watch.watching())
            stack.enter_context(tracer)
            guess = _run(tracer, workload, watch, batch_size, steps)
    finally:
        ledger.close()
        tracer.values.release()
        snapshot.restore()
        if ledger.held:  # by an error on its way up, or by something that outlives the step
            forget_cached()
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


def _run(tracer: Tracer, workload: Workload, watch: ModuleWatch, batch_size: int, steps: int) -> str | None:
    """Make the batch and take the steps; says what is not as it would be, if anything is not."""
    batch = workload.make_batch(batch_size)
    length = workload.batch_length(batch)
    if length != batch_size:
        raise RequestError(
            f"make_batch({batch_size}) returned a batch of {length}: it must return exactly the size asked for "
            "(if the first tensor's leading dimension is not the batch size, pass batch_length=)"
        )
    _label(tracer, tree_leaves(batch), "inputs", BATCH)
    guess = prepare_generation(workload, tracer, batch) if isinstance(workload, GenerateWorkload) else None
    for step in range(steps):
        tracer.ledger.begin_step()
        if step == 1 and steps == 2 and workload.begin_repeat() and tracer.repeat_first_step():
            break
        workload.step(batch)
        _label_state(tracer, workload, watch)
    return guess


@contextlib.contextmanager
def _settings_of_cuda(tracer: Tracer, target: Target | None) -> Iterator[None]:
    """Everything that is otherwise on CUDA, for the block; a trace on a machine with a GPU has some of it anyway."""
    with contextlib.ExitStack() as stack:
        if tracer.device_type == "cpu":
            stack.enter_context(cuda_autocast_on_cpu())
            stack.enter_context(foreach_as_on_cuda(ShapeTensor))
        stack.enter_context(as_on_cuda(tracer, target))
        # Compiled code runs as it is written: what a compiler would fuse is not known here.
        stance: Any = getattr(torch.compiler, "set_stance", None)
        if stance is not None and "torch._dynamo" in sys.modules:  # else nothing here is compiled
            stack.enter_context(stance("force_eager"))
        yield


def _label_gradients_for(tracer: Tracer, watch: ModuleWatch) -> Any:
    def label(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            _label(tracer, [parameter.grad], "gradients", watch.of_parameter(parameter))

    return label


def _label_state(tracer: Tracer, workload: Workload, watch: ModuleWatch) -> None:
    """What the step has left behind: gradients and the optimizer's state."""
    for module in workload.modules():
        for parameter in module.parameters():
            _label(tracer, [parameter.grad], "gradients", watch.of_parameter(parameter))
    for optimizer in workload.optimizers():
        for held, state in optimizer.state.items():
            _label(tracer, tree_leaves(state), "optimizer", watch.of_parameter(held))


def _adopt(tracer: Tracer, workload: Workload, watch: ModuleWatch) -> None:
    """Weights, buffers, and what earlier steps have left: there before the first step.

    In the order in which `nn.Module.to` moves them: of each module its children first, then its own.
    """
    for module in workload.modules():
        for part in _children_first(module):
            for parameter in part._parameters.values():
                if parameter is not None:
                    tracer.values.adopt(parameter, "weights", watch.of_parameter(parameter))
                    if parameter.grad is not None:
                        tracer.values.adopt(parameter.grad, "gradients", watch.of_parameter(parameter))
            for buffer in part._buffers.values():
                if buffer is not None:
                    tracer.values.adopt(buffer, "buffers", watch.of_module(part))
    for optimizer in workload.optimizers():
        for held, state in optimizer.state.items():
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # a step count stays on the host
                    tracer.values.adopt(value, "optimizer", watch.of_parameter(held))


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _label(tracer: Tracer, values: Iterable[Any], category: Category, owner: str) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and (isinstance(value, ShapeTensor) or value.layout is torch.strided):
            tracer.ledger.label(tracer.values.block_of(value), category, owner)


class _References(StateSnapshot):
    """A snapshot of what refers to what, without the bytes: a trace writes into no real tensor."""

    def __init__(self, inventory: Any, rng: Any) -> None:
        inventory.storages.clear()
        inventory.without_storage.clear()
        super().__init__(inventory, rng)


def replace_meta_tensors(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Put shape tensors in the place of parameters and buffers on the meta device; the caller puts those back."""
    made: dict[int, ShapeTensor] = {}
    for root in modules:
        for module in root.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.device.type == "meta":
                        held[name] = _shape_tensor_like(tensor, made)  # type: ignore[assignment]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]


def _shape_tensor_like(tensor: torch.Tensor, made: dict[int, ShapeTensor]) -> ShapeTensor:
    if id(tensor) not in made:
        shape_tensor = make_shape_tensor(tensor.shape, tensor.stride(), tensor.dtype, torch.device("cpu"), None)
        if isinstance(tensor, nn.Parameter):
            vars(shape_tensor)["_is_param"] = True
            shape_tensor.requires_grad_(tensor.requires_grad)
        made[id(tensor)] = shape_tensor
    return made[id(tensor)]


@functools.cache
def _quiet_tracer() -> Tracer:
    return Tracer(Ledger())


def _answer_outside(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Outside of any trace a shape tensor still has a shape, a dtype and views; it meets no real one."""
    del types
    tensors = tensors_in(args, kwargs)
    kept = [tensor for tensor in tensors if isinstance(tensor, ShapeTensor)]
    if len(kept) < len(tensors):
        raise RequestError(
            f"the step uses a tensor of shape {tuple(kept[0].shape)} that it made while brim traced it, which has no "
            "values: something outside of the model has kept it, such as a global or a dict as a cache; let the model "
            "keep it, or clear it after the forecast"
        )
    with _quiet_tracer():
        return func(*args, **kwargs)


ShapeTensor.outside = staticmethod(_answer_outside)


_HOST_SHARE = 0.4  # of the free host memory that a copy of the state may take


def approximate_trace(
    workload: Workload, batch_size: int, *, steps: int, why: str, real_steps: dict[int, Trace] | None = None
) -> Trace:
    """A trace extended from real steps at the two smallest sizes; `UntraceableError` where they cannot be run."""
    started = time.perf_counter()
    _check_can_run(workload)
    smallest = workload.smallest_size()
    real_steps = {} if real_steps is None else real_steps
    for size in (smallest, 2 * smallest):
        if size not in real_steps:
            real_steps[size] = _metered(workload, size, steps)
    first, second = real_steps[smallest], real_steps[2 * smallest]
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
    watch = ModuleWatch(workload.modules())
    ledger = Ledger(watch.owner)
    snapshot = StateSnapshot.take(workload.modules(), workload.optimizers(), [*workload.stateful(), workload])
    try:
        with foreach_as_on_cuda(ShapeTensor):
            meter = _Meter(ledger)
            for module in workload.modules():
                for part in module.modules():
                    meter.label(part.parameters(recurse=False), "weights", watch.of_module(part), resident=True)
                for part in module.modules():
                    meter.label(part.buffers(recurse=False), "buffers", watch.of_module(part), resident=True)
            with watch.watching(), meter:
                batch = workload.make_batch(size)
                meter.label(tree_leaves(batch), "inputs", BATCH)
                for _ in range(steps):
                    ledger.begin_step()
                    workload.step(batch)
                    _label_metered(meter, workload, watch)
    except Exception as error:
        raise UntraceableError(
            f"run for real on the CPU at batch size {size} it raised {obstacle_in_words(error)}"
        ) from error
    finally:
        ledger.close()
        snapshot.restore()
    return Trace(batch_size=size, events=ledger.events(), step_starts=ledger.step_starts(), seconds=0.0)


def _label_metered(meter: _Meter, workload: Workload, watch: ModuleWatch) -> None:
    for module in workload.modules():
        for parameter in module.parameters():
            meter.label([parameter.grad], "gradients", watch.of_parameter(parameter))
    for optimizer in workload.optimizers():
        for held, state in optimizer.state.items():
            meter.label(tree_leaves(state), "optimizer", watch.of_parameter(held))


class _Meter(TorchDispatchMode):
    """Books the storages of real tensors, and lets every operation run."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._graph_task = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        task = current_graph_task_id()
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

    def label(self, values: Any, category: Category, owner: str, *, resident: bool = False) -> None:
        """Say what some tensors are for and whose they are; `resident`: they were there before."""
        for value in values:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            storage = value.untyped_storage()
            if resident and self._ledger.bound(storage) is None:
                block = self._ledger.take_resident(storage.nbytes(), category, owner)
                if block is not None:
                    self._ledger.bind(storage, block)
            self._ledger.label(self._ledger.bound(storage), category, owner)

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
            event._replace(bytes=max(round(small.bytes + reach * (event.bytes - small.bytes)), 0))
            for small, event in zip(first.events, second.events, strict=True)
        )
    share = batch_size / second.batch_size
    fixed = ("weights", "buffers", "gradients", "optimizer")
    return tuple(
        event if event.category in fixed else event._replace(bytes=round(share * event.bytes))
        for event in second.events
    )
