"""Every rule, and what they say of a run or of one that is to come.

A rule is a function of a finished run that gives a piece of advice or None; it reads records alone. A new one goes into
the file of its topic and is named here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from brim.advice.base import Advice, ordered
from brim.advice.changed_request import asked_settings, command_with
from brim.advice.rules_answers import long_limit, truncated_answers
from brim.advice.rules_batch import gradient_checkpointing, padding, small_batches
from brim.advice.rules_device import allocator, attention, idle_cards, precision, underfilled_card
from brim.advice.rules_time import checkpoints, loading, validation
from brim.advice.run_reader import Run

__all__ = ["RULES", "advise_run"]

RULES: tuple[Callable[[Run], Advice | None], ...] = (
    truncated_answers, long_limit, small_batches, padding, loading, validation, checkpoints, precision, attention,
    allocator, gradient_checkpointing, underfilled_card, idle_cards,
)  # fmt: skip


def advise_run(run: Run) -> list[Advice]:
    """All pieces of advice for a run, the largest expected gain first, each with its command."""
    asked_settings(run)  # refuses a run that has no such settings
    pieces = ordered(rule(run) for rule in RULES)
    return [dataclasses.replace(one, command=command_with(run, one)) for one in pieces]
