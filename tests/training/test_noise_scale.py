"""The gradient noise scale, and the effective batch that grows with it."""

from __future__ import annotations

import numpy
import pytest

from brim.training.effective_batch import PATIENCE, BatchGrowth, NoiseScale


def measured(signal: float, variance: float, *, small: int = 8, large: int = 64, times: int = 400) -> NoiseScale:
    """The noise scale of random gradients with |G|² = `signal` and a covariance of trace `variance`."""
    draw = numpy.random.default_rng(0)
    dimensions = 50
    true = numpy.full(dimensions, (signal / dimensions) ** 0.5)
    scale = NoiseScale()
    for _ in range(times):
        samples = true + draw.standard_normal((large, dimensions)) * (variance / dimensions) ** 0.5
        scale.observe(
            small=float((samples[:small].mean(axis=0) ** 2).sum()), small_batch=small,
            large=float((samples.mean(axis=0) ** 2).sum()), large_batch=large,
        )  # fmt: skip
    return scale


@pytest.mark.parametrize(("signal", "variance"), [(4.0, 40.0), (1.0, 200.0), (9.0, 9.0)])
def test_noise_scale_of_known_gradients(signal: float, variance: float) -> None:
    scale = measured(signal, variance)
    assert scale.value == pytest.approx(variance / signal, rel=0.35)
    report = scale.report()
    assert report is not None
    assert report["gradient_square"] == pytest.approx(signal, rel=0.3)
    assert report["useful_batch"] == scale.useful_batch()


def test_formulas_are_exact_for_expected_values() -> None:
    """Measurements are E|g|² = |G|² + S/B exactly."""
    scale = NoiseScale()
    for _ in range(8):
        scale.observe(small=2.0 + 96.0 / 8, small_batch=8, large=2.0 + 96.0 / 32, large_batch=32)
    assert scale.value == pytest.approx(48.0)
    assert scale.useful_batch() == 48


def test_no_value_after_few_measurements_or_for_one_batch_size() -> None:
    scale = NoiseScale()
    assert scale.report() is None
    scale.observe(small=1.0, small_batch=8, large=1.0, large_batch=8)
    assert scale.measurements == 0
    for _ in range(3):
        scale.observe(small=3.0, small_batch=2, large=2.0, large_batch=4)
    assert scale.value is None


def known(value: float) -> NoiseScale:
    scale = NoiseScale()
    for _ in range(10):
        scale.observe(small=1.0 + value / 2, small_batch=2, large=1.0 + value / 4, large_batch=4)
    assert scale.value == pytest.approx(value)
    return scale


def grown(growth: BatchGrowth, noise: NoiseScale, times: int) -> list[int]:
    return [batch for _ in range(times) if (batch := growth.measured(noise)) is not None]


def test_the_batch_doubles_up_to_the_noise_scale() -> None:
    growth = BatchGrowth(batch=32, ceiling=100_000)
    assert grown(growth, known(300.0), 10 * PATIENCE) == [64, 128, 256]
    assert growth.batch == 256


def test_the_batch_never_exceeds_the_data() -> None:
    assert grown(BatchGrowth(batch=32, ceiling=100), known(1e6), 10 * PATIENCE) == [64, 100]


def test_beyond_noise_ignores_the_noise_scale() -> None:
    assert grown(BatchGrowth(batch=32, ceiling=256), known(10.0), 10 * PATIENCE) == []
    asked = BatchGrowth(batch=32, ceiling=256, beyond_noise=True)
    assert grown(asked, known(10.0), 10 * PATIENCE) == [64, 128, 256]


def test_the_batch_stays_while_the_noise_scale_is_unknown() -> None:
    assert grown(BatchGrowth(batch=32, ceiling=256), NoiseScale(), 10 * PATIENCE) == []
