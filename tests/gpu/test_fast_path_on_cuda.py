"""The fast path on a card: captured graphs give what eager steps give, and stacked seeds what single ones give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.molecules.data_sets import PARTS, FeatureSet
from brim.molecules.heads import make_heads, train_heads
from brim.molecules.losses import LogSigmoid, PreferenceLoss, mean_over_pairs
from brim.settings.molecule_settings import LOSSES, OodRequest
from brim.training.fast_path.task import Batch, RowData, RunSpec, RunsRequest, Settings, TrainingTask
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from tests.training.training_runs import largest_difference, losses, record_of, run, settings_of, write_features
from tests.training.training_runs import weights as saved_weights

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
WIDTH = 32


def rows(count: int, *, shift: float = 0.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) + shift


def problem(loss: PreferenceLoss | None = None, *, inner: int = 300, outer: int = 200, **more: Any) -> TrainingTask:
    loss = loss or PreferenceLoss()

    def criterion(energies: torch.Tensor, batch: Batch, counts: tuple[int, ...]) -> torch.Tensor:
        return loss(energies[: counts[0]], energies[counts[0] :])

    make = make_heads(WIDTH, (16, 8))
    features = torch.cat([rows(inner), rows(outer, shift=0.5, seed=1)])
    given: dict[str, Any] = {
        "make_model": lambda seed: make(seed).double(),
        "data": RowData(tensors={"features": features}, lengths=(inner, outer)),
        "criterion": criterion,
        **more,
    }
    return TrainingTask(**given)


def train(
    asked: TrainingTask, path: str, device: str = "cuda", *, runs: int = 4, graphs: bool = True, **more: Any
) -> TrainedRuns:
    settings = Settings(**{"epochs": 6, "batch_size": 64, **more})
    specs = [RunSpec(seed=seed, lr=1e-3 * (1 + seed)) for seed in range(runs)]
    request = RunsRequest(task=asked, specs=specs, settings=settings, device=device, path=path, graphs=graphs)
    return train_runs(request)


def assert_same(one: TrainedRuns, other: TrainedRuns, tolerance: float = 1e-9) -> None:
    for ours, theirs in zip(one.outcomes, other.outcomes, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.losses), torch.tensor(theirs.losses), rtol=tolerance, atol=tolerance
        )
        for name, weights in ours.weights.items():
            torch.testing.assert_close(weights, theirs.weights[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", ["resident", "stacked"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_replayed_steps_equal_eager_ones_and_the_cpu(path: str, optimizer: str) -> None:
    graphed = train(problem(), path, optimizer=optimizer, clip_norm=0.5)
    eager = train(problem(), path, optimizer=optimizer, clip_norm=0.5, graphs=False)
    on_cpu = train(problem(), path, "cpu", optimizer=optimizer, clip_norm=0.5)
    assert (graphed.path, graphed.graph, eager.graph, on_cpu.graph) == (path, True, False, False)
    assert graphed.notes == ()
    assert_same(graphed, eager)
    assert_same(graphed, on_cpu)


def test_stacked_seeds_equal_seeds_trained_alone_on_the_card() -> None:
    assert_same(train(problem(), "stacked"), train(problem(), "resident"))
    assert_same(train(problem(), "stacked"), train(problem(), "off"))


def test_the_learning_rate_of_every_replayed_step_is_its_own() -> None:
    def factor(step: int) -> float:
        return 0.9**step

    assert_same(train(problem(), "stacked", lr_factor=factor), train(problem(), "off", lr_factor=factor))


def test_early_stopping_freezes_a_run_inside_a_captured_graph() -> None:
    figures = [[0.5, 0.4, 0.4, 0.4, 0.4, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]

    def validating() -> Any:
        calls = iter(zip(*figures, strict=True))
        return lambda outputs: list(next(calls))

    trained = train(problem(validate=validating()), "stacked", runs=2, patience=2)
    assert [outcome.best_epoch for outcome in trained.outcomes] == [1, 6]
    assert trained.graph
    first = train(problem(), "resident", runs=2, epochs=1).outcomes[0]
    for name, weights in trained.outcomes[0].weights.items():
        torch.testing.assert_close(weights, first.weights[name], rtol=1e-9, atol=1e-9)


def test_many_pairs_by_nodes_inside_a_graph_equal_the_cpu() -> None:
    asked = problem(inner=3000, outer=3000)
    assert_same(
        train(asked, "stacked", batch_size=2048, runs=2), train(asked, "resident", "cpu", batch_size=2048, runs=2)
    )


def test_energies_too_wide_for_nodes_are_redone_eagerly_and_are_right() -> None:
    """The first epochs stay narrow; then the steepness makes the captured value refuse itself, and blocks take over."""
    asked = problem(PreferenceLoss(beta=40.0), inner=3000, outer=3000)
    graphed = train(asked, "stacked", batch_size=2048, runs=2, epochs=8)
    on_cpu = train(asked, "resident", "cpu", batch_size=2048, runs=2, epochs=8)
    assert all(outcome.error is None for outcome in graphed.outcomes)
    assert_same(graphed, on_cpu, 1e-7)


def test_sums_over_pairs_on_the_card_equal_the_cpu() -> None:
    inner, outer = rows(2000)[:, 0].requires_grad_(), rows(1500, seed=2)[:, 0].requires_grad_()
    value = mean_over_pairs(inner, outer, LogSigmoid(0.1))
    there = [side.detach().cuda().requires_grad_() for side in (inner, outer)]
    other = mean_over_pairs(there[0], there[1], LogSigmoid(0.1))
    torch.testing.assert_close(value, other.cpu(), rtol=1e-12, atol=1e-12)
    for one, two in zip(torch.autograd.grad(value, [inner, outer]), torch.autograd.grad(other, there), strict=True):
        torch.testing.assert_close(one, two.cpu(), rtol=1e-9, atol=1e-15)


def test_a_loss_that_is_no_number_ends_its_run_alone() -> None:
    make = make_heads(WIDTH, (8,))

    def poisoned(seed: int) -> nn.Module:
        model = make(seed).double()
        if seed == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return model

    good, bad = train(problem(make_model=poisoned), "stacked", runs=2).outcomes
    assert good.error is None
    assert bad.error is not None
    assert "seed 1: the loss became nan in epoch 1, step 1" in bad.error


def test_float16_scales_the_loss_of_each_run() -> None:
    asked = problem()
    asked = dataclasses.replace(
        asked,
        make_model=make_heads(WIDTH, (16, 8)),
        data=dataclasses.replace(asked.data, tensors={"features": asked.data.tensors["features"].float()}),
    )
    half = train(asked, "stacked", autocast_dtype=torch.float16, loss_scaling=True)
    full = train(asked, "stacked")
    for one, two in zip(half.outcomes, full.outcomes, strict=True):
        assert one.error is None
        assert one.losses[-1] == pytest.approx(two.losses[-1], rel=0.05)


def test_dropout_in_a_graph_differs_at_every_replay() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1), nn.Flatten(0)).double()

    ones = RowData(tensors={"features": torch.ones(64, WIDTH, dtype=torch.float64)}, lengths=(64,))
    asked = TrainingTask(make_model=build, data=ones, criterion=lambda outputs, batch, counts: outputs.mean())
    trained = train(asked, "stacked", runs=2, batch_size=8, epochs=4, lr_factor=lambda step: 0.0)
    assert trained.graph
    assert len(set(trained.outcomes[0].losses)) == 4  # the same weights, other noise each time


@pytest.mark.parametrize("name", LOSSES)
def test_heads_learn_on_the_card_and_the_choice_is_measured(name: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    features = {part: torch.randn(400, WIDTH, generator=generator) for part in PARTS}
    for part in PARTS:
        features[part][:, :4] += 2.0 if part.endswith("_out") else 0.0
    ids = {part: [str(row) for row in range(400)] for part in PARTS}
    data = FeatureSet(name="toy", encoder="features", features=features, ids=ids)
    asked = OodRequest(id="in", ood="out", hidden=(32,), epochs=10, effective_batch=64, patience=5)
    heads = train_heads(data, PreferenceLoss(name=name), [(seed, 1e-2) for seed in range(10)], asked, device=CUDA)
    assert heads.trained.graph
    assert heads.trained.peak_allocated_bytes is not None
    assert heads.eval_peak_allocated_bytes is not None
    assert {trial.path for trial in heads.trained.trials} == {"resident", "stacked"}
    assert all(result.metrics is not None and result.metrics["auroc"] > 0.9 for result in heads.results)


def test_a_memory_limit_changes_nothing_but_memory() -> None:
    asked = problem()
    settings = Settings(epochs=6, batch_size=64)
    specs = [RunSpec(seed=seed, lr=1e-3 * (1 + seed)) for seed in range(8)]
    request = RunsRequest(
        task=asked, specs=specs, settings=settings, device="cuda", path="stacked", memory_limit_bytes=512 * 2**20
    )
    tight = train_runs(request)
    assert_same(train(asked, "stacked", runs=8), tight)
    assert tight.peak_reserved_bytes is not None
    assert tight.peak_reserved_bytes <= 512 * 2**20


def supervised(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A training of three classes on the card, in double precision, from a file of features."""
    path = tmp_path / "features.npz"
    if not path.exists():
        write_features(path, count=240)
    given = {"training__gradient_clip": 0.5, "hp__label_smoothing": 0.1, "scheduler__name": "cosine", **changes}
    nested = settings_of(path, hp__epochs=6, **given)
    nested["training"]["device"] = "cuda"
    return nested


