"""Rounds of advice that are kept: the run as it was, round 1, round 2 …, with what each brought.

`rounds.json` (`schema: "brim.rounds/1"`) lies in the folder of the original run and is written whole. A later run
belongs to a round if it was asked for just what the round's settings say, or if it is named.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.base import Advice, figure
from brim.advice.batch_times import runs_beside
from brim.advice.run_reader import Run, mapping, throughput_curve
from brim.advice.run_requests import asked_settings, changed_settings, settings_text
from brim.errors import BrimError, RequestError
from brim.intervals import Interval, curve_speed_up
from brim.storage.files import read_json, write_atomic, write_json

__all__ = ["ROUNDS_SCHEMA", "Rounds", "apply_advice", "open_rounds"]

ROUNDS_SCHEMA = "brim.rounds/1"
FILE = "rounds.json"
_SAME_MEMORY = ("loading", "validation", "checkpoints")
_RISKS = {
    "checkpoints": "a killed run loses more steps",
    "validation": "the best epoch is chosen among fewer",
    "batch_size": "more memory; batches that do not fit are split",
    "padding": "more memory; batches that do not fit are split",
    "loading": "more host memory",
    "max_new_tokens": "longer answers on other data are cut off",
    "truncated_answers": "slower: answers are longer",
    "precision": "answers may change",
    "gradient_checkpointing": "more time a sample",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of one original run, the original first."""

    original: Run
    rounds: tuple[Mapping[str, Any], ...]

    @property
    def in_force(self) -> Mapping[str, Any]:
        """The last round that was not taken back."""
        return next(one for one in reversed(self.rounds) if not one["rolled_back"])

    def to_json(self) -> dict[str, Any]:
        """The document of rounds.json."""
        return {"schema": ROUNDS_SCHEMA, "rounds": [dict(one) for one in self.rounds]}

    def write(self) -> None:
        """Keep them, whole."""
        write_json(self.original.folder / FILE, self.to_json())

    def filled(self, *, against: Run | None = None) -> Rounds:
        """With what each round brought, where a run with its settings has ended; `against` is the last round's."""
        rounds, known = list(self.rounds), list(runs_beside(self.original))
        for place, one in enumerate(rounds[1:], start=1):
            found = against if against is not None and one is self.in_force else None
            found = found or next((run for run in known if _has_settings(run, self.original, one)), None)
            if found is not None:
                rounds[place] = {**one, **_measured(found, self.original)}
        return dataclasses.replace(self, rounds=tuple(rounds))

    def with_round(self, run: Run, pieces: Sequence[Advice], file: Path) -> Rounds:
        """With one more: the settings in force, changed by these pieces."""
        settings = dict(mapping(self.in_force["settings"]))
        for piece in reversed(pieces):  # where two change the same setting, the first has its way
            settings |= piece.settings
        touched = [piece.name for piece in pieces if piece.name not in _SAME_MEMORY]
        gains = [piece.expected_gain for piece in pieces if piece.expected_gain is not None]
        new = {
            **_blank(len(self.rounds)),
            "advice": [piece.name for piece in pieces],
            "settings": settings,
            "file": str(file),
            "expected_gain": max(gains, default=None),
            "memory_forecast_bytes": run.limit_bytes if touched else figure(run, "peak_reserved_bytes"),
            "risk": "; ".join(dict.fromkeys(_RISKS.get(piece.name, "not known") for piece in pieces)),
        }
        return dataclasses.replace(self, rounds=(*self.rounds, new))

    def rolled_back(self) -> Rounds:
        """Without the last round that is in force; the original cannot be taken back."""
        last = self.in_force
        if last["round"] == 0:
            raise RequestError(f"{self.original.folder}: no round is in force, so there is none to go back from")
        rounds = tuple({**one, "rolled_back": True} if one is last else one for one in self.rounds)
        return dataclasses.replace(self, rounds=rounds)

    def settings_text(self) -> str:
        """The file of the settings in force."""
        one = self.in_force
        name = "the original run" if one["round"] == 0 else f"round {one['round']}: {', '.join(one['advice'])}"
        return settings_text(self.original, mapping(one["settings"]), title=f"{name} of {self.original.folder.name}")


