"""How long answers are, in tokens: those that a run wrote, and the reference answers as a model reads them.

A tokenizer is read without its model's weights, and without a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from brim.advice.run_reader import Run
from brim.errors import BrimError

__all__ = ["AnswerLengths", "reference_lengths", "room_for", "tokens_of", "written_lengths"]

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