@pytest.mark.parametrize("path", ["stacked", "resident"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_supervised_seeds_equal_the_loop_s_on_the_card(path: str, optimizer: str, tmp_path: Path) -> None:
    nested = supervised(tmp_path, optimizer__name=optimizer, scheduler__warmup_epochs=1)
    together = brim.fit(nested, seeds=4, fast_path=path, output=tmp_path / "together", use_cache=False)
    choice = together.summary["fast_path_choice"]
    assert (together.summary["fast_path"], choice["cuda_graph"]) == (path, True)
    assert together.summary["peak_allocated_bytes"] is not None
    for seed in (0, 3):
        alone = run({**nested, "hp": {**nested["hp"], "seed": seed}}, tmp_path / f"alone-{seed}")
        folder = tmp_path / "together" / f"seed-{seed}"
        assert losses(folder) == pytest.approx(losses(alone.folder), abs=1e-9)
        assert largest_difference(saved_weights(folder, "best"), saved_weights(alone.folder, "best")) < 1e-9
        assert together.metrics["top1"]["values"][seed] == pytest.approx(alone.metrics["top1"]["mean"])


def test_captured_graphs_stop_early_like_the_loop(tmp_path: Path) -> None:
    nested = supervised(tmp_path, hp__learning_rate=0.3, training__early_stopping=2, scheduler__name="none")
    nested["hp"]["epochs"] = 30
    together = brim.fit(nested, seeds=4, fast_path="stacked", output=tmp_path / "together", use_cache=False)
    assert together.summary["fast_path_choice"]["cuda_graph"]
    for seed in (0, 3):
        alone = run({**nested, "hp": {**nested["hp"], "seed": seed}}, tmp_path / f"alone-{seed}")
        own = record_of(tmp_path / "together" / f"seed-{seed}")["summary"]
        for name in ("epochs", "best_epoch", "stopped_early"):
            assert own[name] == alone.summary[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_supervised_seeds_learn_in_every_precision(dtype: str, tmp_path: Path) -> None:
    nested = supervised(tmp_path, training__dtype=dtype, scheduler__name="none")
    nested["hp"]["epochs"] = 20
    together = brim.fit(nested, seeds=8, output=tmp_path / "together", use_cache=False)
    assert together.failed == ()
    assert {trial["path"] for trial in together.summary["fast_path_choice"]["trials"]} == {"resident", "stacked"}
    assert together.metrics["top1"]["mean"] > 0.75
