from __future__ import annotations

import pytest

from brim.training.lr_scaling import adjusted_betas, adjusted_eps, chosen_rule, lr_factor


@pytest.mark.parametrize(
    ("rule", "optimizer", "factor"),
    [
        ("sqrt", "adamw", 2.0),
        ("linear", "adamw", 4.0),
        ("none", "sgd", 1.0),
        ("auto", "adamw", 2.0),
        ("auto", "SGD", 4.0),
        ("auto", "lion", 2.0),
    ],
)
def test_four_times_the_batch(rule: str, optimizer: str, factor: float) -> None:
    assert lr_factor(rule, 4.0, optimizer) == factor


def test_a_smaller_batch_lowers_the_rate() -> None:
    assert lr_factor("sqrt", 0.25, "adam") == 0.5
    assert chosen_rule("auto", "sgd") == "linear"


def test_adams_memory_is_kept_in_samples() -> None:
    """Malladi et al.: 1 − β becomes κ(1 − β), ε becomes ε/√κ."""
    assert adjusted_betas((0.9, 0.999), 4.0) == pytest.approx((0.6, 0.996))
    assert adjusted_eps(1e-8, 4.0) == pytest.approx(5e-9)
    assert adjusted_betas((0.9, 0.999), 100.0) == pytest.approx((0.0, 0.9))  # no memory is left, and none below it
