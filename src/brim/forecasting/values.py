"""Real values beside the shape tensors: small tensors that a step may read, and stand-ins for everything from outside.

A traced step must still be able to ask a mask how many ones it has or a grid of images how large it is. So small
tensors that do not come out of the model's arithmetic stay real, and only what meets an activation has no data.
Weights, buffers and data from outside the trace are never touched: below autograd a stand-in takes the place of each,
so that a gradient or an optimizer's state lands on the user's own parameter and no byte of it changes.

Where a step reads a value that only a real run would know (`UNKNOWN_VALUES`), numbers are taken as one, truths as
false, a mask as full unless it is known to be one of several. A logged loss is harmless and a branch on it rarely
matters, but how many tokens a router sends to an expert does: what may change the memory is noted as a guess, and the
trace is marked approximate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from brim.forecasting.events import Category, UntraceableError
from brim.forecasting.ledger import Block, Ledger
from brim.forecasting.shape_tensor import ShapeTensor
from brim.forecasting.shapes import TensorSpec
from brim.forecasting.torch_private import storage_address, without_dispatch

if TYPE_CHECKING:
    from brim.forecasting.tracer import Replacement, Tracer

__all__ = [
    "FLOAT_LIMIT",
    "INTEGER_LIMIT",
    "UNKNOWN_VALUES",
    "UNKNOWN_VALUES_BY_NAME",
    "RealValues",
    "is_unknown",
    "run_for_real",
    "small_enough",
]

INTEGER_LIMIT = 2**22  # elements of an integer or boolean tensor up to which its values are kept
FLOAT_LIMIT = 4096  # the same for results in floating point
CONSTANT_LIMIT = 64  # and for floating-point tensors from outside: a schedule or a learning rate, not weights

_Held = tuple[weakref.ref[Any], torch.Tensor]


class RealValues:
    """Which tensors have values in a trace, and what stands in for those from outside."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # real storages made within the trace
        self._copies: dict[int, _Held] = {}  # by address of a storage from outside: a copy of all of it
        self._stand_ins: dict[int, _Held] = {}  # by identity of a tensor from outside
        self._adopted: list[tuple[ShapeTensor, Block | None]] = []  # shape tensors from outside, and what they were on

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor is on; one from outside is resident from now on."""
        if isinstance(tensor, ShapeTensor):
            if tensor.block is not None and not tensor.block.is_in(self._ledger):
                return self.adopt(tensor, "inputs")
            return tensor.block
        storage = _storage_of(tensor)
        if storage is None:
            return None
        if storage_address(storage) in self._born:  # without a block, it is on the host
            return self._ledger.bound(storage)
        return self._ledger.bound(storage) or self.adopt(tensor, "inputs")

    def release(self) -> None:
        """Give the shape tensors from outside back what they were on before."""
        for shape_tensor, block in self._adopted:
            shape_tensor.block = block
        self._adopted.clear()

    def adopt(self, tensor: torch.Tensor, label: Category, owner: str | None = None) -> Block | None:
        """Count a tensor from outside as resident."""
        if isinstance(tensor, ShapeTensor):
            if tensor.block is None or not tensor.block.is_in(self._ledger):  # made before the trace
                self._adopted.append((tensor, tensor.block))
                tensor.block = self._ledger.take_resident(tensor.numel() * tensor.element_size(), label, owner)
            return tensor.block
        storage = _storage_of(tensor)
        if storage is None:
            return None
        block = self._ledger.bound(storage)
        if block is None:
            # What was there before is met in the first step; what comes up later was made outside of torch.
            late = self._ledger.steps > 1
            block = self._ledger.take(storage.nbytes(), "") if late else None
            block = block or self._ledger.take_resident(storage.nbytes(), label, owner)
            if block is not None:
                self._ledger.bind(storage, block)
        return block

    def born(self, tensor: torch.Tensor, op: str, *, on_device: bool = True) -> None:
        """A real tensor was made within the trace: it may be changed in place."""
        storage = _storage_of(tensor)
        if storage is None or storage_address(storage) in self._born:
            return
        self._born[storage_address(storage)] = weakref.ref(storage, _popper(self._born, storage_address(storage)))
        if on_device and self._ledger.bound(storage) is None:
            block = self._ledger.take(storage.nbytes(), op)
            if block is not None:
                self._ledger.bind(storage, block)

    def valued(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor to compute with in place of this one, or None if its values are not kept."""
        if isinstance(tensor, ShapeTensor):
            return tensor.value
        storage = _storage_of(tensor)
        if storage is None:
            return None
        if storage_address(storage) in self._born:
            return tensor
        held = self._stand_ins.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        if not _keeps_values(tensor, storage):
            return None
        copy = self._copy_of(tensor, storage)
        part: torch.Tensor = run_for_real(copy.as_strided, tensor.shape, tensor.stride(), tensor.storage_offset())
        self._stand_ins[id(tensor)] = (weakref.ref(tensor, _popper(self._stand_ins, id(tensor))), part)
        return part

    def _copy_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """One copy of a whole storage from outside, so that whatever shares memory there shares it here."""
        held = self._copies.get(storage_address(storage))
        if held is not None and held[0]() is not None and held[1].dtype == tensor.dtype:
            return held[1]
        block = self.block_of(tensor)
        whole = run_for_real(lambda: torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))
        copy: torch.Tensor = run_for_real(lambda: whole.to("cpu", copy=True))
        if block is not None:
            self._ledger.bind(copy.untyped_storage(), block)
        self.born(copy, "", on_device=False)
        self._copies[storage_address(storage)] = (
            weakref.ref(storage, _popper(self._copies, storage_address(storage))),
            copy,
        )
        return copy


