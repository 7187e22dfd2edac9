from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.molecules.losses import PreferenceLoss
from brim.settings.ood_settings import LOSSES

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

INNER = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
OUTER = torch.tensor([1.5, 0.0], dtype=torch.float64)


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_the_energy_loss_is_the_mean_over_all_pairs_and_a_penalty_on_large_energies() -> None:
    pairs = [softplus(-0.1 * (out - inner)) for inner in INNER.tolist() for out in OUTER.tolist()]
    penalty = 0.01 * ((0.25 + 1 + 4) / 3 + 2.25 / 2)
    assert float(PreferenceLoss()(INNER, OUTER)) == pytest.approx(sum(pairs) / 6 + penalty, rel=1e-12)


def test_matched_pairs_are_taken_one_by_one() -> None:
    loss = PreferenceLoss(pairs="matched", regulariser=0.0, beta=2.0)
    expected = (softplus(-2.0 * (1.5 - 0.5)) + softplus(-2.0 * (0.0 + 1.0))) / 2
    assert float(loss(INNER[:2], OUTER)) == pytest.approx(expected, rel=1e-12)


def test_the_reference_loss_is_the_classical_one() -> None:
    loss = PreferenceLoss(name="reference", beta=0.5, regulariser=0.0)
    reference = (torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.4], dtype=torch.float64))
    # log π is minus the energy: the chosen answer is the in-distribution sample.
    chosen = -(INNER[:2] - reference[0])
    rejected = -(OUTER - reference[1])
    expected = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)).mean()
    torch.testing.assert_close(loss(INNER[:2], OUTER, reference=reference), expected)
    assert loss.matched


def test_against_its_own_energies_the_reference_loss_starts_at_log_two() -> None:
    loss = PreferenceLoss(name="reference", regulariser=0.0)
    value = loss(INNER[:2], OUTER, reference=(INNER[:2], OUTER))
    assert float(value) == pytest.approx(math.log(2))


def test_hinge_bce_and_mse() -> None:
    plain: dict[str, Any] = {"regulariser": 0.0}
    hinge = [max(0.0, 1 - (out - inner)) for inner in INNER.tolist() for out in OUTER.tolist()]
    assert float(PreferenceLoss(name="hinge", **plain)(INNER, OUTER)) == pytest.approx(sum(hinge) / 6)
    labels = torch.cat([torch.zeros(2), torch.ones(2)]).double()
    logits = torch.cat([INNER[:2], OUTER])
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(PreferenceLoss(name="bce", **plain)(INNER[:2], OUTER), bce)
    mse = torch.nn.functional.mse_loss(logits, 2 * labels - 1)
    torch.testing.assert_close(PreferenceLoss(name="mse", **plain)(INNER[:2], OUTER), mse)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_pushes_in_down_and_out_up(name: Any) -> None:
    sides = [torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    reference = (torch.zeros(4), torch.zeros(4))
    PreferenceLoss(name=name)(*sides, reference=reference).backward()  # type: ignore[no-untyped-call]
    assert sides[0].grad is not None
    assert sides[1].grad is not None
    assert (sides[0].grad > 0).all()
    assert (sides[1].grad < 0).all()


def test_half_precision_energies_are_compared_in_single_precision() -> None:
    value = PreferenceLoss()(INNER.bfloat16(), OUTER.bfloat16())
    assert value.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "energi"}, "--loss energi.*did you mean energy"),
        ({"pairs": "some"}, "--pairs some"),
        ({"beta": 0.0}, "--beta 0"),
        ({"regulariser": -1.0}, "--regulariser -1"),
        ({"margin": float("nan")}, "--hinge-margin nan"),
    ],
)
def test_wrong_settings_name_the_flag(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PreferenceLoss(**settings)
