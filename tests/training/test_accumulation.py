"""Gradients accumulated over micro-batches equal those of one big batch, for any micro-batches and weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from brim.errors import RequestError
from brim.memory.devices import memory_of
from brim.models.placement import Precision
from brim.ranks.gradients import RankGroup
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter, WindowWork
from brim.training.objective import Batch, Classification, ModelLoss, Objective, Regression
from brim.training.optimizers import OptimizerStep

CPU = torch.device("cpu")


class TokenModel(nn.Module):
    """Predicts each token from the one before; the loss is a sum over the tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def training_loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.embedding(ids[:, :-1]))
        targets = ids[:, 1:]
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=0)
        return loss.sum(), (targets != 0).sum()


def gradients_of(
    model: nn.Module, objective: Objective, whole: Batch, lengths: Sequence[int]
) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients and the loss of a window that is run in micro-batches of these lengths."""
    model = copy.deepcopy(model)
    count = sum(lengths)
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=max(lengths)))
    sizes.repeat(list(lengths))
    gradients = GradientPass(
        model=model, objective=objective, device=CPU, precision=Precision(weights=torch.float64)
    )  # fmt: skip
    micro = MicroBatches(gradients, sizes, PeakMeter(memory_of(CPU), enabled=False))

    def fetch(items: Sequence[int]) -> Batch:
        rows = torch.tensor(list(items))
        return Batch(whole.inputs[rows], None if whole.labels is None else whole.labels[rows])

    work = WindowWork(items=range(count), costs=[1] * count, samples=count, fetch=fetch)
    done = micro.run(work)
    assert [len(part.items) for part in done.parts] == list(lengths)
    stepper = OptimizerStep(micro, torch.optim.SGD(model.parameters(), lr=0.0), RankGroup(CPU), guarded=False)
    figures = stepper.make(done, count).read()
    loss = figures["loss"]
    assert loss is not None
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, loss


def big_batch(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12) for name in one)


cuts = st.lists(st.integers(1, 7), min_size=1, max_size=6)
seeds = st.integers(0, 1000)


def network(draw: torch.Generator, features: int, outputs: int) -> nn.Module:
    torch.manual_seed(int(torch.randint(0, 1000, (1,), generator=draw)))
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


@settings(max_examples=60)
@given(cuts, seeds, st.integers(1, 6), st.integers(2, 5), st.floats(0, 0.5))
def test_accumulated_classification_equals_one_batch(
    lengths: list[int], seed: int, features: int, classes: int, smoothing: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    inputs = torch.randn(count, features, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=draw)
    model = network(draw, features, classes)
    objective = Classification(classes, label_smoothing=smoothing)
    found, loss = gradients_of(model, objective, Batch(inputs, labels), lengths)
    whole = functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)
    assert same(found, big_batch(model, whole))
    assert abs(loss - float(whole.detach())) < 1e-10


@settings(max_examples=40)
@given(cuts, seeds, st.integers(1, 6))
def test_accumulated_regression_equals_one_batch(lengths: list[int], seed: int, features: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(lengths), features, generator=draw, dtype=torch.float64)
    labels = torch.randn(sum(lengths), generator=draw, dtype=torch.float64)
    model = network(draw, features, 1)
    found, loss = gradients_of(model, Regression(), Batch(inputs, labels), lengths)
    whole = functional.mse_loss(model(inputs)[:, 0], labels)
    assert same(found, big_batch(model, whole))
    assert abs(loss - float(whole.detach())) < 1e-10


@settings(max_examples=60)
@given(cuts, seeds, st.integers(2, 8))
def test_accumulated_losses_per_token_equal_one_batch(lengths: list[int], seed: int, tokens: int) -> None:
    """Samples have different lengths, so that the mean of micro-batch means would differ."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    ids = torch.randint(1, 11, (count, tokens), generator=draw)
    shown = torch.randint(2, tokens + 1, (count,), generator=draw)
    ids[torch.arange(tokens) >= shown[:, None]] = 0  # padding
    torch.manual_seed(seed)
    model: Any = TokenModel().double()
    found, loss = gradients_of(model, ModelLoss(), Batch(ids, None), lengths)
    total, weight = model.training_loss(ids)
    assert same(found, big_batch(model, total / weight))
    assert abs(loss - float((total / weight).detach())) < 1e-10


def test_a_mean_of_micro_batch_means_is_not_equal() -> None:
    """The comparison of the tests above can fail: it does for the usual mistake."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(7, 3, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    model = network(draw, 3, 2)
    found, _ = gradients_of(model, Classification(2), Batch(inputs, labels), [5, 2])
    parts = [functional.cross_entropy(model(inputs[a:b]), labels[a:b]) for a, b in ((0, 5), (5, 7))]
    assert not same(found, big_batch(model, (parts[0] + parts[1]) / 2))


def test_a_model_that_gives_a_mean_is_refused() -> None:
    class Mean(nn.Module):
        def training_loss(self, batch: torch.Tensor) -> torch.Tensor:
            return batch.mean()

    with pytest.raises(RequestError, match="a mean cannot be accumulated"):
        ModelLoss().loss(Mean(), Batch(torch.ones(3), None))
