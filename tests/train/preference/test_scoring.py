from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.memory.devices import memory_of
from brim.metrics.detection import auroc
from brim.train.preference.scoring import InPasses, stacked_auroc

scores = st.lists(st.sampled_from([-2.0, 0.0, 0.25, 1.0]), min_size=2, max_size=20)


@given(scores, scores)
def test_auroc_of_a_stack_equals_the_metric_of_each_run(inner: list[float], outer: list[float]) -> None:
    stacked = stacked_auroc(torch.tensor([inner, inner[::-1]]), torch.tensor([outer, outer]))
    assert stacked == [auroc(inner, outer), auroc(inner, outer)]


def test_a_run_with_an_energy_that_is_no_number_has_no_auroc() -> None:
    inner = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    good, bad = stacked_auroc(inner, torch.ones(2, 3))
    assert good == 0.75
    assert math.isnan(bad)


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
