"""Batches that are put together on the device are those of the host."""

from __future__ import annotations

import pytest
import torch

from brim.memory.transfer import end_to_end, stacked

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("pinned", [False, True])
def test_parts_are_copied_to_their_places(pinned: bool) -> None:
    parts = [torch.randn(3, 5, 2) for _ in range(40)]
    held = [part.pin_memory() for part in parts] if pinned else parts
    assert torch.equal(stacked(held, CUDA).cpu(), torch.stack(parts))
    assert torch.equal(end_to_end(held, CUDA).cpu(), torch.cat(parts))
    uneven = [*held, torch.randn(1, 4, 3)]
    assert torch.equal(end_to_end(uneven, CUDA).cpu(), end_to_end([*parts, uneven[-1]]))


def test_nothing_but_the_batch_is_allocated() -> None:
    parts = [torch.randn(1 << 18).pin_memory() for _ in range(16)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = stacked(parts, CUDA)
    assert torch.cuda.max_memory_allocated() - before == whole.nbytes
