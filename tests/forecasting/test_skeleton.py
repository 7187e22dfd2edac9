"""Models built for their shapes: no time or memory for values, and nothing stays changed afterwards."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

from brim.forecasting.skeleton import MAPPED_BYTES, without_initialisation


def test_the_shapes_are_those_of_a_model_built_for_real() -> None:
    with without_initialisation():
        skeleton = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    real = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    assert [tuple(p.shape) for p in skeleton.parameters()] == [tuple(p.shape) for p in real.parameters()]


def test_initialisation_is_back_afterwards_also_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="in the block"), without_initialisation():
        raise RuntimeError("in the block")
    weight = torch.full((64, 64), 7.0)
    nn.init.normal_(weight)
    assert (weight != 7).any()
    torch.manual_seed(0)
    first = nn.Linear(4, 4).weight.clone()
    torch.manual_seed(0)
    with without_initialisation():
        nn.Linear(4, 4)
    assert torch.equal(nn.Linear(4, 4).weight, first)  # and the generator has not moved


def test_a_model_larger_than_this_test_may_use_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with without_initialisation():
        model = nn.Linear(2**14, 2**15, bias=False)  # 2 GiB
    assert model.weight.numel() * 4 == 2 * 2**30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 2**19


def test_random_numbers_that_a_model_reads_while_it_is_built_are_drawn() -> None:
    with without_initialisation():
        small = torch.empty(1000).uniform_(2, 3)
        large = torch.zeros(MAPPED_BYTES // 4).normal_()
    assert small.min() >= 2
    assert (large == 0).all()


def test_an_initialisation_that_draws_until_values_are_in_range_ends() -> None:
    with without_initialisation():
        table = torch.empty(7000, 3)
        assert nn.init.trunc_normal_(table) is table