def is_unknown(tensor: torch.Tensor) -> bool:
    """Whether only a real run would know the values of a tensor."""
    return isinstance(tensor, ShapeTensor) and tensor.value is None


def small_enough(spec: Any) -> bool:
    """Whether results may be computed for real beside the trace."""
    if isinstance(spec, TensorSpec):
        elements = 1
        for size in spec.size:
            elements *= size
        return elements <= (FLOAT_LIMIT if _is_float(spec.dtype) else INTEGER_LIMIT)
    return all(small_enough(part) for part in spec) if isinstance(spec, list) else True


def run_for_real(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call past every dispatch mode, outside of inference mode, without gradients."""
    guard = without_dispatch()
    try:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    finally:
        del guard


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _keeps_values(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    if tensor.device.type not in ("cpu", "cuda") or isinstance(tensor, torch.nn.Parameter):
        return False
    elements = storage.nbytes() // tensor.element_size()
    return elements <= (CONSTANT_LIMIT if _is_float(tensor.dtype) else INTEGER_LIMIT)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _popper(held: dict[int, Any], key: int) -> Callable[[object], None]:
    def pop(_: object) -> None:
        held.pop(key, None)

    return pop


aten = torch.ops.aten


def _item(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """A number read from an activation: a loss to log, most often."""
    tensor: torch.Tensor = args[0]
    if not is_unknown(tensor):
        return NotImplemented
    assert isinstance(tensor, ShapeTensor)
    if tensor.dtype.is_floating_point:
        return 1.0
    if tensor.dtype.is_complex:
        return 1.0 + 0.0j
    if tensor.dtype == torch.bool and tensor.density is not None:
        return tensor.density >= 0.5
    if tensor.dtype == torch.bool:
        tracer.facts.guesses.setdefault("the step branches on a value that only a real run knows; taken as false")
        return False
    tracer.facts.guesses.setdefault("the step reads an integer that only a real run knows; taken as 1")
    return 1


def _equal(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    if not any(is_unknown(tensor) for tensor in args[:2]):
        return NotImplemented
    tracer.facts.guesses.setdefault("the step compares tensors whose values only a real run knows; taken as different")
    return False


def _nonzero(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    mask: torch.Tensor = args[0]
    if not is_unknown(mask):
        return NotImplemented
    return tracer.run(aten.new_empty.default, (mask, [_count(tracer, mask), mask.dim()]), {"dtype": torch.int64})


def _masked_select(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    tensor, mask = args
    if not is_unknown(tensor) and not is_unknown(mask):
        return NotImplemented
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = _count(tracer, mask) * (math.prod(shape) // max(mask.numel(), 1))
    return tracer.run(aten.new_empty.default, (tensor, [count]), {})


def _index(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Masks among the indices become positions, as they do on CUDA."""
    tensor, indices = args
    masks = [index for index in indices if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)]
    if not masks:
        picked = tracer.run(func, args, kwargs)
        if isinstance(tensor, ShapeTensor) and tensor.density is not None:
            picked.density = tensor.density  # some rows of a mask: as full as all of it
        return picked
    if not any(is_unknown(value) for value in (tensor, *masks)):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        if not any(index is mask for mask in masks):
            positions.append(index)
            continue
        with tracer:
            found = torch.nonzero(index)  # [count, dimensions of the mask]
            positions.extend(found.unbind(1))
    return tracer.run(func, (tensor, positions), kwargs)


