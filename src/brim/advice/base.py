"""A piece of advice, and the order in which pieces are given. Knows no rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from brim.advice.run_reader import Run, value_at
from brim.units import number

__all__ = ["LEAST_GAIN", "Advice", "figure", "on_cuda", "ordered"]

LEAST_GAIN = 1.03  # a smaller one is within what two runs of the same differ by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change, why, and what it should bring.

    `settings` has the names that callers write: those of flags for an evaluation, dotted keys for a training run. None
    takes a setting back to its default.
    """

    name: str
    cause: str
    evidence: str
    expected_gain: float | None = None  # factor of throughput; None: not known
    measured: bool = False  # whether a measurement is behind the gain
    at_least: bool = False  # the gain is a lower bound: how much more there is, only a trial tells
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variables of the command
    processes: int | None = None  # that torchrun starts
    command: str = ""
    repairs_answers: bool = False  # the answers of the run are wrong without it: it stands first
    changes_answers: bool = False

    @property
    def gain_text(self) -> str:
        """As `1.8× expected`; a gain that no measurement is behind says so."""
        if self.repairs_answers:
            return "repairs answers"
        if self.expected_gain is None:
            return "gain not measured"
        gain = f"{'at least ' if self.at_least else ''}{self.expected_gain:.2g}× expected"
        return gain if self.measured else f"{gain}, not measured{': --try measures it' if self.at_least else ''}"

    @property
    def can_be_tried(self) -> bool:
        """Whether it is a matter of settings alone, so that this process can run with it."""
        return bool(self.settings) and not self.environment and self.processes is None

    def to_json(self) -> dict[str, Any]:
        """The piece as plain JSON values."""
        return {**dataclasses.asdict(self), "settings": dict(self.settings), "gain_text": self.gain_text}


def ordered(pieces: Iterable[Advice | None]) -> list[Advice]:
    """Wrong answers first, then by expected gain; a gain that is not known stands last."""
    found = [one for one in pieces if one is not None]
    kept = [one for one in found if one.expected_gain is None or one.expected_gain >= LEAST_GAIN]
    return sorted(
        kept, key=lambda one: (not one.repairs_answers, one.expected_gain is None, -(one.expected_gain or 0.0))
    )


def figure(run: Run, path: str) -> float | None:
    """A number of the summary at `a.b`; None where an older record lacks it."""
    return number(value_at(run.summary, path))


def on_cuda(run: Run) -> bool:
    """Whether the run was on an NVIDIA card: its environment has the switches of cuDNN."""
    return "cudnn" in run.environment
