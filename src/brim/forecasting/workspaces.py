"""Workspaces of CUDA kernels: what cuDNN takes for a convolution, and torch for a reduction, as far as it is known.

cuDNN chooses among kernels by a cost model that is not public. What it then asks for is regular: the kernels for
tensor cores want channels last, so operands with channels first are copied, each padded to whole vectors of 16 bytes,
and a weight's gradient is summed up in parts. The rules here were read off 1,900 calls recorded on an H200 (torch 2.11,
cuDNN of CUDA 13.0, bfloat16 and float32 as TF32); where kernels differ for no visible reason the larger figure is taken
if it is near. Other cards are assumed to be alike.

Sums, means and their like run as one kernel over thread blocks. Where there are too few results to keep the card busy,
and many values for each, the values of a result are split over several blocks, which hand their parts over in memory.
How many blocks and how much memory follows from shapes, strides and the card: the arithmetic is that of torch's
Reduce.cuh (setReduceConfig, global_memory_size). All 2,736 buffers that it gives for the runs recorded on an H200 are
among their requests, to within the 512 bytes that torch rounds to.

Pure Python: no torch, no device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from brim.forecasting.events import DTYPE_BYTES, ConvCall, ReductionCall

__all__ = ["convolution_workspaces", "describe_reduction", "reduction_buffer"]

VECTOR_BYTES = 16  # channels are padded to whole vectors
DESCRIPTOR_BYTES = 147  # what comes on top of any workspace; 16 for some kernels
FEW_CHANNELS = 4  # up to here some kernels read the input as it is
SMALL_KERNEL = 16  # weights a channel: with few channels, up to here convolved without copies
SMALL_WEIGHT = 2**19  # elements
HALF_BLOCKS, TF32_BLOCKS = 120, 132  # that share the sums of a weight's gradient
LARGEST_TILE = 4 * 128 * 128  # bytes of sums that a thread block works on
VIDEO_PARTS = 10  # of the first layer over a video
NARROW = 32  # input channels: up to here a 1×1 kernel with a stride is made without copies
FEW_PIXELS = 128  # of an image
GROUPS_AT_ONCE = 8
TILE_CHANNELS = 128  # that a thread block works on
SMALL_SIDE = 28  # pixels; of smaller images all groups are convolved at once
SHORT_SUM = 8192  # pixels of a batch: shorter sums in half precision are not split
SLICES_SHARE, TF32_SLICES_SHARE = 1.13, 2.7  # parts for each sample are chosen over copies up to so often their bytes
UNALIGNED_SLICES_SHARE = 6  # of few pixels, or an odd number of them: up to so often the elements copied
DEPTHWISE_PARTS = 256  # parts of a depthwise weight's gradient with channels last
TRANSFORM_COPIES = 10  # of the input, where such a gradient in float32 is made by Fourier transforms
TRANSFORMED_SIDE = 28  # pixels; smaller images are not transformed


def convolution_workspaces(call: ConvCall, *, trains: bool = False) -> tuple[int, ...]:
    """The bytes of each request, all held while the convolution runs; the last is 0 where it needs no workspace.

    `trains`: whether a backward follows. Where the choice is not known, a forward that is followed by one is given
    the smaller workspace and any other the larger: both lead to more reserved memory.
    """
    copied = (_weight_bytes(call, padded=False),) if call.copies_weight and call.direction != "wgrad" else ()
    return *copied, _workspace(call, lean=trains and call.direction == "forward")


def _workspace(call: ConvCall, *, lean: bool) -> int:
    depthwise = call.groups > 1 and call.groups == call.input[1]
    if call.channels_last:
        return _channels_last(call, depthwise) if call.direction == "wgrad" else 0
    if depthwise:
        return 0  # a kernel of torch's own
    if call.groups > 1:
        return _grouped(call)
    if math.prod(call.weight[2:]) == 1:
        return _pointwise(call, lean=lean)
    lean = lean and call.dtype == "float32"
    if _reads_input_as_it_is(call, lean=lean):
        return 0
    copies = _copies(call, without_output=lean and _may_leave_out_output(call))
    return copies + _weight_bytes(call) + _summed_parts(call) + DESCRIPTOR_BYTES


def _channels_last(call: ConvCall, depthwise: bool) -> int:
    """Of a weight's gradient: partial sums, or for a depthwise one in float32 transforms of all that it is made of."""
    if not depthwise:
        return _summed_parts(call) if math.prod(call.weight) <= SMALL_WEIGHT else 0
    if call.dtype != "float32":
        return 4 * DEPTHWISE_PARTS * math.prod(call.weight)
    large = min(call.input[2:], default=0) >= TRANSFORMED_SIDE and min(call.weight[2:]) > 3
    return TRANSFORM_COPIES * 4 * math.prod(call.input) if large else 0


