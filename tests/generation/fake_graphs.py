"""CUDA graphs without CUDA: a step is captured by keeping it, and replayed by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class FakeGraph:
    """Replays a step by running it."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._step()


def fake_captures(monkeypatch: pytest.MonkeyPatch, module: str, make: Callable[[Callable[[], Any]], Any]) -> None:
    """Let a module capture by `make`, on a device that is said to have graphs."""
    monkeypatch.setattr(f"{module}.graphs_work_on", lambda device: True)
    monkeypatch.setattr(f"{module}.shared_pool", lambda device: object())
    monkeypatch.setattr(f"{module}.capture", lambda step, pool: make(step))
