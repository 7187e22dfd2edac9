"""From a request for advice to the pieces, what they brought when tried, and the rounds that are kept.

A rule is a function of a finished run that gives a piece of advice or None; it reads records alone. A new one goes into
the file of its topic and is named in `RULES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from brim.advice.base import Advice, ordered
from brim.advice.before import advise_before
from brim.advice.rounds import Rounds, apply_advice, open_rounds
from brim.advice.rules_answers import long_limit, truncated_answers
from brim.advice.rules_batch import gradient_checkpointing, padding, small_batches
from brim.advice.rules_device import allocator, attention, idle_cards, precision, underfilled_card
from brim.advice.rules_time import checkpoints, loading, validation
from brim.advice.run_reader import Run, open_run
from brim.advice.run_requests import asked_settings, command_with
from brim.advice.trials import TriedAdvice, try_advice
from brim.errors import RequestError
from brim.settings.advise_settings import AdviseSettings
from brim.settings.caller import written
from brim.storage.files import write_atomic

__all__ = ["ADVICE_SCHEMA", "RULES", "AdviceResult", "advise", "advise_run"]

ADVICE_SCHEMA = "brim.advice/1"
TRIED = 3  # pieces of advice, unless they are named
RULES: tuple[Callable[[Run], Advice | None], ...] = (
    truncated_answers, long_limit, small_batches, padding, loading, validation, checkpoints, precision, attention,
    allocator, gradient_checkpointing, underfilled_card, idle_cards,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdviceResult:
    """Pieces of advice, largest expected gain first; what those that were tried brought; the rounds, if asked for."""

    subject: str
    advice: tuple[Advice, ...] = ()
    tried: tuple[TriedAdvice, ...] = ()
    rounds: Rounds | None = None
    written: Path | None = None  # the settings file
    notes: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": ADVICE_SCHEMA,
            "of": self.subject,
            "advice": [one.to_json() for one in self.advice],
            "tried": [one.to_json() for one in self.tried],
            "rounds": None if self.rounds is None else self.rounds.to_json()["rounds"],
            "written": None if self.written is None else str(self.written),
            "notes": list(self.notes),
        }


def advise(settings: AdviseSettings, *, note: Callable[[str], None] | None = None) -> AdviceResult:
    """Advice for a run or before one; tries it, applies it, shows or takes back rounds where that is asked for."""
    report = note or _silent
    if settings.run is None:
        pieces, notes = advise_before(settings.request, gpu=settings.gpu, note=report)
        return AdviceResult(subject=f"{settings.model} on {settings.data}", advice=tuple(pieces), notes=tuple(notes))
    run = open_run(settings.run)
    if settings.history or settings.rollback is not None or settings.against is not None:
        return _rounds(run, settings)
    pieces = advise_run(run)
    taken = _taken(pieces, settings.take)
    tried: list[TriedAdvice] = []
    notes = []
    if settings.try_out:
        usable = [one for one in taken[: None if settings.take else TRIED] if one.can_be_tried]
        notes = [f"{one.name} is not tried: it needs other processes" for one in taken[:TRIED] if one not in usable]
        tried = try_advice(run, usable, samples=settings.try_samples, repeats=settings.repeats, note=report)
    rounds = None
    if settings.apply is not None:
        chosen = taken if settings.take else [one for one in taken if one.settings][:1]
        rounds = apply_advice(run, chosen, settings.apply)
    return AdviceResult(
        subject=str(run.folder), advice=tuple(pieces), tried=tuple(tried), rounds=rounds, written=settings.apply,
        notes=tuple(notes),
    )  # fmt: skip


def advise_run(run: Run) -> list[Advice]:
    """All pieces of advice for a run, the largest expected gain first, each with its command."""
    asked_settings(run)  # refuses a run that has no such settings
    pieces = ordered(rule(run) for rule in RULES)
    return [dataclasses.replace(one, command=command_with(run, one)) for one in pieces]


def _silent(line: str) -> None:
    """Where nobody watches."""
    del line


def _taken(pieces: Sequence[Advice], names: Sequence[str]) -> list[Advice]:
    known = {one.name: one for one in pieces}
    for name in names:
        if name not in known:
            raise RequestError(
                f"{written('take', name)}: there is no such advice for this run; there is {', '.join(known) or 'none'}"
            )
    return [known[name] for name in names] if names else list(pieces)


def _rounds(run: Run, settings: AdviseSettings) -> AdviceResult:
    """The rounds with what each brought; after a roll-back, those that are left in force."""
    later = None if settings.against is None else open_run(settings.against)
    rounds = open_rounds(run).filled(against=later)
    if settings.rollback is not None:
        rounds = rounds.rolled_back()
        write_atomic(settings.rollback, rounds.settings_text())
    if len(rounds.rounds) > 1:
        rounds.write()
    return AdviceResult(subject=str(run.folder), rounds=rounds, written=settings.rollback)
