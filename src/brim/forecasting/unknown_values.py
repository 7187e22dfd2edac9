"""What a trace answers when a step reads a value that only a real run would know.

A logged loss is harmless, a branch on it rarely matters, and how many tokens a router sends to an expert does. Numbers
are taken as one, truths as false, a mask as full unless it is known to be one of several; whatever may change the
memory is noted as a guess, and the trace is marked approximate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from brim.forecasting.ghost import Ghost
from brim.forecasting.real_values import is_unknown, run_for_real
from brim.forecasting.untraceable import UntraceableError

if TYPE_CHECKING:
    from brim.forecasting.tracer import Replacement, Tracer

__all__ = ["UNKNOWN_VALUES", "UNKNOWN_VALUES_BY_NAME"]

aten = torch.ops.aten


def _item(tracer: Tracer, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """A number read from an activation: a loss to log, most often."""
    tensor: torch.Tensor = args[0]
    if not is_unknown(tensor):
        return NotImplemented
    assert isinstance(tensor, Ghost)
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
        if isinstance(tensor, Ghost) and tensor.density is not None:
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
        tracer.facts.guesses.setdefault("the step looks for distinct values; all are taken as distinct")
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
    if isinstance(result, Ghost) and isinstance(indices, torch.Tensor):
        result.density = indices.numel() / max(result.numel(), 1)
    return result


def _comparison(same: float) -> Replacement:
    """Is anything not a number, or infinite? In a step that works, nothing is. Which of several is it? One of them."""

    def replace(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left, right = args[:2]
        result = tracer.run(func, args, kwargs)
        if not isinstance(result, Ghost):
            return result
        if left is right:
            result.density = same
        elif isinstance(right, float) and math.isinf(right):
            result.density = 1 - same
        elif isinstance(right, torch.Tensor) and right.dim() == 1 and right.numel() and left.shape[-1:] == (1,):
            result.density = abs(1 - same - 1 / right.numel())  # a choice, compared with all that there are
        return result

    return replace


def _never(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`isnan` and `isinf`."""
    result = tracer.run(func, args, kwargs)
    if isinstance(result, Ghost):
        result.density = 0.0
    return result


def _of_densities(combine: Callable[..., float]) -> Replacement:
    """A truth about masks whose shares are known."""

    def replace(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = [argument for argument in args if isinstance(argument, Ghost)]
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
