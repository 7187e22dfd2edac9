"""A harness's requests, each computed once, whatever happens on the way: in batches that fit, journalled as they end.

A request is named by what it depends on beside the model: its tokens, and how an answer is written. So a repeated
request, one of two tasks or of an earlier start of the run, is not computed again. Knows no harness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from brim.errors import DoesNotFitError, RequestError, plural
from brim.evaluation.journals import Journals
from brim.evaluation.scoring import RankFigures, Scorer, merge_plans, summarise
from brim.evaluation.setup import EvaluationSetup, evaluation_savings
from brim.evaluation.shard_by_cost import shard_by_cost
from brim.evaluation.worker import EvalListener, Lines, Worker
from brim.generation.likelihoods import shared_contexts_obstacle
from brim.generation.settings import GenerationSettings
from brim.integrations.harness_tasks import (
    ContinueTask,
    PicturePrompt,
    PicturesTask,
    RowGroups,
    ScoredRow,
    ScoreTask,
    Writing,
    generation_options,
    rows_that_share,
)
from brim.memory.failures import memory_remedies
from brim.models.base import LoadedModel
from brim.ranks.agreement import Agreement
from brim.records import Plan
from brim.running.results import ExecutionFigures
from brim.settings.caller import given
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import combined_fingerprint
from brim.tasks.base import Task, TaskSettings

__all__ = ["HarnessWork", "LmEvalResult", "model_fingerprint"]

Finished = Callable[[str, Any], None]  # is given the name of a request and its answer, as soon as it is there

_Prompt = TypeVar("_Prompt", bound=Hashable)

_SETTINGS = TaskSettings(generation=GenerationSettings(max_new_tokens=1), chat=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEvalResult:
    """The result of a run: lm-eval's own `results`, the record's `summary`, logged `samples` by task, the `folder`."""

    results: dict[str, Any]
    summary: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]
    folder: Path
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, Any]:
        """Every metric of every task and group as `task/metric`, with its value and interval."""
        metrics: dict[str, Any] = self.summary["metrics"]
        return metrics


def model_fingerprint(model: LoadedModel, request: EvalRequest) -> str:
    """What two runs must share so that one can use the other's answers; of the requests each says its own."""
    facts = {"model": model.name, "files": dict(model.identity), "dtype": str(model.dtype)}
    return combined_fingerprint({"model": facts, "settings": {"seed": request.seed}})


