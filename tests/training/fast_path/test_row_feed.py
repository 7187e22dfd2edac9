"""Rows in passes that fit."""

from __future__ import annotations

import pytest
import torch

from brim.memory.devices import memory_of
from brim.training.fast_path.row_feed import InPasses


def test_rows_come_back_in_order_whatever_the_passes() -> None:
    rows = torch.arange(10.0)[:, None]
    passes = InPasses(memory_of("cpu"), batch_size=4)
    assert torch.equal(passes(lambda part: part[:, 0] * 2, rows), torch.arange(10.0) * 2)
    assert passes.largest == 4


def test_a_pass_that_does_not_fit_is_halved_and_nothing_is_lost() -> None:
    def tight(part: torch.Tensor) -> torch.Tensor:
        if len(part) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return part[None]

    passes = InPasses(memory_of("cpu"), batch_size=8, dim=1)
    rows = torch.arange(11.0)
    assert torch.equal(passes(tight, rows)[0], rows)
    assert (passes.batch_size, passes.largest, passes.oom_events) == (2, 2, 2)


def test_what_does_not_fit_alone_and_other_errors_are_raised() -> None:
    def never(part: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(part: torch.Tensor) -> torch.Tensor:
        raise KeyError("weights")

    with pytest.raises(torch.OutOfMemoryError):
        InPasses(memory_of("cpu"))(never, torch.zeros(4))
    with pytest.raises(KeyError):
        InPasses(memory_of("cpu"))(broken, torch.zeros(4))