def open_rounds(run: Run) -> Rounds:
    """The rounds that a run belongs to: its own, or those of a run beside it; a run without any is an original."""
    for original in (run, *runs_beside(run)):
        stored = read_json(original.folder / FILE)
        if not isinstance(stored, dict) or stored.get("schema") != ROUNDS_SCHEMA:
            continue
        rounds = Rounds(original=original, rounds=tuple(stored["rounds"]))
        same = run.folder.resolve() == original.folder.resolve()
        if same or any(_has_settings(run, original, one) for one in rounds.rounds[1:]):
            return rounds
    return Rounds(original=run, rounds=({**_blank(0), **_measured(run, run), "risk": "none"},))


def apply_advice(run: Run, pieces: Sequence[Advice], file: Path) -> Rounds:
    """Write the settings of these pieces to a file, and keep the round."""
    usable = [piece for piece in pieces if piece.settings]
    if not usable:
        raise RequestError(f"{run.folder}: no piece of advice changes a setting, so there is nothing to apply")
    rounds = open_rounds(run).filled().with_round(run, usable, file)
    write_atomic(file, rounds.settings_text())
    rounds.write()
    return rounds


def _blank(number: int) -> dict[str, Any]:
    empty = (
        "file", "run", "expected_gain", "memory_forecast_bytes", "memory_measured_bytes", "samples_per_second",
        "seconds", "gain",
    )  # fmt: skip
    at = datetime.datetime.now(datetime.UTC).isoformat()
    return {"round": number, "advice": [], "settings": {}, "kept_at": at, "rolled_back": False, "risk": "",
            **dict.fromkeys(empty)}  # fmt: skip


def _measured(run: Run, original: Run) -> dict[str, Any]:
    gain = None if run.folder.resolve() == original.folder.resolve() else _gain(original, run)
    return {
        "run": str(run.folder),
        "memory_measured_bytes": figure(run, "peak_reserved_bytes"),
        "samples_per_second": figure(run, "samples_per_second"),
        "seconds": figure(run, "seconds"),
        "gain": None if gain is None else gain.to_json(),
    }


def _gain(before: Run, after: Run) -> Interval | None:
    """Part by part where both recorded their throughput over the same work, else once."""
    found = None
    if before.kind == "eval" and figure(before, "num_samples") == figure(after, "num_samples"):
        found, _ = curve_speed_up(throughput_curve(before.summary), throughput_curve(after.summary))
    if found is not None:
        return found
    rates = [_whole_rate(run) for run in (before, after)]
    return Interval(value=rates[1] / rates[0]) if all(rates) else None


def _whole_rate(run: Run) -> float:
    """Samples a second; of a training run with validation and checkpoints."""
    if run.kind == "eval":
        return figure(run, "samples_per_second") or 0.0
    seconds = sum(figure(run, name) or 0.0 for name in ("seconds", "eval_seconds", "checkpoint_seconds"))
    return (figure(run, "samples") or 0.0) / seconds if seconds else 0.0


def _has_settings(run: Run, original: Run, one: Mapping[str, Any]) -> bool:
    """Whether a run was asked for what a round says; data may be named by another path."""
    if run.kind != original.kind or run.folder.resolve() == original.folder.resolve():
        return False
    try:
        asked, wished = asked_settings(run), changed_settings(original, mapping(one["settings"]))
    except BrimError:
        return False
    return _comparable(asked) == _comparable(wished)


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    auto = {name: value for name, value in settings.items() if value != "auto"}
    return {name: Path(value).name if name in ("data", "model") else value for name, value in auto.items()}