class HarnessWork:
    """Answers requests with one model, and remembers the answers.

    With `journals` they survive the process: rank 0 has gathered those of earlier starts (`earlier`). Under several
    ranks each does its shard of a call's requests, and all have all answers at its end.
    """

    def __init__(
        self,
        request: EvalRequest,
        model: LoadedModel,
        *,
        listener: EvalListener,
        journals: Journals | None = None,
        earlier: Sequence[Mapping[str, Any]] = (),
        agreement: Agreement | None = None,
        monitor: Path | None = None,
    ) -> None:
        self.request = request
        self.model = model
        self.listener = listener
        self.notes: list[str] = []
        self._journals = journals
        self._agreement = agreement or Agreement()
        self._monitor = monitor
        self._earlier = {str(line["id"]) for line in earlier}
        self._lines: dict[str, dict[str, Any]] = {str(line["id"]): dict(line) for line in earlier}
        self._asked: dict[str, None] = {}  # names of the requests of this run, in their order
        self._phases: list[RankFigures] = []
        self._scorer: Scorer | None = None
        self._closed = False

    def score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], finished: Finished | None = None
    ) -> list[Any]:
        """The scores of continuations, as `[log-likelihood, is greedy]`, after what the model reads before them."""
        causal = self.model.kind != "seq2seq"
        asked = [(tuple(read), tuple(continuation)) for read, continuation in pairs]
        names = [_name("loglikelihood", read, continuation) for read, continuation in asked]
        rows: dict[Any, dict[str, tuple[int, ...]]] = {}
        for name, (read, continuation) in zip(names, asked, strict=True):
            if not self._is_done(name):
                rows.setdefault(read if causal else (read, continuation), {})[name] = continuation
        scored = [
            ScoredRow(read if causal else read[0], tuple(continuations.values()))
            for read, continuations in rows.items()
        ]
        row_names = [list(continuations) for continuations in rows.values()]
        self._begin(names, finished)
        if causal and (shared := self._agreed_groups(scored)) is not None:
            task = ScoreTask(self.model, scored, _SETTINGS, shared=shared)
            in_groups = [[name for number in group for name in row_names[number]] for group in shared.groups]
            self._compute(task, in_groups, range(len(in_groups)), finished, journal_failures=False)
            task.release()
        # Without groups, and what has failed in one: a row alone takes less memory, and shows whose error it is.
        left = [number for number, one in enumerate(row_names) if not all(map(self._is_done, one))]
        self._compute(ScoreTask(self.model, scored, _SETTINGS), row_names, left, finished)
        self._check_answers(names)
        return [self._lines[name]["prediction"] for name in names]

    def _agreed_groups(self, rows: Sequence[ScoredRow]) -> RowGroups | None:
        """What the rows share, if that pays and every rank's model can read it once: all have the same items."""
        shared = rows_that_share(rows)
        if shared is None:
            return None
        with self._agreement.step(str) as step:
            longest = max(len(row.tokens) for row in rows) + 1
            step.value = shared_contexts_obstacle(self.model.module, longest=longest)
        obstacles = [obstacle for obstacle in step.values if obstacle is not None]
        if obstacle := next(filter(None, obstacles), ""):
            self.note(f"what the options of a question share is read again for each of them: {obstacle}")
        return None if obstacles else shared

    def note(self, line: str) -> None:
        """One line for the user, once."""
        if line not in self.notes:
            self.notes.append(line)
            self.listener.note(line)

    def write(self, prompts: Sequence[Sequence[int]], writing: Writing, finished: Finished | None = None) -> list[str]:
        """The continuations of prompts; a repeated prompt is answered once, a sampled one as often as it comes."""

        def name(prompt: tuple[int, ...], again: Sequence[int], how: str) -> str:
            return _name("generate_until", prompt, again, how)

        def task(unique: Sequence[tuple[int, ...]]) -> ContinueTask:
            return ContinueTask(self.model, list(map(list, unique)), writing, _with_seed(self.request.seed))

        lines = self._write([tuple(prompt) for prompt in prompts], writing, name, task, finished)
        return [line["prediction"] for line in lines]

    def write_of_pictures(
        self,
        prompts: Sequence[PicturePrompt],
        writing: Writing,
        *,
        templated: bool,
        finished: Finished | None = None,
    ) -> list[dict[str, Any]]:
        """As `write`, of prompts with images, which come from a chat template or not; as lines of the journal."""

        def name(prompt: PicturePrompt, again: Sequence[int], how: str) -> str:
            return _name("generate_until of pictures", (), again, f"{prompt.key} {templated} {how}")

        def task(unique: Sequence[PicturePrompt]) -> ContinueTask:
            return PicturesTask(self.model, unique, writing, _with_seed(self.request.seed), templated=templated)

        return self._write(prompts, writing, name, task, finished)

    def _write(
        self,
        prompts: Sequence[_Prompt],
        writing: Writing,
        name: Callable[[_Prompt, Sequence[int], str], str],
        make_task: Callable[[Sequence[_Prompt]], ContinueTask],
        finished: Finished | None,
    ) -> list[dict[str, Any]]:
        configured = self.model.module.generation_config.to_diff_dict()
        configured.pop("transformers_version", None)
        how = json.dumps([dataclasses.asdict(writing), configured], sort_keys=True, default=str)
        seen: dict[_Prompt, int] = {}
        names: list[str] = []
        unique: dict[str, _Prompt] = {}
        for prompt in prompts:
            again = seen[prompt] = seen.get(prompt, -1) + 1
            names.append(name(prompt, (again,) if writing.samples else (), how))
            unique.setdefault(names[-1], prompt)
        left = {one: place for place, one in enumerate(unique) if not self._is_done(one)}
        with generation_options(self.model.module, writing.options):
            task = make_task(list(unique.values()))
            self._begin(names, finished)
            self._compute(task, [[one] for one in unique], list(left.values()), finished)
            task.release()
        self._check_answers(names)
        return [self._lines[one] for one in names]

    def summary(self) -> dict[str, Any]:
        """What was counted and measured, as in an evaluation's record; metrics are the harness's."""
        lines = [self._lines[name] for name in self._asked]
        assert self._scorer is not None or not self._phases
        figures = _joined(self._phases) if self._phases else RankFigures(figures=ExecutionFigures(), seconds=0.0)
        scorer = self._scorer or Scorer(ScoreTask(self.model, [], _SETTINGS), ())
        resumed = sum(name in self._earlier for name in self._asked)
        now = len(lines) - resumed
        return {
            **summarise(lines, scorer, [figures]),
            "num_resumed": resumed,
            "samples_per_second": now / figures.seconds if now and figures.seconds else None,
            "ranks": self._agreement.world.size,
        }

    @property
    def plans(self) -> tuple[Plan, ...]:
        """What the batches of each kind of request settled at."""
        return tuple(plan for phase in self._phases if (plan := merge_plans([phase])) is not None)

    def close(self) -> None:
        """Compute nothing more; without a journal nothing was open."""
        self._closed = self._journals is not None

    def merge_journals(self) -> None:
        """One file of all ranks' lines, once every rank has closed its own; for rank 0."""
        if self._journals is not None and self._agreement.world.size > 1:
            self._journals.finalise(self._journals.merged())

    def _is_done(self, name: str) -> bool:
        return name in self._lines and self._lines[name]["error"] is None

    def _begin(self, asked: Sequence[str], finished: Finished | None) -> None:
        """These requests are part of the run; what is done already is finished at once."""
        self._asked |= dict.fromkeys(asked)
        if finished is not None:
            for name in dict.fromkeys(asked):
                if self._is_done(name):
                    finished(name, self._lines[name]["prediction"])

    def _compute(
        self,
        task: Task,
        names: Sequence[Sequence[str]],
        items: Sequence[int],
        finished: Finished | None,
        *,
        journal_failures: bool = True,
    ) -> None:
        """Have these items of a task done, whose requests have these names, each rank its shard."""
        if not items:
            return
        if self._closed:
            raise RequestError(f"the model's run folder was closed; make it again, with {given('resume', True)}")
        costs = tuple(max(task.cost(item), 1) for item in range(len(names)))
        setup = EvaluationSetup(model=self.model, data=task.data, task=task, metrics=(), costs=costs)
        ranks = self._agreement.world
        with self._agreement.step(list) as step:
            shard = shard_by_cost(items, costs, ranks.size)[ranks.rank]
            self.listener.opened(setup.facts())
            self.listener.started(len(shard), 0)
            step.value = self._run(setup, names, shard, finished, journal_failures=journal_failures)
        for line in (line for lines in step.values for line in lines):
            self._lines[line["id"]] = line

    def _run(
        self,
        setup: EvaluationSetup,
        names: Sequence[Sequence[str]],
        items: Sequence[int],
        finished: Finished | None,
        *,
        journal_failures: bool,
    ) -> Lines:
        """This rank's items: their requests as lines of the journal; failures only where nothing follows them."""
        if not items:
            return []
        found: Lines = []
        worker = Worker(self.request, setup, self.listener, monitor=self._monitor)
        with worker, contextlib.closing(worker.run(items)) as batches:
            for answered in batches:
                kept = [one for one in answered if journal_failures or one["error"] is None]
                lines = [line for one in kept for line in _request_lines(one, names[int(one["id"])], setup.task)]
                if self._journals is not None:
                    self._journals.append(lines)
                found += lines
                for line in lines:
                    if finished is not None and line["error"] is None:
                        finished(line["id"], line["prediction"])
                self.listener.scored(lines)
                self._agreement.check()
        figures = worker.figures()
        if figures.figures.batches > 1:
            worker.remember_plan()
        self._phases.append(figures)
        self._scorer = worker.scorer
        self.notes += [note for note in figures.notes if note not in self.notes]
        return found

    def _check_answers(self, asked: Sequence[str]) -> None:
        """The harness can do nothing with a request that has no answer: raise, with what helps."""
        names = dict.fromkeys(asked)
        total = len(names)
        lost = [name for name in names if not self._is_done(name)]
        if not lost:
            return
        errors = [self._lines[name]["error"] for name in lost if name in self._lines]
        memory = [error for error in errors if error["reason"] == "out_of_memory"]
        kept = "" if self._journals is None else f" What is finished is kept: try again with {given('resume', True)}."
        if memory and len(memory) == len(errors):
            savings = evaluation_savings(self.request, mode="forward")
            remedies = "\n  - ".join(memory_remedies(savings))
            raise DoesNotFitError(
                f"{len(lost):,} of {plural(total, 'request')} do not fit, even alone ({memory[0]['message']}).{kept}\n"
                f"What may help:\n  - {remedies}"
            )
        message = errors[0]["message"].splitlines()[0] if errors else "not tried"
        raise RequestError(
            f"{len(lost):,} of {plural(total, 'request')} failed, and without them there are no scores; the first: "
            f"{message}.{kept}"
        )


