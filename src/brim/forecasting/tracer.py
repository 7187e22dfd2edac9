"""The dispatch mode behind a trace: sees every operation of a step below autograd, and books what it allocates.

An operation whose inputs all have values is run; of any other only the shapes of its results are worked out. Which
operations CUDA would run differently is listed in `cuda_kernels`; this file only asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from brim.forecasting.events import ConvCall, ReductionCall, UntraceableError
from brim.forecasting.ledger import Block, Ledger
from brim.forecasting.shape_tensor import ShapeTensor, make_shape_tensor
from brim.forecasting.shapes import TensorSpec, infer, pick, replaced, returned_arguments, specify, tensors_in
from brim.forecasting.torch_private import (
    NO_TORCH_DISPATCH,
    TorchDispatchMode,
    composite,
    current_graph_task_id,
    is_composite_on_cuda,
    use_count,
    without_dispatch_modes,
)
from brim.forecasting.values import (
    FLOAT_LIMIT,
    UNKNOWN_VALUES,
    UNKNOWN_VALUES_BY_NAME,
    RealValues,
    is_unknown,
    run_for_real,
    small_enough,
)

__all__ = ["Facts", "Replacement", "Scratch", "Tracer", "Witness", "counts_of_last_reference"]

_Call = TypeVar("_Call", ConvCall, ReductionCall)

aten = torch.ops.aten
_HOST = torch.device("cpu")
_COPIES = (aten._to_copy.default, aten.clone.default)
_RESIZES = (
    aten.resize_.default,
    aten.resize_as_.default,
    *(getattr(aten.set_, overload) for overload in aten.set_.overloads()),
)
_LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)


@dataclasses.dataclass
class Facts:
    """What is counted on the way, for those who add what a trace cannot see."""

    attention: dict[str, None] = dataclasses.field(default_factory=dict)  # an ordered set of backends
    gemm_calls: int = 0
    backward_gemm_calls: int = 0
    lt_calls: int = 0
    convolutions: list[ConvCall] = dataclasses.field(default_factory=list)
    reductions: list[ReductionCall] = dataclasses.field(default_factory=list)
    guesses: dict[str, None] = dataclasses.field(default_factory=dict)  # an ordered set of what had to be assumed


Replacement = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any]], Any]  # NotImplemented: run it as it is
Scratch = Callable[[tuple[Any, ...]], Sequence[int]]  # bytes of each block, from the positional arguments
Witness = Callable[["Tracer", tuple[Any, ...], dict[str, Any], list[torch.Tensor]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Traits:
    """What its schema and the rules of CUDA say about an operation."""

    name: str
    is_view: bool
    mutates: bool
    returns_arguments: tuple[int | str, ...] | None  # where in the call the results are, if all of them are in it
    decomposes: bool  # composite: made of other operations, which are what is to be seen
    reads_values: bool
    reshapes: bool  # changes size or stride of its argument in place
    is_literal: bool
    is_copy: bool
    replacement: Replacement | None
    scratch: Scratch | None
    witness: Witness | None


class Tracer(TorchDispatchMode):
    """Answers the operations of a step without running them, and books their memory in a ledger."""

    def __init__(self, ledger: Ledger, *, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.values = RealValues(ledger)
        self.facts = Facts()
        self.device_type = device_type  # of the tensors that count
        self._replacements: dict[Any, Replacement] = dict(UNKNOWN_VALUES)
        self._scratch: Mapping[Any, Scratch] = {}
        self._witnesses: Mapping[Any, Witness] = {}
        self._traits: dict[int, _Traits] = {}  # by identity: operations are created once, and slow to hash
        self._kernel: str | None = None  # that is being imitated by other operations
        self._graph_task = -1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call of this mode, and import its compiler for that

    def install(
        self,
        replacements: Mapping[Any, Replacement],
        scratch: Mapping[Any, Scratch] | None = None,
        witnesses: Mapping[Any, Witness] | None = None,
    ) -> None:
        """Let some operations be answered otherwise, take scratch, or be noted."""
        self._replacements.update(replacements)
        self._scratch = scratch or {}
        self._witnesses = witnesses or {}
        self._traits.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not ShapeTensor and _answers_itself(kind):
                return NotImplemented  # another kind of tensor: what it is made of comes by here later
        kwargs = kwargs or {}
        task = current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if task != -1:
                self.ledger.begin_backward()
        traits = self._traits.get(id(func)) or self._learn(func)
        if traits.replacement is not None:
            replaced = traits.replacement(self, func, args, kwargs)
            if replaced is not NotImplemented:
                return replaced
        if traits.decomposes:
            with self:
                return composite(func, *args, **kwargs)
        return self.run(func, args, kwargs)

    @property
    def in_backward(self) -> bool:
        """Whether the autograd engine is running."""
        return self._graph_task != -1

    @contextlib.contextmanager
    def imitating(self, kernel: str) -> Iterator[None]:
        """Book the operations of a block under the name of the kernel that they replace."""
        before, self._kernel = self._kernel, kernel
        try:
            yield
        finally:
            self._kernel = before

    @contextlib.contextmanager
    def graph_pool(self) -> Iterator[None]:
        """Book a block of operations in the private pool of CUDA graphs."""
        self.ledger.pool = 1
        try:
            yield
        finally:
            self.ledger.pool = 0

    def repeat_first_step(self) -> bool:
        """Book the first step again as the second, which has begun; whether that is possible."""
        positions = self.ledger.repeat_first_step()
        if positions is None:
            return False
        facts = self.facts
        facts.convolutions += _repeated(facts.convolutions, positions)
        facts.reductions += _repeated(facts.reductions, positions)
        facts.gemm_calls *= 2
        facts.backward_gemm_calls *= 2
        facts.lt_calls *= 2
        return True

    def holds_last_reference(self, tensor: torch.Tensor) -> bool:
        """Whether nobody but the autograd engine holds a gradient, so that it may be added to in place."""
        return isinstance(tensor, ShapeTensor) and _reference_counts(tensor) == counts_of_last_reference()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation as it is, and book its results."""
        traits = self._traits.get(id(func)) or self._learn(func)
        tensors = tensors_in(args, kwargs)
        if not any(map(is_unknown, tensors)):
            if _on_meta(tensors, kwargs):  # a step's own reasoning about shapes
                return run_for_real(func, *args, **kwargs)
            done, result = self._run_for_real(func, traits, args, kwargs, tensors)
            if done:
                return result
        if traits.returns_arguments is not None:  # in place: its results are among its arguments
            self._change_shape(func, traits, args, kwargs)
            self._book(traits, args, kwargs, [])
            return pick(traits.returns_arguments, args, kwargs)
        spec = infer(func, args, kwargs, tensors, is_view=traits.is_view)
        return self._realise(traits, spec, args, kwargs, tensors)

    def _change_shape(self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let an in-place operation give a shape tensor another shape on the same memory; more is refused."""
        out = kwargs.get("out")
        if func in _RESIZES or (isinstance(out, torch.Tensor) and out.numel() == 0):
            raise UntraceableError(f"{traits.name} gives an activation other memory in place, which cannot be traced")
        if traits.reshapes:
            run_for_real(func, *args, **kwargs)

    def _run_for_real(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[bool, Any]:
        """Whether the result comes from real values, and if so, what it is."""
        if traits.is_literal:
            return True, self._literal(tensors[0], traits.name)
        valued = [self.values.valued(tensor) for tensor in tensors]
        if any(value is None for value in valued):
            return False, None
        spec = None
        if not (traits.mutates or traits.is_view or traits.reads_values):
            spec = infer(func, args, kwargs, tensors, is_view=False)
            if not small_enough(spec):
                return False, None
        on_host = _device_of(kwargs, tensors).type == "cpu"
        real_args, real_kwargs = replaced(args, kwargs, valued)
        result = run_for_real(func, *real_args, **(real_kwargs if on_host else _for_the_host(real_kwargs)))
        if traits.returns_arguments is not None:
            return True, pick(traits.returns_arguments, args, kwargs)
        results = tensors_in((result,), {})
        if (
            not on_host and results
        ):  # values beside shape tensors, since there is no real tensor on a device that is not there
            if spec is None:
                spec = infer(func, args, kwargs, tensors, is_view=True) if traits.is_view else specify(result)
            shape_tensors = self._realise(traits, spec, args, kwargs, tensors)
            for shape_tensor, value in zip(tensors_in((shape_tensors,), {}), results, strict=True):
                shape_tensor.value = value  # type: ignore[attr-defined]  # all of them are shape tensors
            return True, shape_tensors
        for made in results:
            self.values.born(made, self._kernel or traits.name, on_device=self.device_type == "cpu")
        self._book(traits, args, kwargs, results)
        return True, result

    def _literal(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """`torch.tensor(…)`: real, and where it was made on a device, a shape tensor with its value."""
        if tensor.device.type == "cpu":
            self.values.born(tensor, op, on_device=tensor.dim() > 0)  # a bare number stays on the host
            return tensor
        block = self.ledger.take(tensor.numel() * tensor.element_size(), op)
        shape_tensor = make_shape_tensor(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, block)
        shape_tensor.value = run_for_real(tensor.cpu)
        return shape_tensor

    def _realise(
        self,
        traits: _Traits,
        spec: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Shape tensors in place of the specified results."""
        device = _device_of(kwargs, tensors)
        counts = device.type == self.device_type and not kwargs.get("pin_memory")
        op = self._kernel or traits.name
        held = self._scratch_of(traits, args)
        results: list[torch.Tensor] = []
        result = self._made(spec, device, op, tensors, {}, results, counts=counts)
        if traits.is_copy and isinstance(tensors[0], ShapeTensor):
            result.take_shares_of(tensors[0])
        if traits.witness is not None:
            traits.witness(self, args, kwargs, results)
        del held
        return result

    def _made(
        self,
        spec: Any,
        device: torch.device,
        op: str,
        tensors: Sequence[torch.Tensor],
        blocks: dict[int, Block | None],
        results: list[torch.Tensor],
        *,
        counts: bool,
    ) -> Any:
        if isinstance(spec, TensorSpec):
            if spec.alias >= 0:
                shape_tensor = self._view(spec, tensors[spec.alias], device)
                results.append(shape_tensor)
                return shape_tensor
            if spec.alias not in blocks:
                blocks[spec.alias] = self.ledger.take(spec.nbytes, op) if counts else None
            block = blocks[spec.alias]
            shape_tensor = make_shape_tensor(spec.size, spec.stride, spec.dtype, device, block, spec.offset)
            results.append(shape_tensor)
            return shape_tensor
        if isinstance(spec, list):
            return [self._made(part, device, op, tensors, blocks, results, counts=counts) for part in spec]
        return spec

    def _view(self, spec: TensorSpec, whole: torch.Tensor, device: torch.device) -> ShapeTensor:
        block = self.values.block_of(whole)
        if torch.is_inference_mode_enabled() and not whole.is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor is an ordinary tensor
                shape_tensor = make_shape_tensor(spec.size, spec.stride, spec.dtype, device, block, spec.offset)
        else:
            shape_tensor = make_shape_tensor(spec.size, spec.stride, spec.dtype, device, block, spec.offset)
        if isinstance(whole, ShapeTensor):
            shape_tensor.take_shares_of(whole)
        return shape_tensor

    def _book(
        self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> None:
        """Scratch and facts of an operation that takes no new memory for its results."""
        self._scratch_of(traits, args)  # given back at once
        if traits.witness is not None:
            traits.witness(self, args, kwargs, results)

    def _scratch_of(self, traits: _Traits, args: tuple[Any, ...]) -> list[Block | None]:
        if traits.scratch is None:
            return []
        op = f"{self._kernel or traits.name} scratch"
        return [self.ledger.take(nbytes, op) for nbytes in traits.scratch(args)]

    def _learn(self, func: Any) -> _Traits:
        schema = func._schema
        returns_alias = any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns
        )
        traits = _Traits(
            name=str(func).rpartition(".")[0],
            is_view=returns_alias and not schema.is_mutable,
            mutates=bool(schema.is_mutable),
            returns_arguments=returned_arguments(schema) if schema.is_mutable else None,
            decomposes=is_composite_on_cuda(func.name()),
            reads_values=torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags,
            reshapes=torch.Tag.inplace_view in func.tags and func is not aten.detach_.default,
            is_literal=func in _LITERALS,
            is_copy=func in _COPIES,
            replacement=self._replacements.get(func) or UNKNOWN_VALUES_BY_NAME.get(func.name()),
            scratch=self._scratch.get(func),
            witness=self._witnesses.get(func),
        )
        self._traits[id(func)] = traits
        return traits


def _repeated(calls: Sequence[_Call], positions: Mapping[int, int]) -> list[_Call]:
    """The calls of one step where they come again in another."""
    return [dataclasses.replace(call, event=positions[call.event]) for call in calls if call.event in positions]


@functools.cache
def _answers_itself(kind: type) -> bool:
    """Whether a class of tensors handles operations of its own."""
    return getattr(kind, "__torch_dispatch__", None) is not NO_TORCH_DISPATCH


def _device_of(kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where the results of a call would be."""
    asked = kwargs.get("device")
    if asked is not None:
        device = torch.device(asked)
        whole = device.type != "cuda" or device.index is not None
        return device if whole else torch.device("cuda", torch.cuda.current_device())
    for tensor in tensors:
        if tensor.dim() > 0:
            return tensor.device
    return tensors[0].device if tensors else _HOST


def _for_the_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of a call that is made for a device and computed on the host.

    A generator of the device is taken out, not away: some overloads must have one, or None.
    """
    there = {"device": _HOST, "generator": None}
    return {name: value if value is None else there.get(name, value) for name, value in kwargs.items()}


def _on_meta(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(tensor.is_meta for tensor in tensors)


def _reference_counts(shape_tensor: ShapeTensor) -> tuple[int, int]:
    """How often a shape tensor and its block are held, as seen from inside the tracer."""
    return use_count(shape_tensor), sys.getrefcount(shape_tensor.block)


@functools.cache
def counts_of_last_reference() -> tuple[int, int]:
    """The counts of a gradient that only the engine holds: those of the first one in 2·x + 3·x.

    To be asked for once before a trace: inside an operation of one they would be others.
    """
    counts: list[tuple[int, int]] = []
    tracer = Tracer(Ledger())

    def watch(_: Tracer, __: Any, args: tuple[Any, ...], ___: dict[str, Any]) -> Any:
        if tracer.in_backward and isinstance(args[0], ShapeTensor):
            counts.append(_reference_counts(args[0]))
        return NotImplemented

    tracer.install({aten.add.Tensor: watch})
    with (
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        tracer,
    ):
        leaf = torch.empty(FLOAT_LIMIT + 1, requires_grad=True)  # large enough to be a shape tensor
        (leaf * 2 + leaf * 3).backward(torch.empty(FLOAT_LIMIT + 1))
    return counts[0] if counts else (-1, -1)
