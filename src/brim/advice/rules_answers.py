"""Advice on `max_new_tokens`: from how long the answers really are."""

from __future__ import annotations

import dataclasses
from typing import Any

from brim.advice.answer_lengths import AnswerLengths, reference_lengths, room_for, tokens_of, written_lengths
from brim.advice.base import Advice, figure
from brim.advice.batch_times import gain_of_larger_batches
from brim.advice.run_reader import Run, entries, mapping
from brim.settings.eval_settings import EvalRequest
from brim.units import fraction_text, number

__all__ = ["expected_answers", "long_limit", "truncated_answers"]

MOST_TRUNCATED = 0.001  # of the answers: a limit that covers 99.9 % is long enough
FULL_FRACTION = 0.7  # of the memory limit: a run that used as much was bound by memory
SPARE = 1.5  # of reference answers: a model may write more words than they have


def truncated_answers(run: Run) -> Advice | None:
    """Answers that were cut off: the limit must be raised, whatever that costs."""
    written, limit = _written(run)
    if written is None or limit is None or written.truncated <= MOST_TRUNCATED * len(written.lengths):
        return None
    references = reference_lengths(run)
    most = written.truncated > len(written.lengths) / 2  # then twice the limit would hardly change it
    wished = max((4 if most else 2) * limit, room_for(references.covers(0.999)) if references else 0)
    known = f"; of the reference answers {references.text}" if references else ""
    short = references is not None and references.covers(0.999) < limit
    hint = "; they are shorter than the limit, so the model may also lack a text that ends it (--stop)" if short else ""
    return Advice(
        name="truncated_answers",
        cause=f"answers are cut off at {limit} tokens",
        evidence=f"{written.truncated:,} of {len(written.lengths):,} answers "
        f"({fraction_text(written.truncated / len(written.lengths))}) did not end within {limit} tokens{known}{hint}",
        settings={"max_tokens": wished},
        repairs_answers=True,
        changes_answers=True,
    )


def long_limit(run: Run) -> Advice | None:
    """Room for tokens that no answer uses: every sample costs as much memory as its longest possible answer."""
    written, limit = _written(run)
    if written is None or limit is None or written.truncated:
        return None
    enough = room_for(written.lengths[-1])
    if enough > limit // 2:
        return None
    factor = _cost_factor(run, limit, enough)
    gain, measured = (None, False) if factor is None else gain_of_larger_batches(run, factor)
    why = "" if gain is not None else "; whether memory bound the batch size is not known, so the gain is not measured"
    smaller = f"; a sample costs {factor:.1f} times less of a batch" if factor is not None else ""
    return Advice(
        name="max_new_tokens",
        cause=f"room for {limit} new tokens, of which answers use {written.lengths[-1]} at most",
        evidence=f"{len(written.lengths):,} answers, none cut off: {written.text}{smaller}{why}",
        expected_gain=gain,
        measured=measured,
        settings={"max_tokens": enough},
    )


def expected_answers(request: EvalRequest, references: list[Any]) -> Advice | None:
    """Before a run: the limit that reference answers need."""
    limit = _limit({**dataclasses.asdict(request)}, request.task)
    found = tokens_of(request.model, references, trust=request.trust_remote_code)
    if found is None or limit is None:
        return None
    needed = room_for(found.covers(0.999))
    enough = room_for(round(SPARE * found.covers(0.999)))
    if needed <= limit <= 2 * enough:
        return None
    low = needed > limit
    return Advice(
        name="truncated_answers" if low else "max_new_tokens",
        cause=f"answers of up to {limit} tokens, while reference answers need {needed}",
        evidence=f"of {len(found.lengths):,} reference answers {found.text}; the model's own are not known before a "
        "run: not measured",
        settings={"max_tokens": enough},
        repairs_answers=low,
        changes_answers=True,
    )


def _written(run: Run) -> tuple[AnswerLengths | None, int | None]:
    limit = _limit(run.request, run.request.get("task")) if run.kind == "eval" else None
    return (None, None) if limit is None else (written_lengths(run), limit)


def _limit(request: Any, task: Any) -> int | None:
    """The limit in force; None for a task that writes nothing."""
    asked = request.get("max_new_tokens") or mapping(request.get("knobs")).get("max_new_tokens")
    if asked is not None:
        return int(asked) if str(asked).isdecimal() else None
    if task not in (None, "generate", "vqa"):
        return None
    from brim.tasks.generate import GenerateTask, VqaTask

    return VqaTask.default_new_tokens if task == "vqa" else GenerateTask.default_new_tokens


def _cost_factor(run: Run, limit: int, enough: int) -> float | None:
    """How many times more samples a batch holds; None where neither memory nor a cap on tokens bound it."""
    peak, most = figure(run, "peak_reserved_bytes"), run.limit_bytes
    full = peak is not None and most is not None and peak >= FULL_FRACTION * most
    if not (full or run.request.get("cost_cap") or figure(run, "oom_events")):
        return None
    costs = [
        cost / size
        for probe in entries(run.plan.get("probes"))
        if (cost := number(probe.get("cost"))) and (size := number(probe.get("batch_size")))
    ]
    each = max(costs, default=0.0)
    return each / (each - limit + enough) if each > limit else None