def _name(kind: str, tokens: Sequence[int], more: Sequence[int] = (), how: str = "") -> str:
    """A request by its content."""
    digest = hashlib.sha256(f"{kind} {len(tokens)} {how}\n".encode())
    digest.update(array("q", tokens).tobytes())
    digest.update(array("q", more).tobytes())
    return digest.hexdigest()[:32]


def _with_seed(seed: int) -> TaskSettings:
    return dataclasses.replace(_SETTINGS, generation=GenerationSettings(max_new_tokens=1, seed=seed))


def _request_lines(answered: Mapping[str, Any], names: Sequence[str], task: Task) -> Lines:
    """One line for each request that an item answered."""
    prediction, error = answered["prediction"], answered["error"]
    each = prediction if isinstance(task, ScoreTask) and error is None else [prediction] * len(names)
    more = {name: answered[name] for name in ("tokens", "truncated") if name in answered}
    return [
        {
            "id": name,
            "request": task.name,
            "prediction": one,
            "score": None,
            "scores": {},
            "batch_size": answered["batch_size"],
            "error": error,
            **more,
        }
        for name, one in zip(names, each, strict=True)
    ]


def _joined(phases: Sequence[RankFigures]) -> RankFigures:
    """The figures of one rank's phases, one after the other."""
    total = ExecutionFigures(alloc_retries=phases[0].figures.alloc_retries)
    for one in (phase.figures for phase in phases):
        for field in ("items", "failed", "batches", "oom_events", "seconds", "busy_seconds", "cost", "padded_cost",
                      "warm_up_seconds", "warm_up_padded_cost", "search_seconds", "search_padded_cost",
                      "lost_seconds"):  # fmt: skip
            setattr(total, field, getattr(total, field) + getattr(one, field))
        for field in ("largest_padded_cost", "best_search_rate", "peak_allocated_bytes", "peak_reserved_bytes"):
            setattr(total, field, max(getattr(total, field), getattr(one, field)))
        total.batch_counts += one.batch_counts
        total.batch_times += one.batch_times
    counted = [phase.figures.alloc_retries for phase in phases]
    total.alloc_retries = None if None in counted else sum(count or 0 for count in counted)
    curve: list[tuple[float, int]] = []
    seconds, done = 0.0, 0
    for phase in phases:
        curve += [(seconds + moment, done + items) for moment, items in phase.throughput]
        seconds, done = seconds + phase.seconds, done + phase.figures.items
    waits = [phase.wait_fraction for phase in phases if phase.wait_fraction is not None]
    return dataclasses.replace(
        phases[-1],
        figures=total,
        seconds=seconds,
        throughput=tuple(curve),
        wait_fraction=sum(waits) / len(waits) if waits else None,
        loader_wait_seconds=sum(phase.loader_wait_seconds for phase in phases),
        notes=tuple(dict.fromkeys(note for phase in phases for note in phase.notes)),
    )
