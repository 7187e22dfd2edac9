"""VQA accuracy, as the official evaluation of the VQA challenge computes it, and its simple variant.

Official (`vqa_accuracy`), for a question with ten human answers:

1. New lines and tabs become spaces, the ends are stripped, in the prediction and in the answers.
2. The prediction is normalised (`normalise_vqa_answer`). The answers get its punctuation step alone, and only where
   the people were not unanimous: the official files hold them in lower case with digits already.
3. Each person is left out once; the score against the other nine is min(matches / 3, 1); the mean of the ten counts.

This is the evaluation as released with VQA v1 and v2. A later revision of the official code normalises both sides
fully where people disagree and neither where they are unanimous, so that `Yes.` scores 0 against ten times `yes`;
papers report figures of both.

Simple (`vqa_accuracy_simple`): both sides always normalised, and min(matches / 3, 1) over all the answers at once.

With fewer than four answers, which the official data never has, there cannot be three matches among the others: then
as many matches as there are others score 1. A single answer is normalised and compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brim.metrics.base import Metric, as_text

__all__ = ["CONTRACTIONS", "VqaAccuracy", "VqaAccuracySimple", "leave_one_out_accuracy", "normalise_vqa_answer"]

_ENOUGH_MATCHES = 3

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA_DIGIT = re.compile(r"\d,\d", re.ASCII)
_LOOSE_PERIOD = re.compile(r"\.(?!\d)", re.ASCII)
_MOST_PERIODS = 32  # the official code hands a flag to `sub` where the count goes; later periods stay

_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = {
    "none": "0",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}

# What the official table corrects to. Words that are also something else without their apostrophe (its, were,
# well, ill, shell, wed, shed, lets) are not in it, nor is anything with I: the text is in lower case by then.
_CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _without_one_apostrophe(word: str) -> Iterator[str]:
    for place, character in enumerate(word):
        if character == "'":
            yield word[:place] + word[place + 1 :]


# A form that lacks one of its apostrophes gets it back: couldnt've and couldn'tve become couldn't've; couldntve stays.
CONTRACTIONS: Mapping[str, str] = {
    **{lacking: word for word in _CONTRACTED.split() for lacking in _without_one_apostrophe(word)},
    "somebody'd": "somebodyd",  # the wrong way round in the official table, and so here
}


def normalise_vqa_answer(text: str) -> str:
    """The official normalisation: punctuation, lower case, number words, articles, contractions, in this order."""
    words = (_NUMBERS.get(word, word) for word in _without_punctuation(_one_line(text)).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def leave_one_out_accuracy(matches: int, answers: int) -> float:
    """Mean over the people left out of min(matches among the others / 3, 1): 0, 0.3, 0.6, 0.9, 1 for ten answers."""
    enough = min(_ENOUGH_MATCHES, answers - 1)
    if enough == 0:
        return float(matches)
    left_out_agrees = matches * min(matches - 1, enough)
    left_out_differs = (answers - matches) * min(matches, enough)
    return (left_out_agrees + left_out_differs) / (answers * enough)


class VqaAccuracy(Metric):
    """The official accuracy: leave one person out; the prediction normalised, answers only of punctuation."""

    name = "vqa_accuracy"
    aliases = ("vqa", "vqa_score")

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        answers = [_one_line(as_text(reference)) for reference in references]
        if len(answers) == 1:
            answers = [normalise_vqa_answer(answers[0])]
        elif len(set(answers)) > 1:
            answers = [_without_punctuation(answer) for answer in answers]
        given = normalise_vqa_answer(as_text(prediction))
        return leave_one_out_accuracy(answers.count(given), len(answers))


class VqaAccuracySimple(Metric):
    """The usual shortcut: min(matches / 3, 1) over all answers, always normalised."""

    name = "vqa_accuracy_simple"
    aliases = ("vqa_simple",)

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        answers = [normalise_vqa_answer(as_text(reference)) for reference in references]
        matches = answers.count(normalise_vqa_answer(as_text(prediction)))
        return min(matches / min(_ENOUGH_MATCHES, len(answers)), 1.0)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def _without_punctuation(text: str) -> str:
    """A mark that touches a space anywhere in the text goes, all of it; another becomes a space.

    With digit-comma-digit anywhere (1,000) every mark goes. Then periods that no digit follows go (1.5 keeps its own).
    """
    has_thousands = _DIGIT_COMMA_DIGIT.search(text) is not None
    cleaned = text
    for mark in _PUNCTUATION:
        goes = has_thousands or f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if goes else " ")
    return _LOOSE_PERIOD.sub("", cleaned, count=_MOST_PERIODS)
