from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

from brim.training.micro_batches import Rewinder


def network() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    net.register_buffer("table", torch.arange(1000.0))
    return net


def test_buffers_and_random_numbers_go_back_and_may_do_so_twice() -> None:
    net = network()
    rewinder = Rewinder(net)
    rewinder.mark()
    drawn = (torch.rand(1), numpy.random.rand(), random.random())
    first = net(torch.ones(8, 4)).detach()
    for _ in range(2):
        rewinder.rewind()
        assert torch.equal(net[1].running_mean, torch.zeros(4))  # type: ignore[index]
        assert int(net[1].num_batches_tracked) == 0  # type: ignore[index]
        assert (torch.rand(1), numpy.random.rand(), random.random()) == drawn
        assert torch.equal(net(torch.ones(8, 4)).detach(), first)


def test_buffers_that_never_change_are_not_copied_again() -> None:
    net = network()
    rewinder = Rewinder(net)
    rewinder.mark()
    assert len(rewinder._copies) == 4
    net(torch.ones(8, 4))
    rewinder.mark()
    assert len(rewinder._copies) == 3  # running mean, variance and their count; not the table
    assert len(rewinder.moving()) == 3


def test_one_that_changes_later_is_noticed() -> None:
    net = network()
    rewinder = Rewinder(net)
    rewinder.mark()
    rewinder.mark()
    assert rewinder.moving() == [1, 2, 3]
    net.table.add_(1)  # type: ignore[operator, union-attr]
    rewinder.mark()
    net.table.add_(1)  # type: ignore[operator, union-attr]
    assert rewinder.moving() == [0, 1, 2, 3]
    rewinder.rewind()
    assert float(net.table[0]) == 1.0  # type: ignore[index, arg-type]


def test_running_statistics_go_back_in_every_window_not_only_in_the_first() -> None:
    """torch does not count the writes of its own normalisation layers."""
    net = network()
    rewinder = Rewinder(net)
    for _ in range(3):
        rewinder.mark()
        net(torch.randn(8, 4))
    rewinder.mark()
    before = net[1].running_mean.clone()  # type: ignore[index, union-attr, operator]
    net(torch.randn(8, 4))
    assert not torch.equal(net[1].running_mean, before)  # type: ignore[index]
    rewinder.rewind()
    assert torch.equal(net[1].running_mean, before)  # type: ignore[index]


def test_a_replaced_buffer_is_the_same_object_again() -> None:
    net = network()
    before = net.table
    rewinder = Rewinder(net)
    rewinder.mark()
    net.table = torch.zeros(3)
    rewinder.rewind()
    assert net.table is before


def test_buffers_that_come_and_go_are_as_at_the_mark() -> None:
    net = network()
    table = net.table
    rewinder = Rewinder(net)
    rewinder.mark()
    net.register_buffer("count", torch.ones(()))
    net.table = None
    rewinder.rewind()
    assert net.table is table
    assert not hasattr(net, "count")
    net.register_buffer("count", torch.ones(()))
    net.table = None
    net[1] = nn.BatchNorm1d(4)  # type: ignore[operator]
    rewinder.mark()
    net.count += 1  # type: ignore[operator]
    net(torch.randn(8, 4))
    rewinder.rewind()
    assert net.table is None
    assert float(net.count) == 1.0  # type: ignore[arg-type]
    assert torch.equal(net[1].running_mean, torch.zeros(4))  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_model_is_rewound_as_well() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    rewinder = Rewinder(model)
    for _ in range(2):
        rewinder.mark()
        before = [buffer.clone() for buffer in model.buffers()]
        model(torch.randn(4, 3))
        rewinder.rewind()
        assert all(torch.equal(buffer, one) for buffer, one in zip(model.buffers(), before, strict=True))
