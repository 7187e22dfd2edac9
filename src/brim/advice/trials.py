"""What pieces of advice really bring: the run as it was and with each of them, in turns, on a part of its work.

Each runs once to warm up, which also finds sizes that are left to brim, then as often as asked; turns, so that a card
that slows down is no piece's gain. A gain has an interval, and is not clear where that includes none.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.base import Advice
from brim.advice.run_reader import Run
from brim.advice.run_requests import eval_request, train_request
from brim.errors import BrimError, RequestError
from brim.evaluation.scoring import summarise
from brim.evaluation.setup import EvaluationSetup, open_setup, read_data
from brim.evaluation.worker import EvalListener, Worker
from brim.intervals import Interval, speed_up
from brim.memory.devices import memory_of
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
    def prepare(self, settings: Mapping[str, Any]) -> Any:
        """Run once with these settings; gives what `measure` takes."""

    @abc.abstractmethod
    def measure(self, prepared: Any) -> tuple[float, dict[str, Any]]:
        """Samples per second, and the answers by sample."""


class _Evaluation(_Subject):
    def __init__(self, run: Run, samples: int) -> None:
        self._run, self._samples = run, samples
        self._data = read_data(eval_request(run, {}, limit=samples))
        self._loaders: dict[str, KeptModel] = {}

    def prepare(self, settings: Mapping[str, Any]) -> EvalRequest:
        """A size that is left to brim is found here, and kept."""
        request = eval_request(self._run, settings, limit=self._samples, use_cache=False, fail_on_oom=False)
        plan = self._evaluated(request)[2]
        found = request.batch_size is None and request.cost_cap is None and plan is not None
        return dataclasses.replace(request, cost_cap=plan.size) if found else request

    def measure(self, prepared: EvalRequest) -> tuple[float, dict[str, Any]]:
        """One evaluation of the part."""
        rate, answers, _ = self._evaluated(prepared)
        return rate, answers

    def _evaluated(self, request: EvalRequest) -> tuple[float, dict[str, Any], Any]:
        load = self._loaders.setdefault(str(request.knobs.get("dtype", request.dtype)), KeptModel())
        setup: EvaluationSetup = open_setup(request, data=self._data, load=load)
        lines: list[dict[str, Any]] = []
        with Worker(request, setup, EvalListener()) as worker:
            for some in worker.run(range(len(setup.costs))):
                lines += some
        figures = worker.figures()
        summary = summarise(worker.scorer.ordered(lines), worker.scorer, [figures])
        setup.task.release()
        memory_of(setup.device).release()
        return summary["samples_per_second"] or 0.0, {line["id"]: line["prediction"] for line in lines}, figures.plan


class _Training(_Subject):
    def __init__(self, run: Run, samples: int, folder: Path) -> None:
        self._run, self._folder, self._count = run, folder, 0
        summary = run.summary
        effective = int(summary.get("effective_batch_size") or 1)
        each = max(samples // MOST_EPOCHS, effective)
        epochs = min(int(summary.get("epochs") or 1), max(math.ceil(samples / each), 1), MOST_EPOCHS)
        self._part = {"data.limit": each, "hp.epochs": epochs, "hp.effective_batch": effective}

    def prepare(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """A first training with them, so that sizes and kernels are known."""
        self.measure(settings)
        return settings

    def measure(self, prepared: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """One training, with validation and checkpoints."""
        self._count += 1
        request = train_request(self._run, prepared, **self._part)
        done = run_training(request, output=self._folder / str(self._count)).summary
        seconds = sum(done[name] or 0.0 for name in ("seconds", "eval_seconds", "checkpoint_seconds"))
        return done["samples"] / seconds, {}


def try_advice(
    run: Run, pieces: Sequence[Advice], *, samples: int, repeats: int, note: Callable[[str], None]
) -> list[TriedAdvice]:
    """Measure pieces against the run as it was, in turns; one that fails says why and stops no other."""
    if repeats < LEAST_REPEATS:
        raise RequestError(f"repeats is {repeats}; an interval needs {LEAST_REPEATS} at least")
    with tempfile.TemporaryDirectory() as place:
        subject: _Subject = _Training(run, samples, Path(place)) if run.kind == "train" else _Evaluation(run, samples)
        original = subject.prepare({})
        prepared: list[Any] = []
        errors: dict[int, str] = {}
        for number, piece in enumerate(pieces):
            note(f"trying {piece.name}: {piece.cause}")
            prepared.append(None)
            with _kept(errors, number):
                prepared[number] = subject.prepare(piece.settings)
        before: list[float] = []
        after: list[list[float]] = [[] for _ in pieces]
        answers: dict[str, Any] = {}
        others: list[dict[str, Any]] = [{} for _ in pieces]
        for turn in range(repeats):
            note(f"turn {turn + 1} of {repeats}")
            rate, answers = subject.measure(original)
            before.append(rate)
            for number in range(len(pieces)):
                if number not in errors:
                    with _kept(errors, number):
                        rate, others[number] = subject.measure(prepared[number])
                        after[number].append(rate)
    return [
        _tried(piece, before, after[number], answers, others[number], errors.get(number, ""))
        for number, piece in enumerate(pieces)
    ]


@contextlib.contextmanager
def _kept(errors: dict[int, str], number: int) -> Any:
    """An error of brim's own (it does not fit, the model has no such knob) is this piece's result."""
    try:
        yield
    except BrimError as error:
        errors[number] = str(error)


def _tried(
    piece: Advice, before: list[float], after: list[float], old: dict[str, Any], new: dict[str, Any], error: str
) -> TriedAdvice:
    gain = None if error or not all([*before, *after]) else speed_up(before, after)
    compared = piece.changes_answers and bool(old) and not error
    changed = sum(old[name] != new.get(name) for name in old) if compared else None
    return TriedAdvice(
        name=piece.name, settings=piece.settings, before=tuple(before), after=tuple(after), gain=gain,
        changed_answers=changed, answers=len(old), error=error or ("" if gain is not None else "no rate was measured"),
    )  # fmt: skip
