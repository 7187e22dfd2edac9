"""Scratch inside CUDA kernels, which no result shows, and facts about kernels for those who add their workspaces.

What is here was read in torch's CUDA sources: a kernel that first makes its operands contiguous, a backward that first
multiplies gradient and output, indices that are sorted. The workspaces of cuBLAS and cuDNN are not: they depend on the
card, and only the calls that would ask for them are noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from brim.forecasting.events import ConvCall
from brim.forecasting.shapes import convolution_format
from brim.forecasting.tracer import Scratch, Tracer, Witness
from brim.forecasting.workspaces import describe_reduction

__all__ = ["SCRATCH", "WITNESSES"]

aten = torch.ops.aten


def _convolution_scratch(args: tuple[Any, ...]) -> list[int]:
    """cuDNN wants its operands in one memory format: what is not is copied first, the weight only after the result."""
    operands = [operand for operand in args[:3] if isinstance(operand, torch.Tensor) and operand.dim() > 2]
    wanted = convolution_format(*operands[-2:])
    return [_bytes(operand) for operand in operands[:-1] if not operand.is_contiguous(memory_format=wanted)]


def _contiguous_scratch(args: tuple[Any, ...]) -> list[int]:
    """A kernel that works on contiguous memory: the first operands are copied where they are not."""
    operands = [operand for operand in args[:2] if isinstance(operand, torch.Tensor)]
    return [_bytes(operand) for operand in operands if not operand.is_contiguous()]


def _norm_backward_scratch(args: tuple[Any, ...]) -> list[int]:
    """As `_contiguous_scratch` for the input; the gradient is copied only when the results are there."""
    return [] if args[1].is_contiguous() else [_bytes(args[1])]


def _softmax_backward_scratch(args: tuple[Any, ...]) -> list[int]:
    """The product of gradient and output is made first, in full."""
    gradient, output = args[:2]
    product = output.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize
    return [int(product), *_contiguous_scratch(args)]


def _product_scratch(args: tuple[Any, ...]) -> list[int]:
    """cuBLAS reads matrices with one dense dimension, rows or columns; any other operand is copied first."""
    operands = [operand for operand in args if isinstance(operand, torch.Tensor) and operand.dim() >= 2]
    return [_bytes(operand) for operand in operands[-2:] if not _is_matrix(operand)]


def _embedding_backward_scratch(args: tuple[Any, ...]) -> list[int]:
    """Indices are sorted: keys and values, in and out. Up to 3,072 are not, but count as well: sizes stay alike."""
    return [8 * int(args[1].numel())] * 4


def _index_put_scratch(args: tuple[Any, ...]) -> list[int]:
    """Accumulating at indices sorts them first: one linear index per value written, keys and values, in and out.

    The values are made contiguous meanwhile, and the sort has a copy of both to work in.
    """
    if len(args) < 4 or not args[3]:
        return []
    indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices))) if indices else 0
    values = [] if args[2].is_contiguous() else [_bytes(args[2])]
    return [8 * count, *values, *[8 * count] * 3, 16 * count + 39_423]


def _safe_softmax_scratch(args: tuple[Any, ...]) -> list[int]:
    """The plain softmax before rows without any key are zeroed, and where those are."""
    return [_bytes(args[0]), int(args[0].numel())]


def _roll_scratch(args: tuple[Any, ...]) -> list[int]:
    """One dimension after the other, each into memory of its own."""
    shifts = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
    return [_bytes(args[0])] * max(len(shifts) - 1, 0)


def _sort_scratch(args: tuple[Any, ...]) -> list[int]:
    """A second copy of keys and positions, to sort between."""
    return [_bytes(args[0]), 8 * int(args[0].numel())]


SCRATCH: dict[Any, Scratch] = {
    aten.convolution.default: _convolution_scratch,
    aten.convolution_backward.default: _convolution_scratch,
    aten.embedding_dense_backward.default: _embedding_backward_scratch,
    aten.index_put.default: _index_put_scratch,
    aten.index_put_.default: _index_put_scratch,
    aten._index_put_impl_.default: _index_put_scratch,
    aten._safe_softmax.default: _safe_softmax_scratch,
    aten._softmax_backward_data.default: _softmax_backward_scratch,
    aten._softmax.default: _contiguous_scratch,
    aten._log_softmax.default: _contiguous_scratch,
    aten._log_softmax_backward_data.default: _contiguous_scratch,
    aten.native_layer_norm.default: _contiguous_scratch,
    aten.native_layer_norm_backward.default: _norm_backward_scratch,
    aten.native_group_norm.default: _contiguous_scratch,
    aten.native_group_norm_backward.default: _contiguous_scratch,
    aten.mm.default: _product_scratch,
    aten.bmm.default: _product_scratch,
    aten.addmm.default: _product_scratch,
    aten.baddbmm.default: _product_scratch,
    aten.roll.default: _roll_scratch,
    aten.sort.default: _sort_scratch,
    aten.sort.stable: _sort_scratch,
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_matrix(tensor: torch.Tensor) -> bool:
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    return by_row or by_column or 1 in (rows, columns)


def _saw_product(tracer: Tracer, args: tuple[Any, ...], _: dict[str, Any], __: list[torch.Tensor]) -> None:
    del args
    if tracer.in_backward:
        tracer.facts.backward_gemm_calls += 1
    else:
        tracer.facts.gemm_calls += 1


def _saw_addmm(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any], _: list[torch.Tensor]) -> None:
    """A bias vector is added in the epilogue of a cuBLASLt product, a full matrix by cuBLAS."""
    bias, right = args[0], args[2]
    scaled = kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1
    if bias.dim() == 1 and not scaled and right.shape[0] > 1 and right.shape[1] > 1:
        tracer.facts.lt_calls += 1
    else:
        _saw_product(tracer, args, kwargs, [])


def _saw_convolution(tracer: Tracer, args: tuple[Any, ...], _: dict[str, Any], results: list[torch.Tensor]) -> None:
    input, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    _note(tracer, "forward", input, weight, results[0], stride, padding, dilation, transposed, groups)


def _saw_convolution_backward(
    tracer: Tracer, args: tuple[Any, ...], _: dict[str, Any], results: list[torch.Tensor]
) -> None:
    """Two convolutions, each with its own result: the input's gradient, then the weight's."""
    output, input, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args[:11]
    later = [result for result in results if result.numel()]  # results from this one on: they were taken in order
    for direction, is_wanted in (("dgrad", wanted[0]), ("wgrad", wanted[1])):
        if is_wanted:
            later = later[1:]
            _note(tracer, direction, input, weight, output, stride, padding, dilation, transposed, groups, later)  # type: ignore[arg-type]
    if wanted[2]:
        _note_reduction(tracer, output, [axis for axis in range(output.dim()) if axis != 1])


def _note(
    tracer: Tracer,
    direction: Literal["forward", "dgrad", "wgrad"],
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    groups: int,
    later: Sequence[torch.Tensor] = (),
) -> None:
    wanted = convolution_format(input, weight)
    tracer.facts.convolutions.append(
        ConvCall(
            direction=direction,
            input=tuple(input.shape),
            weight=tuple(weight.shape),
            output=tuple(output.shape),
            dtype=str(input.dtype).removeprefix("torch."),
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
            transposed=transposed,
            channels_last=wanted is not torch.contiguous_format,
            event=tracer.ledger.position() - 1 - len(later),
            copies_weight=not weight.is_contiguous(memory_format=wanted),
        )
    )


def _saw_norm_backward(tracer: Tracer, args: tuple[Any, ...], _: dict[str, Any], __: list[torch.Tensor]) -> None:
    if not args[0].is_contiguous():
        tracer.ledger.take(_bytes(args[0]), "aten.native_layer_norm_backward scratch")  # given back at once


def _saw_reduction(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any], _: list[torch.Tensor]) -> None:
    """One of its arguments, if any, names the dimensions."""
    asked = kwargs.get("dim", args[1] if len(args) > 1 else None)
    axes = [asked] if isinstance(asked, int) else asked
    _note_reduction(tracer, args[0], list(axes) if axes else range(args[0].dim()))


def _note_reduction(tracer: Tracer, input: torch.Tensor, axes: Iterable[int]) -> None:
    call = describe_reduction(
        input.shape,
        input.stride(),
        {axis % max(input.dim(), 1) for axis in axes},
        accumulator_bytes=max(input.element_size(), 4),  # half precision is summed in float32
        offset=int(input.storage_offset()),
        event=tracer.ledger.position() - 1,
    )
    if call is not None:
        tracer.facts.reductions.append(call)


WITNESSES: dict[Any, Witness] = {
    aten.sum.default: _saw_reduction,
    aten.sum.dim_IntList: _saw_reduction,
    aten.mean.default: _saw_reduction,
    aten.mean.dim: _saw_reduction,
    aten.native_layer_norm_backward.default: _saw_norm_backward,
    aten.mm.default: _saw_product,
    aten.bmm.default: _saw_product,
    aten.baddbmm.default: _saw_product,
    aten.addmm.default: _saw_addmm,
    aten._addmm_activation.default: _saw_addmm,
    aten.convolution.default: _saw_convolution,
    aten.convolution_backward.default: _saw_convolution_backward,
}
