"""cuDNN's workspaces by the rules, against those recorded on an H200 with torch 2.11."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.forecasting.events import ConvCall, ReductionCall
from brim.forecasting.workspaces import convolution_workspaces, describe_reduction, reduction_buffer
from tests.forecasting.synthetic_traces import convolution


def call(input: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, **changes: Any) -> ConvCall:
    """A convolution that keeps the size of its images but for the stride."""
    output = (input[0], weight[0], *(-(-side // stride) for side in input[2:]))
    strides = (stride,) * len(input[2:])
    return convolution(1, 0, **{"input": input, "weight": weight, "output": output, "stride": strides, **changes})


def workspace(asked: ConvCall, *, trains: bool = False) -> int:
    return convolution_workspaces(asked, trains=trains)[-1]


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        # Input, output and weight with channels last; three colours are padded to eight channels.
        (call((128, 3, 224, 224), (64, 3, 7, 7), 2), 308_331_536),
        (call((128, 64, 56, 56), (64, 64, 3, 3)), 102_834_323),
        (call((128, 256, 28, 28), (256, 256, 3, 3), 2), 65_405_075),
        (call((8, 64, 16, 56, 56), (64, 64, 3, 3, 3)), 102_981_648),
        # 1 × 1: none where rows of pixels are aligned, copies of input and output where they are not or with a stride.
        (call((128, 64, 56, 56), (256, 64, 1, 1)), 0),
        (call((128, 512, 7, 7), (2048, 512, 1, 1)), 32_112_787),
        (call((128, 256, 56, 56), (512, 256, 1, 1), 2), 308_281_491),
        (call((16, 1024, 1, 1), (64, 1024, 1, 1)), 0),
        (call((256, 32, 112, 112), (72, 32, 1, 1), 2), 0),  # few channels, no copies
        # First layers that read the input as it is.
        (call((64, 3, 224, 224), (32, 3, 3, 3), 2), 0),
        (call((8, 3, 16, 112, 112), (64, 3, 3, 7, 7), 2), 0),
        # Groups all at once, each padded to a power of two channels; eight at a time as they are where that is 64, and
        # where a tile holds all channels.
        (call((32, 896, 28, 28), (896, 56, 3, 3), 2, groups=16), 28_550_272),
        (call((256, 216, 56, 56), (216, 24, 3, 3), 2, groups=9), 578_193_555),
        (call((64, 720, 28, 28), (720, 120, 3, 3), 2, groups=6), 98_107_539),
        (call((64, 1920, 14, 14), (1920, 120, 3, 3), 2, groups=16), 68_944_019),
        (call((256, 72, 112, 112), (72, 24, 3, 3), 2, groups=3), 578_058_672),
        (call((32, 512, 28, 28), (512, 16, 3, 3), 2, groups=32), 32_260_112),
        # In float32 also of small images, padded to the next one.
        (call((32, 432, 28, 28), (432, 48, 3, 3), 2, groups=9, dtype="float32"), 48_832_640),
        (call((32, 1008, 14, 14), (1008, 48, 3, 3), 2, groups=21, dtype="float32"), 45_244_563),
        (call((64, 240, 28, 28), (240, 1, 5, 5), groups=240), 0),
    ],
)
def test_a_forward_workspace_is_as_recorded(asked: ConvCall, recorded: int) -> None:
    assert workspace(asked) == pytest.approx(recorded, abs=512)


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        # Copies, and sums in parts: 13 of 64 × 64 channels and 9 taps, 4 of 27 taps.
        (call((32, 64, 56, 56), (64, 64, 3, 3)), 27_681_447),
        (call((8, 64, 16, 56, 56), (64, 64, 3, 3, 3)), 104_751_603),
        (call((8, 64, 16, 56, 56), (128, 64, 3, 3, 3), 2), 68_207_091),
        (call((8, 512, 2, 7, 7), (512, 512, 3, 3, 3)), 15_761_555),  # a large weight is summed at once
        # 1 × 1: a float32 product for each sample.
        (call((32, 128, 56, 56), (128, 128, 1, 1)), 32 * 4 * 128 * 128),
        (call((64, 320, 7, 7), (1280, 320, 1, 1)), 64 * 4 * 1280 * 320),
        (call((32, 1024, 14, 14), (256, 1024, 1, 1)), 16_056_336),
        (call((128, 464, 7, 7), (1024, 464, 1, 1)), 18_665_488),  # with so many channels copies are fewer
        (call((16, 1024, 14, 14), (1024, 1024, 1, 1), dtype="float32"), 16 * 4 * 1024 * 1024),
        # Groups, padded to a power of two channels; of few channels as they are.
        (call((32, 2016, 14, 14), (2016, 56, 3, 3), 2, groups=36), 38_781_075),
        (call((32, 192, 56, 56), (192, 48, 3, 3), 2, groups=4, dtype="float32"), 129_040_400),
        (call((32, 512, 14, 14), (512, 16, 3, 3), groups=32), 12_992_528),
        (call((32, 128, 56, 56), (128, 4, 3, 3), groups=32), 0),
    ],
)
def test_the_workspace_of_a_weights_gradient_is_as_recorded(asked: ConvCall, recorded: int) -> None:
    assert workspace(dataclasses.replace(asked, direction="wgrad")) == pytest.approx(recorded, rel=0.001)


def test_the_gradient_of_an_input_takes_what_the_forward_takes() -> None:
    asked = call((32, 64, 56, 56), (64, 64, 3, 3))
    assert workspace(dataclasses.replace(asked, direction="dgrad")) == workspace(asked)


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        (call((32, 896, 14, 14), (896, 56, 3, 3), groups=16), 26_869_907),
        (call((32, 896, 28, 28), (896, 56, 3, 3), 2, groups=16), 28_550_272),
        (call((32, 1008, 7, 7), (1008, 48, 3, 3), groups=21, dtype="float32"), 19_955_859),
    ],
)
def test_the_gradient_of_a_grouped_input_takes_all_groups_of_a_small_image(asked: ConvCall, recorded: int) -> None:
    assert workspace(dataclasses.replace(asked, direction="dgrad")) == pytest.approx(recorded, abs=512)


def test_groups_may_make_more_channels_than_they_read() -> None:
    asked = call((8, 96, 14, 14), (384, 24, 3, 3), groups=4, direction="wgrad")
    padded = call((8, 128, 14, 14), (512, 32, 3, 3), groups=4, direction="wgrad")
    assert workspace(asked) == workspace(padded)


def test_float32_pads_to_four_channels() -> None:
    wide = call((16, 66, 56, 56), (64, 66, 3, 3), dtype="float32")
    assert workspace(wide) == workspace(call((16, 68, 56, 56), (64, 68, 3, 3), dtype="float32"))


def test_channels_last_needs_no_copies_but_of_a_weight_in_the_other_format() -> None:
    asked = call((32, 96, 56, 56), (192, 96, 2, 2), 2, channels_last=True, copies_weight=True)
    assert convolution_workspaces(asked) == (2 * 192 * 96 * 4, 0)
    assert convolution_workspaces(dataclasses.replace(asked, copies_weight=False)) == (0,)


def test_workspace_of_depthwise_channels_last_weight_gradients() -> None:
    asked = call((32, 192, 28, 28), (192, 1, 7, 7), groups=192, channels_last=True, direction="wgrad")
    assert workspace(asked) == 9_633_792
    in_full = call(
        (16, 192, 28, 28), (192, 1, 7, 7), groups=192, channels_last=True, direction="wgrad", dtype="float32"
    )
    assert workspace(in_full) == pytest.approx(96_947_263, rel=0.01)


def test_unknown_workspaces_assume_more_reserved_memory() -> None:
    # float32 over video: with or without a copy of the output, as was recorded for one layer and another.
    asked = call((8, 64, 16, 56, 56), (144, 64, 1, 3, 3), dtype="float32")
    assert workspace(asked, trains=True) == pytest.approx(103_092_240, abs=512)
    assert workspace(asked) > workspace(asked, trains=True)
    # A kernel over time that keeps the number of channels copies its output in any case.
    over_time = call((4, 192, 8, 56, 56), (192, 192, 3, 1, 1), dtype="float32")
    assert workspace(over_time, trains=True) == workspace(over_time) == pytest.approx(154_583_187, abs=512)


@pytest.mark.parametrize("weight", [(64, 32, 3, 3), (64, 32, 1, 1), (64, 3, 7, 7), (64, 8, 3, 3)])
@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_a_workspace_grows_with_the_batch(weight: tuple[int, ...], direction: str) -> None:
    groups = 32 // weight[1] if weight[1] == 8 else 1
    sizes = [
        workspace(call((n, weight[1] * groups, 28, 28), weight, groups=groups, direction=direction))
        for n in (1, 2, 8, 64, 256)
    ]
    assert sizes == sorted(sizes)


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
