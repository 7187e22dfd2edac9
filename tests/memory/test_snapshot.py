"""A snapshot leaves no trace of the steps that ran after it: values, objects, memory, random numbers."""

from __future__ import annotations

import copy
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError
from brim.memory.snapshot import StateSnapshot, required_bytes


class Net(nn.Module):
    """Tied weights, batch norm, dropout, a non-persistent, a None and a replaced buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("cache", None)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0
        self.lengths: list[int] = []
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.lengths.append(len(x))
        self.seen += len(x)
        self.cache = x.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * self.cache.to(self.mean.dtype)  # a new tensor each time
        self.last = x
        return self.outer(self.drop(functional.relu(self.norm(self.inner(x)))))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, size: int, dtype: torch.dtype) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(torch.randn(size, 8, dtype=dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tensor_bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def facts(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must be the same afterwards: bits, object identity, address, flags."""
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return {
        "tensors": [(n, id(t), t.data_ptr(), t.dtype, t.requires_grad, tensor_bits(t)) for n, t in named],
        "buffers": {n: sorted(m._buffers) for n, m in net.named_modules()},
        "grads": [(n, None if t.grad is None else (id(t.grad), tensor_bits(t.grad))) for n, t in named],
        "training": [(n, m.training) for n, m in net.named_modules()],
        "state": [
            (id(p), k, (id(v), v.dtype, tensor_bits(v)) if isinstance(v, torch.Tensor) else v)
            for p, entry in optimizer.state.items()
            for k, v in entry.items()
        ],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    }


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "rprop": lambda ps: torch.optim.Rprop(ps),
}


@pytest.mark.parametrize("warm", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restore_is_bit_identical_after_steps(name: str, warm: int) -> None:
    torch.manual_seed(0)
    net = Net()
    net.drop.eval()
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(warm):
        train_step(net, optimizer, 4, torch.float32)
    before, counted = facts(net, optimizer), (net.calls, list(net.lengths), net.last, net.cache)

    snapshot = StateSnapshot.take([net], [optimizer])
    net.eval().train()
    net.inner.bias.requires_grad_(False)
    for size in (3, 5, 7):
        train_step(net, optimizer, size, torch.float32)
        optimizer.param_groups[0]["lr"] = 3.0
    snapshot.restore()

    assert facts(net, optimizer) == before
    assert (net.calls, net.lengths) == counted[:2]
    assert net.last is counted[2]
    assert net.cache is counted[3]
    assert net.outer.weight is net.inner.weight


def test_float32_optimizer_state_over_bfloat16_weights_keeps_its_dtype() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train_step(net, optimizer, 4, torch.bfloat16)
    for entry in optimizer.state.values():  # as a master-weight optimizer keeps them
        entry["exp_avg"], entry["exp_avg_sq"] = torch.rand(()) + entry["exp_avg"].float(), entry["exp_avg_sq"].float()
    before = facts(net, optimizer)
    snapshot = StateSnapshot.take([net], [optimizer])
    with torch.no_grad():
        for entry in optimizer.state.values():
            entry["exp_avg"].add_(1e-7)
            entry["exp_avg_sq"] = entry["exp_avg_sq"].bfloat16()  # what load_state_dict would do
            entry["step"] += 1
    for weight in net.parameters():
        weight.data = weight.data.float()
        weight.grad = None
    snapshot.restore()
    assert facts(net, optimizer) == before


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of torch 2.6's own SequentialLR
def test_a_run_after_take_steps_restore_has_the_same_losses() -> None:
    def losses(*, probe: bool) -> torch.Tensor:
        torch.manual_seed(7)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[3],
        )
        seen = []
        for step in range(6):
            if probe and step in (0, 2):
                snapshot = StateSnapshot.take([net], [optimizer], [scheduler])
                for _ in range(3):
                    train_step(net, optimizer, 13, torch.float32)
                    scheduler.step()
                snapshot.restore()
            seen.append(train_step(net, optimizer, 4, torch.float32))
            scheduler.step()
        return torch.stack(seen)

    assert torch.equal(losses(probe=False), losses(probe=True))


