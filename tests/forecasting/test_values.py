"""Values that only a run would know: answered where it does no harm, said where it may."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from brim.forecasting.ledger import Ledger
from brim.forecasting.shape_tensor import ShapeTensor
from brim.forecasting.tracer import Tracer

ROWS, WIDTH = 300, 64


def answered(function: Callable[[torch.Tensor], Any]) -> tuple[Any, tuple[str, ...]]:
    """What a step gets to see of an activation, and what was guessed."""
    tracer = Tracer(Ledger())
    with tracer:
        seen = function(torch.empty(ROWS, WIDTH))
    return seen, tuple(tracer.facts.guesses)


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda x: x.sum().item(), 1.0),
        (lambda x: float(x.mean()), 1.0),
        (lambda x: f"{x.mean():.2f}", "1.00"),
        (lambda x: x[0, :3].tolist(), [1.0, 1.0, 1.0]),
        (lambda x: x[0, :2].numpy().tolist(), [1.0, 1.0]),
        (lambda x: bool(x.isnan().any()), False),
        (lambda x: bool(torch.isinf(x).any()), False),
        (lambda x: bool(torch.isfinite(x).all()), True),
        (lambda x: bool(torch.isnan(x.sum()) | torch.isinf(x.sum())), False),
        (lambda x: x.to(torch.complex64).sum().item(), 1 + 0j),
    ],
)
def test_a_number_to_log_and_a_check_for_nan_are_no_guess(function: Callable[..., Any], seen: Any) -> None:
    assert answered(function) == (seen, ())


@pytest.mark.parametrize(
    ("function", "seen", "said"),
    [
        (lambda x: bool(x.sum() > 3), False, "branches on a value"),
        (lambda x: x.argmax().item(), 1, "reads an integer"),
        (lambda x: tuple((x > 0).nonzero().shape), (ROWS * WIDTH, 2), "taken as full"),
        (lambda x: tuple(x[x > 0].shape), (ROWS * WIDTH,), "taken as full"),
        (lambda x: tuple(x[x[:, 0] > 0].shape), (ROWS, WIDTH), "taken as full"),
        (lambda x: tuple(x.masked_select(x > 0).shape), (ROWS * WIDTH,), "taken as full"),
        (lambda x: torch.equal(x, x + 1), False, "compares tensors"),
        (lambda x: tuple(x.argmax(1).unique().shape), (ROWS,), "distinct"),
    ],
)
def test_what_may_change_the_memory_is_reported(function: Callable[..., Any], seen: Any, said: str) -> None:
    answer, guesses = answered(function)
    assert answer == seen
    assert any(said in guess for guess in guesses)


def test_tokens_are_spread_evenly_over_experts() -> None:
    def routed(x: torch.Tensor) -> int:
        chosen = x @ torch.empty(WIDTH, 8)
        mask = functional.one_hot(chosen.topk(2).indices, num_classes=8).permute(2, 1, 0)  # [expert, choice, token]
        rows, _ = torch.where(mask[3])
        return rows.shape[0]

    count, guesses = answered(routed)
    assert count == ROWS * 2 // 8
    assert guesses == ("a mask over choices of the model is taken as evenly spread",)


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (lambda scores: torch.where(scores.topk(2).indices == 3)[0], ROWS * 2 // 8),
        (lambda scores: torch.where(scores.topk(2)[1].clone().view(-1) == 3)[0], ROWS * 2 // 8),
        (lambda scores: (scores.topk(2).indices == 3).any(-1).nonzero(), ROWS * 2 // 8),
        (lambda scores: (scores.argmax(-1) == torch.tensor(3)).nonzero(), math.ceil(ROWS / 8)),
        (lambda scores: (scores.max(0).indices == 3).nonzero(), 1),
        (lambda scores: (scores.softmax(-1).multinomial(2) != 3).nonzero(), ROWS * 2 * 7 // 8),
        (lambda scores: (scores.sort(-1).indices[:, :4] == 3).nonzero(), ROWS * 4 // 8),
    ],
)
def test_choices_compared_with_one_are_spread_evenly(rows: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    seen, guesses = answered(lambda x: rows(x @ torch.empty(WIDTH, 8)).shape[0])
    assert seen == count
    assert guesses == ("a mask over choices of the model is taken as evenly spread",)


def test_values_that_are_known_are_not_guessed() -> None:
    def masks(x: torch.Tensor) -> Any:
        lengths = torch.tensor([3, 5, 2])
        mask = torch.arange(WIDTH) < lengths[:, None]
        return mask.sum().item(), tuple(mask.nonzero().shape), tuple(x[:3][mask].shape), lengths.cumsum(0).tolist()

    assert answered(masks) == ((10, (10, 2), (10,), [3, 8, 10]), ())


def test_an_in_place_update_by_an_activation_keeps_the_known_value() -> None:
    def mixed(x: torch.Tensor) -> int:
        finished = torch.zeros(ROWS, dtype=torch.bool)
        finished.logical_or_(x[:, 0] > 3)
        return int(finished.sum())

    assert answered(mixed) == (0, ())


def test_large_arrays_are_not_made_up() -> None:
    with pytest.raises(NotImplementedError, match="19200 values"):
        answered(lambda x: x.numpy())


def test_known_values_accompany_shape_tensors_on_a_missing_device() -> None:
    tracer = Tracer(Ledger(), device_type="vulkan")  # any device that torch knows and this machine has not
    with tracer:
        lengths = torch.arange(4, device="vulkan") + 1
        mask = torch.arange(6, device="vulkan") < lengths.unsqueeze(1)
        picked = torch.empty(4, 6, device="vulkan").masked_select(mask)
        lengths.mul_(2)
        total = mask.sum()
        assert isinstance(total, ShapeTensor)
        assert total.value is not None
        assert (lengths.tolist(), total.value.item(), tuple(picked.shape)) == ([2, 4, 6, 8], 10, (10,))
        assert picked.device.type == "vulkan"
    assert not tracer.facts.guesses
    assert tracer.ledger.events(), "what lies on the device was counted"
