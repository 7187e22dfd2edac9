"""What a profile tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brim.evaluation.worker import EvalListener

__all__ = ["ProfileListener"]


class ProfileListener(EvalListener):
    """Told of every point, and of the evaluation inside it; does nothing by itself."""

    def planned(self, points: int, done: int) -> None:
        """So many points, of which so many were finished by an earlier run."""

    def point(self, place: int, points: int, label: str) -> None:
        """A point begins; places count from 0."""

    def point_done(self, entry: Mapping[str, Any]) -> None:
        """A point has ended, well or not."""
