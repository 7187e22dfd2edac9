"""An effective batch that grows: twice as large whenever the gradient noise scale says that it pays. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from brim.training.noise_scale import NoiseScale

__all__ = ["BatchGrowth"]

PATIENCE = 16  # noise measurements between two steps up: the means have to follow


@dataclasses.dataclass(kw_only=True)
class BatchGrowth:
    """Where the effective batch stands, and when it may double.

    It never exceeds the data, nor `ceiling`; nor the noise scale, unless `beyond_noise`, which doubles as often as
    patience allows.
    """

    batch: int
    ceiling: int
    beyond_noise: bool = False
    waited: int = 0  # measurements since the last change

    def measured(self, noise: NoiseScale) -> int | None:
        """After a measurement: the new effective batch, or None while it stays."""
        self.waited += 1
        if self.waited < PATIENCE or self.batch >= self.ceiling:
            return None
        larger = min(2 * self.batch, self.ceiling)
        useful = noise.useful_batch()
        if not self.beyond_noise and (useful is None or useful < larger):
            return None
        self.batch, self.waited = larger, 0
        return larger

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"batch": self.batch, "waited": self.waited}
