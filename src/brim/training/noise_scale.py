"""The gradient noise scale: the batch size beyond which more samples in a step help less than they cost. No torch.

A gradient over B samples has E|g|² = |G|² + S/B, where G is the true gradient and S the trace of the covariance of the
gradients of single samples. |g|² at two batch sizes of the same step gives |G|² and S. At a batch of S/|G|², noise and
signal are equally large (McCandlish et al. 2018). A single pair is very noisy, so |G|² and S are averaged over steps
before the division.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["NoiseScale"]

DECAY = 0.95  # of the running means, with each measurement
MIN_MEASUREMENTS = 8  # before there is a value


@dataclasses.dataclass(kw_only=True)
class NoiseScale:
    """Running means of |G|² and S."""

    signal: float = 0.0  # decaying sum of |G|²
    noise: float = 0.0  # decaying sum of S
    total: float = 0.0  # decaying sum of ones: the sums are divided by it
    measurements: int = 0

    def observe(self, *, small: float, small_batch: float, large: float, large_batch: float) -> None:
        """Add a measurement: |g|² of the mean gradient over a small batch and over a large one that contains it."""
        if not 0 < small_batch < large_batch:
            return
        signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        noise = (small - large) / (1 / small_batch - 1 / large_batch)
        self.signal = DECAY * self.signal + signal
        self.noise = DECAY * self.noise + noise
        self.total = DECAY * self.total + 1.0
        self.measurements += 1

    @property
    def value(self) -> float | None:
        """S/|G|² in samples; None with too few measurements, or where |G|² is too noisy to be positive."""
        if self.measurements < MIN_MEASUREMENTS or self.signal <= 0:
            return None
        return max(self.noise, 0.0) / self.signal

    def useful_batch(self) -> int | None:
        """The noise scale as a batch size: beyond it, a larger batch gains less than half of what it costs."""
        value = self.value
        return None if value is None else max(round(value), 1)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)

    def report(self) -> dict[str, Any] | None:
        """The entry in run.json; None without measurements."""
        if self.measurements == 0:
            return None
        return {
            "noise_scale": self.value,
            "useful_batch": self.useful_batch(),
            "measurements": self.measurements,
            "gradient_square": self.signal / self.total,
            "gradient_variance": self.noise / self.total,
        }
