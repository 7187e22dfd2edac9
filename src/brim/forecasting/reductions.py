"""The buffer that torch's reduction kernel takes where several thread blocks share one result.

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

from brim.forecasting.events import ReductionCall

__all__ = ["describe_reduction", "reduction_buffer"]

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
