from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.metrics.ood_detection import auroc, detection_metrics
from brim.molecules.data_sets import PARTS, FeatureSet
from brim.molecules.heads import EnergyHead, TrainedHeads, make_heads, stacked_auroc, train_heads
from brim.molecules.losses import PreferenceLoss
from brim.settings.molecule_settings import LOSSES, OodRequest

CPU = torch.device("cpu")
SCORES = st.lists(st.sampled_from([-2.0, 0.0, 0.25, 1.0]), min_size=2, max_size=20)
RUNS = [(seed, 1e-2) for seed in range(4)]


def features(rows: int = 60, width: int = 8, shift: float = 0.8) -> FeatureSet:
    generator = torch.Generator().manual_seed(0)
    found = {part: torch.randn(rows, width, generator=generator) for part in PARTS}
    for part in PARTS:
        if part.endswith("_out"):
            found[part][:, :3] += shift
    return FeatureSet(
        name="toy", encoder="features", features=found, ids={part: [str(row) for row in range(rows)] for part in PARTS}
    )


def request(**more: Any) -> OodRequest:
    settings = {"hidden": (16,), "epochs": 15, "effective_batch": 16, "patience": 5, **more}
    return OodRequest(id="in", ood="out", **settings)


def train(
    loss: Any = "energy", *, runs: Any = RUNS, data: FeatureSet | None = None, reference: Any = None, **more: Any
) -> TrainedHeads:
    asked = loss if isinstance(loss, PreferenceLoss) else PreferenceLoss(name=loss)
    return train_heads(data or features(), asked, runs, request(**more), device=CPU, reference=reference)


def test_the_default_head_is_256_128_1() -> None:
    shapes = [tuple(part.shape) for name, part in EnergyHead(512).named_parameters() if name.endswith("weight")]
    assert shapes == [(256, 512), (128, 256), (1, 128)]
    assert EnergyHead(4)(torch.zeros(3, 4)).shape == (3,)


def test_a_head_depends_on_its_seed_alone() -> None:
    make = make_heads(4, (3,))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(7).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert all(torch.equal(part, make(7).state_dict()[name]) for name, part in first.items())
    assert not torch.equal(first["layers.0.weight"], make(8).state_dict()["layers.0.weight"])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_to_separate_the_classes(name: Any) -> None:
    heads = train(name, runs=RUNS[:2], data=features(shift=2.0))
    assert all(result.metrics is not None and result.metrics["auroc"] > 0.9 for result in heads.results)


def test_stacked_seeds_have_the_auroc_of_seeds_trained_alone() -> None:
    stacked = train(fast_path="stacked")
    alone = train(fast_path="resident")
    off = train(fast_path="off")
    assert (stacked.trained.path, alone.trained.path, off.trained.path) == ("stacked", "resident", "off")
    for one, two, three in zip(stacked.results, alone.results, off.results, strict=True):
        assert one.metrics is not None
        assert two.metrics is not None
        assert three.metrics is not None
        assert one.metrics["auroc"] == pytest.approx(two.metrics["auroc"], abs=0.002)
        assert one.metrics["auroc"] == pytest.approx(three.metrics["auroc"], abs=0.002)


def test_a_head_is_tested_with_the_weights_of_its_best_epoch() -> None:
    heads = train(runs=RUNS[:1])
    (result,) = heads.results
    assert result.validation == max(result.outcome.validations)
    assert result.outcome.validations[result.outcome.best_epoch - 1] == result.validation
    head = make_heads(8, (16,))(0)
    head.load_state_dict(result.outcome.weights)
    data = features()
    inner, outer = (head(data.features[part]).detach().numpy() for part in ("test_in", "test_out"))
    assert detection_metrics(inner, outer) == pytest.approx(result.metrics)


def test_the_reference_is_the_runs_own_first_head_or_the_one_given() -> None:
    still = [(0, 1e-30), (1, 1e-30)]  # steps that change nothing
    own = train("reference", runs=still, epochs=1)
    for result in own.results:  # against itself every pair is even: log 2
        assert result.outcome.losses[0] == pytest.approx(0.693147, abs=2e-2)
    loss = PreferenceLoss(name="reference", regulariser=0.0)
    own = train(loss, runs=still, epochs=1)
    assert [result.outcome.losses[0] for result in own.results] == pytest.approx([0.693147] * 2, abs=1e-6)
    other = make_heads(8, (16,))(99).state_dict()
    against = train(loss, runs=still, epochs=1, reference=other)
    assert all(abs(result.outcome.losses[0] - 0.693147) > 1e-5 for result in against.results)


def test_evaluation_in_small_passes_changes_nothing_and_is_recorded() -> None:
    whole = train(runs=RUNS[:2], fast_path="stacked")
    small = train(runs=RUNS[:2], fast_path="stacked", eval_batch_size=7)
    assert (whole.eval_batch_size, small.eval_batch_size) == (60, 7)
    for one, two in zip(whole.results, small.results, strict=True):
        assert one.metrics == pytest.approx(two.metrics, abs=1e-6)


def test_peaks_of_training_and_evaluation_are_read_apart() -> None:
    heads = train(runs=RUNS[:2])
    assert heads.trained.peak_allocated_bytes is not None
    assert heads.eval_peak_allocated_bytes is not None
    assert heads.trained.peak_allocated_bytes > heads.eval_peak_allocated_bytes > 0


def test_a_diverging_run_has_an_error_and_no_figures() -> None:
    heads = train(runs=[(0, 1e-2), (1, 1e38)], fast_path="stacked")
    good, bad = heads.results
    assert good.metrics is not None
    assert bad.metrics is None
    assert bad.outcome.error is not None
    assert "seed 1: the loss became" in bad.outcome.error


@pytest.mark.usefixtures("words_of_the_command_line")
def test_wrong_layers_and_dropout_are_refused() -> None:
    with pytest.raises(RequestError, match="--hidden 0"):
        EnergyHead(4, (0,))
    with pytest.raises(RequestError, match=r"--dropout 1: it must be a fraction from 0 to below 1"):
        EnergyHead(4, (2,), dropout=1.0)


@given(SCORES, SCORES)
def test_auroc_of_a_stack_equals_the_metric_of_each_run(inner: list[float], outer: list[float]) -> None:
    stacked = stacked_auroc(torch.tensor([inner, inner[::-1]]), torch.tensor([outer, outer]))
    assert stacked == [auroc(inner, outer), auroc(inner, outer)]


def test_the_auroc_of_a_run_with_a_nan_energy_is_nan() -> None:
    inner = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    good, bad = stacked_auroc(inner, torch.ones(2, 3))
    assert good == 0.75
    assert math.isnan(bad)