def _pointwise(call: ConvCall, *, lean: bool) -> int:
    """A 1×1 kernel is a matrix product, made without copies where rows of pixels are aligned."""
    pixels = math.prod(call.input[2:])
    without_output = lean and call.dtype == "float32" and len(call.weight) == 5
    copies = _copies(call, without_output=without_output) + DESCRIPTOR_BYTES
    if max(call.stride, default=1) > 1:
        half_forward = call.direction == "forward" and call.dtype != "float32"
        as_it_is = call.weight[1] <= NARROW and (lean or half_forward)
        return 0 if as_it_is else copies + _summed_parts(call)
    if call.direction != "wgrad":
        return copies if pixels > 1 and pixels % 2 else 0
    if pixels == 1:
        return 0
    slices = 4 * call.input[0] * math.prod(call.weight)  # a float32 product for each sample, then their sum
    if pixels % 2 or pixels < FEW_PIXELS:
        share = UNALIGNED_SLICES_SHARE * 4 / _element(call)
        return max(slices, copies) if slices <= share * copies else copies
    share = TF32_SLICES_SHARE if call.dtype == "float32" else SLICES_SHARE
    return slices if slices <= share * copies else copies


def _grouped(call: ConvCall) -> int:
    """Copies of all groups, each padded to a power of two channels, or of so many groups at a time as they are.

    A forward in half precision takes the second where a group is padded to half a tile, and where one tile holds all
    channels as they are.
    """
    out, into = call.weight[0] // call.groups, call.weight[1]
    if call.direction == "wgrad" and into <= FEW_CHANNELS:
        return 0
    whole_out, whole_into = _next_power_of_two(out), _next_power_of_two(into)
    whole = (whole_out, whole_into) == (out, into)
    if call.direction == "forward" and call.dtype != "float32":
        all_at_once = whole_into != TILE_CHANNELS // 2 and call.weight[0] > TILE_CHANNELS
    else:
        all_at_once = call.direction == "wgrad" or min(call.input[2:]) < SMALL_SIDE
    if not (whole or all_at_once):
        share = min(call.groups, GROUPS_AT_ONCE)
        return (_copies(call) + _weight_bytes(call)) * share // call.groups + DESCRIPTOR_BYTES
    pixels_in, pixels_out = (shape[0] * math.prod(shape[2:]) for shape in (call.input, call.output))
    weight = whole_out * whole_into * math.prod(call.weight[2:])
    elements = call.groups * (pixels_in * whole_into + pixels_out * whole_out + weight)
    return _element(call) * elements + DESCRIPTOR_BYTES


def _reads_input_as_it_is(call: ConvCall, *, lean: bool) -> bool:
    """A first layer over colours: a small kernel, or forward one over time as well; in float32 also its gradient."""
    if call.input[1] > FEW_CHANNELS or call.direction == "dgrad":
        return False
    small = math.prod(call.weight[2:]) <= SMALL_KERNEL
    if call.direction == "wgrad":
        return small and call.dtype == "float32"
    patches = lean and call.stride == call.weight[2:]
    return small or patches or (len(call.weight) == 5 and call.weight[2] > 1)


def _may_leave_out_output(call: ConvCall) -> bool:
    """Over a video, with whole vectors of channels; a kernel over time alone that keeps their number never does."""
    out, into, *kernel = call.weight
    keeps = out == into and math.prod(kernel) == kernel[0]
    return len(kernel) == 3 and not (out % 4 or into % 4 or keeps)


def _copies(call: ConvCall, *, without_output: bool = False) -> int:
    """Input and output with channels last."""
    shapes = (call.input,) if without_output else (call.input, call.output)
    return sum(_element(call) * shape[0] * _padded(shape[1], call) * math.prod(shape[2:]) for shape in shapes)


def _weight_bytes(call: ConvCall, *, padded: bool = True) -> int:
    out, into, *kernel = call.weight
    return _element(call) * out * (_padded(into, call) if padded else into) * math.prod(kernel)