def _unique(results: int) -> Any:
    """All values different: the most that there can be."""

    def replace(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
        tensor = args[0]
        if not is_unknown(tensor):
            return NotImplemented
        tracer.facts.guesses.setdefault("the step counts distinct values; all are taken as distinct")
        flat = tracer.run(aten.new_empty.default, (tensor, [tensor.numel()]), {})
        counted = [
            tracer.run(aten.new_empty.default, (tensor, [tensor.numel()]), {"dtype": torch.int64})
            for _ in range(results - 1)
        ]
        return (flat, *counted)

    return replace


def _nms(*_: Any) -> Any:
    """All that could remain would be far too many: every class of every proposal, of which a real run keeps a few."""
    raise UntraceableError("how many boxes non-maximum suppression keeps is known only to a real run")


def _one_hot_scatter(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ones scattered into zeros: as many of the result are set as there are indices."""
    result = tracer.run(func, args, kwargs)
    indices = args[2]
    if isinstance(result, ShapeTensor) and isinstance(indices, torch.Tensor):
        result.density = indices.numel() / max(result.numel(), 1)
    return result


def _chosen(place: int | None, dim: int | None = -1) -> Replacement:
    """Places along a dimension, in result `place` of several: which ones only a real run knows, but among how many."""

    def replace(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = tracer.run(func, args, kwargs)
        places = result if place is None else result[place]
        names = [argument.name for argument in func._schema.arguments]
        at = names.index("dim") if "dim" in names else len(args)
        along = args[at] if len(args) > at else kwargs.get("dim", dim)
        if isinstance(places, ShapeTensor) and along is not None and args[0].dim():
            places.choices = args[0].shape[along]
        return result

    return replace


def _any_along(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether one of several choices is a certain one: they are not the same."""
    result = tracer.run(func, args, kwargs)
    mask = args[0]
    if isinstance(result, ShapeTensor) and isinstance(mask, ShapeTensor) and mask.density is not None:
        result.density = min(mask.density * (mask.numel() / max(result.numel(), 1)), 1.0)
    return result


def _comparison(same: float) -> Replacement:
    """Is anything not a number, or infinite? In a step that works, nothing is. Which of several is it? One of them."""

    def replace(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left, right = args[:2]
        result = tracer.run(func, args, kwargs)
        if not isinstance(result, ShapeTensor):
            return result
        if left is right:
            result.density = same
        elif isinstance(right, float) and math.isinf(right):
            result.density = 1 - same
        elif isinstance(right, torch.Tensor) and right.dim() == 1 and right.numel() and left.shape[-1:] == (1,):
            result.density = abs(1 - same - 1 / right.numel())  # a choice, compared with all that there are
        elif (
            isinstance(left, ShapeTensor) and left.choices and (not isinstance(right, torch.Tensor) or not right.dim())
        ):
            result.density = abs(1 - same - 1 / left.choices)  # a choice, compared with one
        return result

    return replace


def _never(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`isnan` and `isinf`."""
    result = tracer.run(func, args, kwargs)
    if isinstance(result, ShapeTensor):
        result.density = 0.0
    return result


def _of_densities(combine: Callable[..., float]) -> Replacement:
    """A truth about masks whose shares are known."""

    def replace(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = [argument for argument in args if isinstance(argument, ShapeTensor)]
        if not masks or any(mask.density is None or mask.dtype != torch.bool for mask in masks):
            return NotImplemented
        result = tracer.run(func, args, kwargs)
        result.density = combine(*(mask.density for mask in masks))
        return result

    return replace


def _count(tracer: Tracer, mask: torch.Tensor) -> int:
    """How many elements of a mask are set."""
    real = tracer.values.valued(mask)
    if real is not None:
        return int(run_for_real(torch.count_nonzero, real))
    density: float | None = getattr(mask, "density", None)
    if density is not None:
        tracer.facts.guesses.setdefault("a mask over choices of the model is taken as evenly spread")
        return math.ceil(density * mask.numel())
    tracer.facts.guesses.setdefault("a mask that only a real run knows is taken as full")
    return int(mask.numel())


UNKNOWN_VALUES: dict[Any, Replacement] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique(3),
    aten.unique_consecutive.default: _unique(3),
    aten.unique_dim.default: _unique(3),
    aten.isnan.default: _never,
    aten.isinf.default: _never,
    aten.eq.Tensor: _comparison(1.0),
    aten.ne.Tensor: _comparison(0.0),
    aten.eq.Scalar: _comparison(1.0),
    aten.ne.Scalar: _comparison(0.0),
    aten.topk.default: _chosen(1),
    aten.sort.default: _chosen(1),
    aten.sort.stable: _chosen(1),
    aten.argsort.default: _chosen(None),
    aten.max.dim: _chosen(1),
    aten.argmax.default: _chosen(None, None),
    aten.multinomial.default: _chosen(None),
    aten.any.dim: _any_along,
    aten.any.default: _of_densities(lambda share: float(share > 0)),
    aten.all.default: _of_densities(lambda share: float(share >= 1)),
    aten.logical_not.default: _of_densities(lambda share: 1 - share),
    aten.bitwise_not.default: _of_densities(lambda share: 1 - share),
    aten.mul.Tensor: _of_densities(lambda *shares: math.prod(shares)),
    aten.logical_or.default: _of_densities(lambda *shares: max(shares)),
    aten.bitwise_or.Tensor: _of_densities(lambda *shares: max(shares)),
    aten.scatter.value: _one_hot_scatter,
    aten.scatter_.value: _one_hot_scatter,
}

# Of libraries that register operations when they are imported, which may never happen: by name.
UNKNOWN_VALUES_BY_NAME: dict[str, Replacement] = {"torchvision::nms": _nms}