def test_grad_scaler_is_restored_before_and_after_its_lazy_start() -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(2, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    fresh = StateSnapshot.take([net], [optimizer], [scaler])
    step()
    assert scaler.get_scale() == 2048.0
    scale = scaler._scale
    later = StateSnapshot.take([net], [optimizer], [scaler])
    states = copy.deepcopy(dict(scaler._per_optimizer_states))
    step()
    later.restore()
    assert scaler.get_scale() == 2048.0
    assert scaler._scale is scale
    assert dict(scaler._per_optimizer_states) == states
    fresh.restore()
    assert scaler._scale is None
    assert not scaler._per_optimizer_states
    step()  # it can start again
    assert scaler.get_scale() == 2048.0


def test_restoring_a_scheduler_leaves_an_unlisted_optimizer_unchanged() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    snapshot = StateSnapshot.take(stateful=[scheduler])
    assert snapshot.host_bytes == 0
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    optimizer.param_groups[0]["lr"] = 0.125
    snapshot.restore()
    assert scheduler.best == float("inf")
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_scheduler_counters_on_the_optimizer_are_restored() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str))}
    snapshot = StateSnapshot.take(optimizers=[optimizer], stateful=[scheduler])
    optimizer.step()
    scheduler.step()
    assert {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str))} != before
    snapshot.restore()
    assert {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str))} == before
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_gradients_none_stay_none_and_existing_ones_are_the_same_objects() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0](torch.randn(2, 4)).sum().backward()
    kept = [(p, p.grad, p.grad.clone()) for p in net[0].parameters() if p.grad is not None]
    snapshot = StateSnapshot.take([net])
    net(torch.randn(2, 4)).sum().backward()  # accumulates in place, and makes new ones
    for parameter in net[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    snapshot.restore()
    assert all(p.grad is None for p in net[1].parameters())
    assert len(kept) == 2
    for parameter, grad, values in kept:
        assert parameter.grad is grad
        assert torch.equal(grad, values)


def test_sparse_gradients_are_restored() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    grad = table.weight.grad
    assert grad is not None
    before = grad.to_dense()
    snapshot = StateSnapshot.take([table])
    table(torch.tensor([2, 7, 9])).sum().backward()
    snapshot.restore()
    assert table.weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_replaced_and_newly_registered_members_are_undone() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.arange(4.0))
    net.register_buffer("table", torch.arange(3))
    net.register_buffer("gone", torch.ones(1), persistent=False)
    weight, table, gone = net.weight, net.table, net.gone
    address = weight.data_ptr()
    order = list(vars(net))
    snapshot = StateSnapshot.take([net])
    net.weight.data = torch.zeros(9, dtype=torch.float64)
    net.weight = nn.Parameter(torch.zeros(1))
    net.table = torch.zeros(8)
    del net.gone
    net.extra = nn.Parameter(torch.zeros(2))
    net.child = nn.Linear(1, 1)
    net.register_buffer("more", torch.zeros(1), persistent=False)
    snapshot.restore()
    assert net.weight is weight
    assert weight.data_ptr() == address
    assert torch.equal(weight, torch.arange(4.0))
    assert net.table is table
    assert net.gone is gone
    assert list(vars(net)) == order
    assert [n for n, _ in net.named_parameters()] == ["weight"]
    assert [n for n, _ in net.named_buffers()] == ["table", "gone"]
    assert list(net.state_dict()) == ["weight", "table"]


def test_views_share_one_copy_and_an_expanded_one_is_restored() -> None:
    base = torch.arange(12.0)
    net = nn.Module()
    net.register_buffer("part", base[2:6])
    net.register_buffer("wide", base[:1].expand(1000))
    net.register_buffer("turned", base.view(3, 4).t())
    snapshot = StateSnapshot.take([net])
    assert snapshot.host_bytes == base.nbytes == required_bytes([net])
    base.mul_(-1)
    snapshot.restore()
    assert torch.equal(base, torch.arange(12.0))
    assert net.wide.stride() == (0,)


def test_a_buffer_written_with_gradients_on_is_a_leaf_again() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("ema", torch.zeros(2, 2))
    snapshot = StateSnapshot.take([net])
    net.ema.add_(net.weight)
    assert not net.ema.is_leaf
    snapshot.restore()
    assert net.ema.is_leaf
    assert not net.ema.requires_grad
    assert torch.equal(net.ema, torch.zeros(2, 2))


def test_every_random_generator_continues_as_if_nothing_had_been_drawn() -> None:
    own = types.SimpleNamespace(
        torch=torch.Generator().manual_seed(1), python=random.Random(2), numpy=np.random.default_rng(3)
    )

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            float(np.random.standard_normal()),
            float(torch.randn(())),
            float(torch.rand((), generator=own.torch)),
            own.python.random(),
            float(own.numpy.random()),
        ]

    draw()  # leaves half a pair of normals in the python and numpy generators
    snapshot = StateSnapshot.take(stateful=[own])
    first = draw()
    snapshot.restore()
    assert draw() == first
    snapshot.restore()
    assert draw() == first
    assert not torch.cuda.is_initialized()


def test_attributes_of_a_stateful_object_are_restored() -> None:
    class Average:
        def __init__(self, net: nn.Module) -> None:
            self.net = net
            self.shadow = {n: p.detach().clone() for n, p in net.named_parameters()}
            self.history = np.zeros(3)
            self.inner = types.SimpleNamespace(updates=0, names={"a"})

    net = nn.Linear(2, 2)
    average = Average(net)
    shadow = average.shadow["weight"]
    values = shadow.clone()
    snapshot = StateSnapshot.take(stateful=[average])
    average.shadow["weight"].mul_(2)
    average.shadow = {}
    average.history += 1
    average.inner.updates = 5
    average.inner.names.add("b")
    with torch.no_grad():
        net.weight.fill_(9.0)
    snapshot.restore()
    assert average.shadow["weight"] is shadow
    assert torch.equal(shadow, values)
    assert average.history.tolist() == [0.0, 0.0, 0.0]
    assert (average.inner.updates, average.inner.names) == (0, {"a"})
    assert torch.equal(net.weight, torch.full((2, 2), 9.0)), "a module that is only referred to is left alone"


def test_required_bytes_counts_each_memory_once() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(net, optimizer, 4, torch.float32)
    snapshot = StateSnapshot.take([net, net.inner], [optimizer])
    assert snapshot.host_bytes == required_bytes([net, net.inner], [optimizer])
    parameters = sum(p.nbytes for p in net.parameters())
    assert snapshot.host_bytes > 4 * parameters  # weights, gradients, two moments; and the buffers
    assert snapshot.host_bytes < 5 * parameters


def test_meta_tensors_are_skipped_and_lazy_parameters_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(1000, 1000)
    snapshot = StateSnapshot.take([net])
    snapshot.restore()
    assert snapshot.host_bytes == 0
    with pytest.raises(RequestError, match="run one batch"):
        StateSnapshot.take([nn.LazyLinear(3)])


def test_module_that_ran_in_inference_mode_can_be_restored() -> None:
    net = nn.Module()
    with torch.inference_mode():
        net.register_buffer("cache", torch.ones(3))
    snapshot = StateSnapshot.take([net])
    with torch.inference_mode():
        net.cache.add_(1)
    snapshot.restore()
    assert net.cache.tolist() == [1.0, 1.0, 1.0]