def _summed_parts(call: ConvCall) -> int:
    """Partial sums of a weight's gradient, in float32: as many as keep the card's thread blocks busy."""
    if call.direction != "wgrad":
        return 0
    if call.weight[1] <= FEW_CHANNELS:
        return _parts_over_colours(call)
    tiles, tile_bytes = _tiles(call)
    if _element(call) >= 4:
        parts = TF32_BLOCKS // tiles
        return parts * tiles * tile_bytes if parts > 1 else TF32_BLOCKS * tile_bytes  # or tiles shared at their edges
    if math.prod(call.weight) > SMALL_WEIGHT or call.output[0] * math.prod(call.output[2:]) < SHORT_SUM:
        return 0
    parts = HALF_BLOCKS // tiles
    if tile_bytes == LARGEST_TILE and not _is_flat(call):
        parts = max(parts // 3, 2)
    return parts * tiles * tile_bytes if parts > 1 else 0


def _tiles(call: ConvCall) -> tuple[int, int]:
    """How many tiles a weight's gradient has, and their bytes: 128 output and input channels, or 64 of no more."""
    out, into, *kernel = call.weight
    height, width = (64 if channels <= 64 else 128 for channels in (out, into))
    if _is_flat(call):
        width = height
    return -(-out // height) * -(-into // width) * math.prod(kernel), 4 * height * width


def _is_flat(call: ConvCall) -> bool:
    """Whether a kernel of a video covers one frame at a time."""
    return len(call.weight) == 5 and call.weight[2] == 1 and math.prod(call.weight[2:]) > 1


def _parts_over_colours(call: ConvCall) -> int:
    out, into, *kernel = call.weight
    weights = _padded(into, call) * math.prod(kernel)  # of one output channel
    if call.dtype == "float32" and out * weights > SMALL_WEIGHT:
        return 0
    parts = VIDEO_PARTS if len(kernel) == 3 else max(HALF_BLOCKS // (-(-out // 128) * -(-weights // 256)), 1)
    return 4 * parts * out * weights


def _next_power_of_two(channels: int) -> int:
    """The next one from here on."""
    return 1 << (channels - 1).bit_length()


def _padded(channels: int, call: ConvCall) -> int:
    vector = VECTOR_BYTES // _element(call)
    return -(-channels // vector) * vector


def _element(call: ConvCall) -> int:
    return DTYPE_BYTES.get(call.dtype, 2)


MOST_THREADS = 512  # of a block
WARP = 32
LEAST_VALUES, MOST_VALUES = 16, 256  # for each thread
VECTOR = 4  # elements read at once


def describe_reduction(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Collection[int],
    *,
    accumulator_bytes: int,
    offset: int = 0,
    event: int = 0,
) -> ReductionCall | None:
    """A reduction of some dimensions of a tensor as the kernel sees it; None of a tensor without elements.

    Dimensions are put in the order of memory, reduced ones first, and those that lie next to each other become one.
    """
    if math.prod(shape) == 0:
        return None
    ours = sorted((strides[axis], shape[axis]) for axis in reduced)
    kept = [(strides[axis], shape[axis]) for axis in reversed(range(len(shape))) if axis not in reduced]
    ours, kept = _joined(ours), _joined(kept)
    outputs = math.prod(size for _, size in kept)
    inputs = math.prod(size for _, size in ours)
    along = not kept or not ours or ours[0][0] < kept[0][0]  # whether the reduced dimension moves fastest
    vector = 1
    if not along and kept[0][0] == 1:
        vector = _vector(offset, kept[0][1], [stride for stride, _ in (*ours, *kept[1:])])
    return ReductionCall(
        outputs=outputs,
        inputs=inputs,
        along_memory=along,
        reads_vectors=along and len(ours) == 1 and ours[0][0] == 1 and inputs >= 128,
        output_vector=vector,
        accumulator_bytes=accumulator_bytes,
        event=event,
    )


def reduction_buffer(call: ReductionCall, *, multiprocessors: int, threads_per_multiprocessor: int) -> int:
    """The bytes of the buffer, 0 where no result is shared; the few bytes of semaphores beside it are left out."""
    across, down = (call.inputs, call.outputs) if call.along_memory else (call.outputs, call.inputs)
    across //= (VECTOR if call.reads_vectors else 1) * call.output_vector
    width, height = _block(across, down, MOST_THREADS // call.output_vector)
    values = -(-call.inputs // width) if call.along_memory else call.inputs
    if values < min(height * LEAST_VALUES, MOST_VALUES):
        return 0  # each warp has a result of its own
    values = -(-call.inputs // ((width if call.along_memory else 1) * height))
    blocks = -(-(call.outputs // call.output_vector) // (1 if call.along_memory else width))
    wanted = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < MOST_VALUES or blocks > wanted:
        return 0
    sharing = max(min(-(-wanted // blocks), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if sharing <= 1:
        return 0
    return call.accumulator_bytes * call.outputs * sharing * (1 if call.along_memory else width * call.output_vector)


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Width and height of a thread block, powers of two."""
    widest, highest = (_power_of_two(side) if side < most else most for side in (across, down))
    height = min(highest, most // min(widest, WARP))
    return min(widest, most // height), height


def _power_of_two(count: int) -> int:
    """The largest one that is not larger; 1 at least."""
    return 1 << max(count.bit_length() - 1, 0)


def _joined(dimensions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes without dimensions of length one, neighbours in memory made one."""
    joined: list[tuple[int, int]] = []
    for stride, size in dimensions:
        if size == 1:
            continue
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0], joined[-1][1] * size)
        else:
            joined.append((stride, size))
    return joined


def _vector(offset: int, size: int, strides: Sequence[int]) -> int:
    vector = VECTOR
    for count in (offset, size, *strides):
        while count % vector:
            vector //= 2
    return vector
