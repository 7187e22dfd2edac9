"""What pieces of advice really bring: the run as it was and with each of them, in turns, on a part of its work.

A warm-up round, which also finds sizes that are left to brim, then as many as asked (`comparing/rounds.py`); a gain is
taken round by round, has an interval, and is not clear where that includes none.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.base import Advice
from brim.advice.run_reader import Run
from brim.advice.run_requests import eval_request, train_request
from brim.comparing.rounds import MeasuredRounds, RoundRules
from brim.errors import BrimError, RequestError
from brim.evaluation.compare import measured_setup
from brim.evaluation.setup import open_setup, read_data
from brim.evaluation.worker import EvalListener
from brim.intervals import Interval
from brim.models.load import KeptModel
from brim.settings.eval_settings import EvalRequest
from brim.training.run import run_training

__all__ = ["LEAST_REPEATS", "TriedAdvice", "try_advice"]

LEAST_REPEATS = 3
MOST_EPOCHS = 4  # of a training run that is tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedAdvice:
    """One piece of advice as it was measured."""

    name: str
    settings: Mapping[str, Any]
    before: tuple[float, ...]  # samples per second of the run as it was
    after: tuple[float, ...]
    gain: Interval | None = None  # None: it could not be measured
    changed_answers: int | None = None  # None: not compared
    answers: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        """What it brings, in words."""
        if self.gain is None:
            return f"could not be measured: {self.error}"
        if self.changed_answers is None:
            return self.gain.text()
        return f"{self.gain.text()}; {self.changed_answers:,} of {self.answers:,} answers differ"

    def to_json(self) -> dict[str, Any]:
        """The piece as plain JSON values."""
        gain = None if self.gain is None else self.gain.to_json()
        return {**dataclasses.asdict(self), "settings": dict(self.settings), "gain": gain, "text": self.text}


class _Subject(abc.ABC):
    """The part of a run's work that is repeated."""

    @abc.abstractmethod
    def measure(self, settings: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Samples per second with these settings, and the answers by sample."""


class _Evaluation(_Subject):
    def __init__(self, run: Run, samples: int) -> None:
        self._run, self._samples = run, samples
        self._data = read_data(eval_request(run, {}, limit=samples))
        self._loaders: dict[str, KeptModel] = {}
        self._requests: dict[str, EvalRequest] = {}  # by settings, with the size that was found

    def measure(self, settings: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """One evaluation of the part; a size that is left to brim is found by the first one, and kept."""
        key = repr(settings)
        request = self._requests.get(key) or eval_request(
            self._run, settings, limit=self._samples, use_cache=False, fail_on_oom=False
        )
        load = self._loaders.setdefault(str(request.knobs.get("dtype", request.dtype)), KeptModel())
        done = measured_setup(request, open_setup(request, data=self._data, load=load), EvalListener())
        left_to_brim = request.batch_size is None and request.cost_cap is None
        if left_to_brim and done.plan is not None and not done.plan.of_pool:
            request = dataclasses.replace(request, cost_cap=done.plan.size)
        self._requests[key] = request
        return done.summary["samples_per_second"] or 0.0, {line["id"]: line["prediction"] for line in done.lines}


class _Training(_Subject):
    def __init__(self, run: Run, samples: int, folder: Path) -> None:
        self._run, self._folder, self._count = run, folder, 0
        summary = run.summary
        effective = int(summary.get("effective_batch_size") or 1)
        each = max(samples // MOST_EPOCHS, effective)
        epochs = min(int(summary.get("epochs") or 1), max(math.ceil(samples / each), 1), MOST_EPOCHS)
        self._part = {"data.limit": each, "hp.epochs": epochs, "hp.effective_batch": effective}

    def measure(self, settings: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """One training, with validation and checkpoints."""
        self._count += 1
        request = train_request(self._run, settings, **self._part)
        done = run_training(request, output=self._folder / str(self._count)).summary
        seconds = sum(done[name] or 0.0 for name in ("seconds", "eval_seconds", "checkpoint_seconds"))
        return done["samples"] / seconds, {}


def try_advice(
    run: Run, pieces: Sequence[Advice], *, samples: int, repeats: int, note: Callable[[str], None]
) -> list[TriedAdvice]:
    """Measure pieces against the run as it was, in turns; one that fails says why and stops no other."""
    if repeats < LEAST_REPEATS:
        raise RequestError(f"repeats is {repeats}; an interval needs {LEAST_REPEATS} at least")
    settings: list[Mapping[str, Any]] = [{}, *(piece.settings for piece in pieces)]  # the first: the run as it was
    rounds = MeasuredRounds(len(settings), rules=RoundRules(least=repeats, most=repeats))
    answers: list[dict[str, Any]] = [{} for _ in settings]  # of the last round
    errors: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as place:
        subject: _Subject = _Training(run, samples, Path(place)) if run.kind == "train" else _Evaluation(run, samples)
        for turn in rounds:
            which = f"round {turn.number} of {repeats}" if turn.counts else "warm-up"
            note(f"{which}: {pieces[turn.place - 1].name if turn.place else 'the run as it was'}")
            try:
                rate, answers[turn.place] = subject.measure(settings[turn.place])
            except BrimError as error:  # it does not fit, the model has no such knob: this piece's result
                if turn.place == 0:
                    raise
                errors[turn.place] = str(error)
            else:
                if rate > 0:
                    rounds.record(turn, rate)
                else:
                    errors[turn.place] = "no rate was measured"
            if turn.place in errors:
                rounds.fail(turn)
    return [
        _tried(piece, rounds, place, old=answers[0], new=answers[place], error=errors.get(place) or errors.get(0, ""))
        for place, piece in enumerate(pieces, start=1)
    ]


def _tried(
    piece: Advice, rounds: MeasuredRounds, place: int, *, old: dict[str, Any], new: dict[str, Any], error: str
) -> TriedAdvice:
    compared = piece.changes_answers and bool(old) and not error
    return TriedAdvice(
        name=piece.name, settings=piece.settings, before=tuple(rounds.rates(0)), after=tuple(rounds.rates(place)),
        gain=None if error else rounds.speed_up(place, over=0), answers=len(old), error=error,
        changed_answers=sum(old[name] != new.get(name) for name in old) if compared else None,
    )  # fmt: skip
