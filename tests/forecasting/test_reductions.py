"""Buffers of reductions that several thread blocks share, against those recorded on an H200."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.forecasting.events import ReductionCall
from brim.forecasting.reductions import describe_reduction, reduction_buffer

H200 = {"multiprocessors": 132, "threads_per_multiprocessor": 2048}
LAPTOP = {"multiprocessors": 24, "threads_per_multiprocessor": 1536}


def described(shape: tuple[int, ...], *reduced: int, accumulator_bytes: int = 4) -> ReductionCall:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    call = describe_reduction(shape, strides, set(reduced), accumulator_bytes=accumulator_bytes)
    assert call is not None
    return call


@pytest.mark.parametrize(
    ("shape", "reduced", "buffer"),
    [
        # Four outputs a thread, 32 threads in a row: 4 bytes × outputs × 32 × 4 × blocks that share an output.
        ((2048, 2048), (0,), 4 * 2048 * 32 * 4 * 32),  # 33,554,432
        ((3136, 384), (0,), 9_633_792),
        ((3136, 1536), (0,), 38_535_168),
        ((32 * 197, 768), (0,), 38_928_384),  # ViT-B/16: gradients of the biases, 32 images
        ((32 * 197, 3072), (0,), 138_412_032),
        ((32 * 197, 2304), (0,), 116_785_152),
        ((64, 512), (0,), 0),  # too few values
        ((4096, 64), (1,), 0),  # a warp for each output
    ],
)
def test_a_buffer_is_that_of_torchs_kernel(shape: tuple[int, ...], reduced: tuple[int, ...], buffer: int) -> None:
    assert reduction_buffer(described(shape, *reduced), **H200) == buffer


def test_a_mean_over_everything_is_shared_by_blocks_along_memory() -> None:
    # 2048 × 2048 values, read four at a time by 512 threads: 2048 values a thread, shared by 132 × 4 / 1 = 528 blocks,
    # but by no more than leaves 16 values to each: 2048 × 2048 / 512 / 16 = 512.
    assert reduction_buffer(described((2048, 2048), 0, 1), **H200) == 4 * 512


def test_dimensions_that_lie_next_to_each_other_are_one() -> None:
    together = described((32, 197, 768), 0, 1)
    assert together == described((32 * 197, 768), 0)
    assert described((8, 1, 64), 0, 1) == described((8, 64), 0)


def test_the_gradient_of_a_convolutions_bias_reduces_around_its_channels() -> None:
    call = described((8, 64, 56, 56), 0, 2, 3)
    assert (call.outputs, call.inputs, call.along_memory, call.reads_vectors) == (64, 8 * 56 * 56, True, False)


def test_odd_sizes_are_not_read_in_vectors() -> None:
    assert [described((512, width), 0).output_vector for width in (64, 66, 67)] == [4, 2, 1]


def test_a_smaller_card_shares_less() -> None:
    call = described((65536, 256), 0)
    assert 0 < reduction_buffer(call, **LAPTOP) < reduction_buffer(call, **H200)


def test_nothing_is_reduced_of_nothing() -> None:
    assert describe_reduction((0, 5), (5, 1), {0}, accumulator_bytes=4) is None


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_any_reduction_has_a_buffer_of_whole_accumulators(shape: list[int], data: st.DataObject) -> None:
    reduced = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    call = described(tuple(shape), *reduced)
    buffer = reduction_buffer(call, **H200)
    assert buffer >= 0
    assert buffer % (4 * call.outputs) == 0
    assert call.outputs * call.inputs == math.prod(shape)
