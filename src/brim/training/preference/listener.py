"""What a preference training tells whoever watches it."""

from __future__ import annotations

from brim.training.fast_path.task import RunsListener
from brim.training.preference.table import Cell

__all__ = ["DpoListener"]


class DpoListener(RunsListener):
    """Told of the run as it goes; does nothing by itself."""

    def opened(self, *, data: str, encoder: str, counts: dict[str, int], width: int) -> None:
        """A data set's features are there."""

    def planned(self, total: int, done: int) -> None:
        """So many cells make up the table, of which so many were done by an earlier run."""

    def encoding(self, *, data: str, encoder: str, done: int, total: int) -> None:
        """So many molecules of a data set are encoded."""

    def training(self, *, data: str, encoder: str, method: str, runs: int) -> None:
        """So many runs begin to train."""

    def cells(self, cells: list[Cell]) -> None:
        """These cells are done."""
