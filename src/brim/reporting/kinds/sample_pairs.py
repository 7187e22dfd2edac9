"""Two runs on the same samples: differences sample by sample, and which answers turned right or wrong. Pure.

Of the first run only scores and answers are held, the second is read past them: runs may have a million samples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from brim.metrics.base import mean_and_spread
from brim.units import number

__all__ = ["RIGHT_FROM", "PairedSamples", "clipped", "difference_of", "pair_samples"]

RIGHT_FROM = 0.5  # a sample with this score or more counts as right
EXAMPLES = 10  # of each kind
LONGEST = 300  # characters of an input or an answer

Line = Mapping[str, Any]  # of samples.jsonl


@dataclasses.dataclass(kw_only=True)
class PairedSamples:
    """What two runs have in common."""

    common: int = 0
    only_first: int = 0
    only_second: int = 0
    changes: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # second − first, by metric
    both_right: int = 0
    both_wrong: int = 0
    gained: int = 0  # right in the second alone
    lost: int = 0  # right in the first alone
    same_prediction: int = 0
    examples: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=lambda: {"lost": [], "gained": []})

    def agreement(self, metric: str) -> dict[str, Any]:
        """The counts and the first samples that turned, as a document holds them."""
        names = ("both_right", "both_wrong", "gained", "lost", "same_prediction", "examples")
        return {"metric": metric, "right_from": RIGHT_FROM, **{name: getattr(self, name) for name in names}}


def pair_samples(
    first: Iterable[Line], second: Iterable[Line], metrics: Sequence[str], *, same_content: bool = False
) -> PairedSamples:
    """Pair lines of the same id, the n-th of a name with the n-th; the first metric says what is right.

    With `same_content` only those whose input and reference are the same: ids of two data sets may be the same numbers.
    """
    before = {
        name: (_scores(line, metrics), line.get("prediction"), _content(line) if same_content else None)
        for name, line in _named(first)
    }
    paired = PairedSamples(changes={metric: [] for metric in metrics})
    for name, line in _named(second):
        if name not in before or (same_content and before[name][2] != _content(line)):
            paired.only_second += 1
            continue
        scores, prediction, _ = before.pop(name)
        paired.common += 1
        paired.same_prediction += prediction == line.get("prediction")
        _count(paired, line, prediction, scores, _scores(line, metrics))
    paired.only_first = len(before)
    return paired


def difference_of(changes: Sequence[float]) -> dict[str, Any] | None:
    """Their mean with its 95 % interval; None where there are none."""
    if not changes:
        return None
    spread = mean_and_spread(changes)
    return {"difference": spread["mean"], "ci95": spread["ci95"], "count": len(changes)}


def clipped(value: object) -> str | None:
    """Text of anything, cut where it would fill the page."""
    if value is None:
        return None
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return written if len(written) <= LONGEST else written[:LONGEST] + " …"


def _count(
    paired: PairedSamples, line: Line, prediction: object, before: Sequence[float | None], after: Sequence[float | None]
) -> None:
    for metric, was, now in zip(paired.changes, before, after, strict=True):
        if was is not None and now is not None:
            paired.changes[metric].append(now - was)
    if not before or before[0] is None or after[0] is None:
        return
    was_right, is_right = before[0] >= RIGHT_FROM, after[0] >= RIGHT_FROM
    kind = ("both_right" if is_right else "lost") if was_right else ("gained" if is_right else "both_wrong")
    setattr(paired, kind, getattr(paired, kind) + 1)
    if kind in paired.examples and len(paired.examples[kind]) < EXAMPLES:
        paired.examples[kind].append(
            {
                "id": line.get("id"),
                "input": clipped(line.get("input")),
                "reference": clipped(line.get("reference")),
                "first": {"prediction": clipped(prediction), "score": before[0]},
                "second": {"prediction": clipped(line.get("prediction")), "score": after[0]},
            }
        )


def _named(lines: Iterable[Line]) -> Iterator[tuple[tuple[str, int], Line]]:
    """Every line with its id and how often that came before."""
    seen: dict[str, int] = {}
    for line in lines:
        name = str(line.get("id"))
        seen[name] = seen.get(name, 0) + 1
        yield (name, seen[name]), line


def _content(line: Line) -> int:
    return hash((str(line.get("input")), str(line.get("reference"))))


def _scores(line: Line, metrics: Sequence[str]) -> tuple[float | None, ...]:
    scores = line.get("scores")
    known = scores if isinstance(scores, dict) else {}
    return tuple(number(known.get(metric)) for metric in metrics)
