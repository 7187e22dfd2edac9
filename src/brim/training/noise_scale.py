"""The gradient noise scale: from which batch size on more samples in a step stop helping. Pure.

A gradient over B samples has E|g|² = |G|² + S/B, where G is the true gradient and S the trace of the covariance of a
single sample's. Two batch sizes of the same step give both; their ratio S/|G|² is the batch at which noise and signal
are as large as each other (McCandlish et al. 2018). One pair is very noisy, so both are averaged before the division.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["NoiseScale"]

DECAY = 0.95  # of the running means, for each measurement
FEWEST = 8  # measurements before the scale is told


@dataclasses.dataclass(kw_only=True)
class NoiseScale:
    """Running means of |G|² and S."""

    signal: float = 0.0  # |G|², with the weight `total`
    noise: float = 0.0  # S, likewise
    total: float = 0.0  # weight of the means, so that early ones are not pulled to zero
    measurements: int = 0

    def observe(self, *, small: float, small_batch: float, large: float, large_batch: float) -> None:
        """|g|² of the mean gradient over two numbers of samples, the small ones part of the large."""
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
        """S/|G|² in samples; None before there are enough measurements, or where noise hides the signal."""
        if self.measurements < FEWEST or self.signal <= 0:
            return None
        return max(self.noise, 0.0) / self.signal

    def useful_batch(self) -> int | None:
        """The batch beyond which more samples bring less than half of what they cost: the noise scale itself."""
        value = self.value
        return None if value is None else max(round(value), 1)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)

    def report(self) -> dict[str, Any] | None:
        """What run.json says of it."""
        if self.measurements == 0:
            return None
        return {
            "noise_scale": self.value,
            "useful_batch": self.useful_batch(),
            "measurements": self.measurements,
            "gradient_square": self.signal / self.total,
            "gradient_variance": self.noise / self.total,
        }
