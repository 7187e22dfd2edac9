"""Shapes that are concluded without torch: to the stride and the byte what its meta kernels give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from brim.forecasting.shapes import _plain_results, specify, tensors_in

aten = torch.ops.aten
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROWS = ((7,), (1,), (4, 1, 8), (1, 1, 3), (2, 3, 1), (3, 1, 1, 5))
IMAGES = ((4, 6), (1, 6, 9), (4, 1, 8, 3), (2, 3, 1, 4, 5))


def empty(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def elementwise(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    one, other = empty(shape, dtype), empty(shape, dtype)
    for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        yield func, one, other
        yield func, one, 2.5
    for func in (aten.gelu_backward.default, aten.sigmoid_backward.default):
        yield func, one, other
    yield aten.gelu.default, one
    yield aten.relu.default, one
    yield aten.threshold_backward.default, one, other, 0
    yield aten._softmax_backward_data.default, one, other, -1, dtype
    yield aten._foreach_sqrt.default, [one, other]


def layer_norms(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for count, of_weights in itertools.product(range(1, len(shape) + 1), {dtype, torch.float32}):
        input, normalized = empty(shape, dtype), list(shape[-count:])
        weight, bias = empty(normalized, of_weights), empty(normalized, of_weights)
        statistics = empty((*shape[:-count], *[1] * count), wide)
        yield aten.native_layer_norm.default, input, normalized, weight, bias, 1e-5
        yield aten.native_layer_norm.default, input, normalized, None, None, 1e-5
        backward = (empty(shape, dtype), input, normalized, statistics, statistics, weight, bias, [True] * 3)
        if of_weights is dtype:
            yield aten.native_layer_norm_backward.default, *backward


def batch_norms(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for of_weights in {dtype, torch.float32}:
        input, weight, statistics = empty(shape, dtype), empty(shape[1:2], of_weights), empty(shape[1:2], wide)
        yield aten.native_batch_norm.default, input, weight, weight, weight, weight, True, 0.1, 1e-5
        yield (
            aten.native_batch_norm_backward.default, empty(shape, dtype), input, weight, weight, weight, statistics,
            statistics, True, 1e-5, [True] * 3,
        )  # fmt: skip


def products(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield aten.addmm.default, empty([5], dtype), empty([4, 6], dtype), empty([6, 5], dtype)
    yield aten.addmm.default, empty([5], dtype), empty([4, 6], dtype), empty([5, 6], dtype).t()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_result_is_what_torch_gives(dtype: torch.dtype) -> None:
    calls = [call for shape in ROWS for made in (elementwise, layer_norms) for call in made(shape, dtype)]
    calls += [call for shape in IMAGES for call in batch_norms(shape, dtype)]
    for func, *args in (*calls, *products(dtype)):
        tensors = tensors_in(args, {})
        plain = _plain_results(func, tuple(args), tensors)
        assert plain == specify(func(*args)), (func, [tuple(one.shape) for one in tensors])


SQUARE, HALF = empty([4, 4]), empty([4, 4], torch.float16)
ROW, COLUMNS = empty([1, 4]), empty([4])


@pytest.mark.parametrize(
    "call",
    [
        (aten.add.Tensor, SQUARE, ROW),  # of two shapes
        (aten.add.Tensor, SQUARE, HALF),  # of two dtypes
        (aten.mul.Tensor, SQUARE, 2j),
        (aten.div.Tensor, SQUARE.int(), SQUARE.int()),  # whole numbers divided are no whole numbers
        (aten.gelu.default, SQUARE.t()),
        (aten.gelu.default, empty([0, 4])),
        (aten._softmax_backward_data.default, SQUARE, SQUARE, -1, torch.float16),
        (aten.addmm.default, COLUMNS, ROW, SQUARE),  # one row: its strides are another matter
        (aten.addmm.default, ROW, SQUARE, SQUARE),
        (aten.addmm.default, COLUMNS, SQUARE, empty([5, 4])),  # rows and columns that do not match
        (aten.addmm.default, COLUMNS, COLUMNS, SQUARE),
        (aten.native_layer_norm.default, SQUARE, [3], None, None, 1e-5),
        (aten.native_layer_norm.default, SQUARE, [4], empty([3]), empty([3]), 1e-5),
        (aten.native_layer_norm.default, empty([]), [], empty([]), empty([]), 1e-5),
        (aten.native_layer_norm_backward.default, SQUARE, SQUARE, [4], *[empty([4, 1])] * 2, None, None, [True] * 3),
        (aten.native_layer_norm_backward.default, HALF, HALF, [4], *[empty([4, 1])] * 2, COLUMNS, COLUMNS, [True] * 3),
        (aten.native_layer_norm.default, SQUARE.t(), [4], None, None, 1e-5),
        (aten.native_batch_norm.default, ROW, *[COLUMNS] * 4, True, 0.1, 1e-5),  # one value for each channel
        (aten.native_batch_norm.default, SQUARE, *[COLUMNS] * 4, False, 0.1, 1e-5),
        (aten.mm.default, SQUARE, SQUARE),
    ],
)
def test_torch_is_asked_for_anything_else(call: tuple[Any, ...]) -> None:
    func, *args = call
    assert _plain_results(func, tuple(args), tensors_in(args, {})) is None
