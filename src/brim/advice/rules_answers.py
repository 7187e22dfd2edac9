"""Advice on `max_new_tokens`: how long answers are, in tokens, and what limit that asks for.

Lengths are those of the answers that a run wrote, and of the reference answers as a model reads them: its tokenizer is
read without weights, and without a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from brim.advice.base import Advice, figure
from brim.advice.batch_times import gain_of_larger_batches
from brim.advice.run_reader import Run, entries, mapping
from brim.errors import BrimError
from brim.settings.eval_settings import EvalRequest
from brim.units import fraction_text, number

__all__ = ["AnswerLengths", "expected_answers", "long_limit", "tokens_of", "truncated_answers"]

MOST_TRUNCATED = 0.001  # of the answers: a limit that covers 99.9 % is long enough
FULL_FRACTION = 0.7  # of the memory limit: a run that used as much was bound by memory
SPARE = 1.5  # of reference answers: a model may write more words than they have
MOST_REFERENCES = 20_000  # enough for the 99.9th of a hundred percent
STEP = 8  # a limit is a multiple of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerLengths:
    """Lengths in ascending order, and how many of the answers were cut off at the limit."""

    lengths: tuple[int, ...]
    truncated: int = 0

    def covers(self, fraction: float) -> int:
        """The smallest limit that this fraction of the answers stay within."""
        place = max(-(-len(self.lengths) * round(fraction * 1000) // 1000), 1) - 1
        return self.lengths[place]

    @property
    def text(self) -> str:
        """What covers 95, 99 and 99.9 %."""
        return f"95 % have at most {self.covers(0.95)} tokens, 99 % {self.covers(0.99)}, 99.9 % {self.covers(0.999)}"


def written_lengths(run: Run) -> AnswerLengths | None:
    """The lengths of a run's answers; None where it wrote none."""
    lengths, truncated = [], 0
    for line in run.samples():
        if isinstance(line.get("tokens"), int):
            lengths.append(line["tokens"])
            truncated += bool(line.get("truncated"))
    return AnswerLengths(lengths=tuple(sorted(lengths)), truncated=truncated) if lengths else None


def reference_lengths(run: Run) -> AnswerLengths | None:
    """The longest reference answer of each sample; None where there are none, or the tokenizer cannot be read."""
    references = itertools.islice((line.get("reference") for line in run.samples()), MOST_REFERENCES)
    return tokens_of(str(run.request.get("model")), references, trust=bool(run.request.get("trust_remote_code")))


def tokens_of(model: str, references: Iterable[Any], *, trust: bool = False) -> AnswerLengths | None:
    """Lengths of reference answers, each a text or a list of accepted ones."""
    groups = [texts for texts in map(_texts, references) if texts]
    tokenizer = _tokenizer(model, trust=trust) if groups else None
    if tokenizer is None:
        return None
    flat = sorted({text for texts in groups for text in texts})
    counted = dict(zip(flat, map(len, tokenizer(flat, add_special_tokens=False)["input_ids"]), strict=True))
    return AnswerLengths(lengths=tuple(sorted(max(counted[text] for text in texts) for texts in groups)))


def room_for(longest: int) -> int:
    """The limit that leaves an answer of so many tokens the one that ends it."""
    return (longest // STEP + 1) * STEP


def _texts(reference: Any) -> Sequence[str]:
    several = reference if isinstance(reference, list | tuple) else [reference]
    return [one for one in several if isinstance(one, str) and one]


def _tokenizer(model: str, *, trust: bool) -> Any:
    from brim.models.build import resolve_model
    from brim.models.hf_loading import load_tokenizer

    try:
        name = resolve_model(model)
        return load_tokenizer(name.name, trust_remote_code=trust) if name.source == "hf" else None
    except BrimError:  # the model has gone from where the run found it: what depends on it says so
        return None


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
    pooled = run.plan.get("unit") == "kv_bytes"  # answers leave when they end: unused room costs memory, not time
    factor = None if pooled else _cost_factor(run, limit, enough)
    gain, measured = (None, False) if factor is None else gain_of_larger_batches(run, factor)
    why = "" if gain is not None else "; whether memory bound the batch size is not known, so the gain is not measured"
    if pooled:
        why = "; in a pool that is memory for keys and values, and time only where memory is short: not measured"
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
