"""The run behind `brim lm-eval`: lm-eval's `simple_evaluate` over a `BrimLM`, in a run folder that can be resumed.

lm-eval's command line finds no models of other packages, so brim calls its function. Names are checked before a model
is read, what lm-eval cannot load or refuses is a `RequestError`, and its results are kept beside brim's record.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.errors import BrimError, RequestError, first_line, nearest_names
from brim.evaluation.journals import check_contents
from brim.evaluation.live_figures import LiveEvaluation
from brim.evaluation.worker import EvalListener
from brim.integrations.harness_start import open_work
from brim.integrations.harness_work import HarnessWork, LmEvalResult, model_fingerprint
from brim.integrations.lm_eval import COMMAND, BrimLM, TextSettings, load_language_model, think_end
from brim.memory.environment import environment_facts
from brim.monitor.live import LiveRun, both
from brim.ranks.agreement import Agreement, check_same_work, shared_folder, stop_signal_as_error
from brim.settings.caller import given, resume_with, written
from brim.settings.lm_eval_settings import LmEvalRequest, LmEvalSettings
from brim.storage.files import write_atomic, write_json
from brim.storage.run_folder import write_run

# isort: split
# After the file above, which says what to install where lm-eval is missing.
import lm_eval as harness
from lm_eval import utils as harness_utils
from lm_eval.tasks import TaskManager

__all__ = ["run_lm_eval"]

_BRIM = Path(__file__).parents[1]
RESULTS, TASKS = "results.json", "tasks"  # in the run's folder


class _Tasks(TaskManager):  # type: ignore[misc]
    """lm-eval's tasks; what cannot be loaded is a `RequestError` that names it."""

    request: LmEvalRequest
    lm: BrimLM

    def load(self, task_list: Any) -> Any:
        """The tasks with their data."""
        try:
            loaded = super().load(task_list)
        except Exception as problem:
            raise RequestError(
                f"{given('tasks', ','.join(map(str, task_list)))}: lm-eval cannot load them "
                f"({type(problem).__name__}: {first_line(problem)}); see the task's YAML file and its data set"
            ) from problem
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and not self.request.confirm_run_unsafe_code:
                raise RequestError(
                    f"{given('tasks', name)}: it runs code that the model writes; allow that with "
                    f"{given('confirm_run_unsafe_code', True)}"
                )
            if getattr(task, "MULTIMODAL", False):
                raise RequestError(f"{given('tasks', name)}: it shows images, and brim lm-eval reads text only")
            if task.OUTPUT_TYPE == "generate_until":  # now, not when hours of other tasks are done
                self._check_generation(name, task.get_config("generation_kwargs") or {})
        return loaded

    def _check_generation(self, name: str, own: Mapping[str, Any]) -> None:
        try:
            self.lm.check_generation({**own, **self.request.gen_kwargs})
        except RequestError as problem:
            raise RequestError(f"{given('tasks', name)}: {problem}") from problem


def run_lm_eval(settings: LmEvalSettings, *, listener: EvalListener | None = None) -> LmEvalResult:
    """Run lm-eval's tasks on brim, and leave the run's folder behind; on ranks but 0 the result is empty."""
    request, watcher = settings.request, listener or EvalListener()
    evaluation = request.as_evaluation()
    started_at = datetime.datetime.now(datetime.UTC)

    def check(folder: Path) -> None:
        check_contents(folder, resume=request.resume, command=COMMAND)

    with (
        Agreement(patient=True, purpose="an evaluation") as agreement,
        shared_folder(agreement, settings.output, command=COMMAND, check=check, note=watcher.note) as folder,
        LiveRun(folder, COMMAND, publishes=agreement.world.rank == 0) as live,
        contextlib.ExitStack() as stack,
    ):
        live.update(ranks=agreement.world.size, rank_pids=agreement.processes_here())
        published = both(EvalListener, LiveEvaluation(live), watcher)
        try:
            with stop_signal_as_error(agreement):
                with agreement.step(str) as opening:  # names first: reading a model takes longer
                    manager, names = _task_manager(request)
                    model = load_language_model(evaluation)
                    opening.value = model_fingerprint(model, evaluation)
                check_same_work(opening.values)
                work = open_work(evaluation, model, folder, published, agreement, stack)
                document = _simple_evaluate(request, BrimLM.over(work, _texts_of(request)), manager, names)
        except KeyboardInterrupt:
            if agreement.world.rank == 0 and (folder / "samples.jsonl").exists():
                watcher.note(f"what is finished is kept: continue with {resume_with(folder)}")
            raise
        stack.close()  # every rank has closed its journal before they are merged
        with agreement.step(str):
            pass
        if agreement.world.rank > 0 or document is None:
            return LmEvalResult(results={}, summary={}, samples={}, folder=folder)
        return _recorded(request, work, document, folder, started_at)


def _texts_of(request: LmEvalRequest) -> TextSettings:
    return TextSettings(
        max_length=request.max_length,
        add_bos_token=request.add_bos_token,
        think_end=think_end(request.think_end_token),
        template=dict(request.chat_template_args),
    )


def _task_manager(request: LmEvalRequest) -> tuple[_Tasks, list[str]]:
    """lm-eval's index of tasks and the names asked for, patterns resolved; an unknown one is a `RequestError`."""
    for path in request.include_path:
        if not Path(path).is_dir():
            raise RequestError(f"{given('include_path', path)}: there is no such folder; give one with YAML files")
    manager = _index(request)
    names: list[str] = []
    for name in request.tasks:
        if _is_file(name):
            names.append(str(Path(name).resolve()))
            continue
        matched = sorted(manager.match_tasks([name]))
        if not matched:
            near = nearest_names(name, manager.all_tasks)
            files = [file for folder in request.include_path for file in Path(folder).rglob(f"{name}.y*ml")]
            more = f"; {files[0]} has another task: in it, or is no valid YAML" if files else ""
            raise RequestError(
                f"{given('tasks', name)}: lm-eval knows no such task{near or '.'} It lists its names with lm-eval ls "
                f"tasks; tasks of your own are found with {written('include_path', 'DIR')}{more}"
            )
        names += [one for one in matched if one not in names]
    return manager, names


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _index(request: LmEvalRequest) -> _Tasks:
    """Which tasks there are. To read lm-eval's own takes seconds: not where all that are asked for are the user's."""
    own = list(request.include_path)
    if own:
        manager = _Tasks(include_path=own, include_defaults=False)
        if all(name in manager.all_subtasks or _is_file(name) for name in request.tasks):
            manager.request = request
            return manager
    manager = _Tasks(include_path=own or None)
    manager.request = request
    return manager


def _simple_evaluate(request: LmEvalRequest, lm: BrimLM, manager: _Tasks, names: list[str]) -> dict[str, Any] | None:
    """lm-eval's own run over our model."""
    limit = request.limit
    options: dict[str, Any] = {
        "num_fewshot": request.num_fewshot,
        "limit": int(limit) if limit is not None and limit >= 1 else limit,
        "apply_chat_template": request.apply_chat_template,
        "system_instruction": request.system_instruction,
        "gen_kwargs": dict(request.gen_kwargs) or None,
        "log_samples": request.log_samples,
        "confirm_run_unsafe_code": request.confirm_run_unsafe_code,
        "fewshot_as_multiturn": request.fewshot_as_multiturn,
        "bootstrap_iters": request.bootstrap_iters,
    }
    if request.seed is not None:
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        options |= dict.fromkeys(seeds, request.seed)
    manager.lm = lm
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        found: dict[str, Any] | None = harness.simple_evaluate(model=lm, tasks=names, task_manager=manager, **chosen)
    except BrimError:
        raise
    except Exception as problem:  # a task's functions and lm-eval's metrics raise what they like
        place = traceback.extract_tb(problem.__traceback__)[-1]
        if Path(place.filename).is_relative_to(_BRIM):
            raise
        raise RequestError(
            f"{given('tasks', ','.join(request.tasks))}: lm-eval stopped with {type(problem).__name__}: "
            f"{first_line(problem)} ({Path(place.filename).name}, line {place.lineno}); what is answered is kept: mend "
            f"the task and try again with {given('resume', True)}"
        ) from problem
    return found


def _recorded(
    request: LmEvalRequest,
    work: HarnessWork,
    document: dict[str, Any],
    folder: Path,
    started_at: datetime.datetime,
) -> LmEvalResult:
    """The files of the run's folder, and what they hold."""
    work.merge_journals()
    samples: dict[str, list[dict[str, Any]]] = document.pop("samples", None) or {}
    results = _plain(document)
    write_json(folder / RESULTS, results)
    for task, lines in samples.items():
        name = re.sub(r"[^\w.-]", "_", task)
        text = "".join(json.dumps(_plain(line), ensure_ascii=False) + "\n" for line in lines)
        write_atomic(folder / TASKS / f"{name}.jsonl", text.encode("utf-8", "backslashreplace"))
    summary = {**work.summary(), "metrics": _metrics(results), "notes": work.notes}
    plans = work.plans
    write_run(
        folder,
        kind=COMMAND,
        request={**request.to_json(), "command": COMMAND},
        environment={**environment_facts(work.model.device), "lm_eval": results.get("lm_eval_version")},
        plan=plans[0].to_json() if plans else None,
        summary=summary,
        started_at=started_at,
    )
    return LmEvalResult(results=results, summary=summary, samples=samples, folder=folder, notes=tuple(work.notes))


def _plain(document: Any) -> Any:
    """As JSON; of what it cannot hold, lm-eval's own text."""
    return json.loads(json.dumps(document, default=harness_utils.handle_non_serializable, ensure_ascii=False))


def _metrics(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`task/metric` to its value with half the width of its 95 % interval, as other records have metrics."""
    found: dict[str, dict[str, Any]] = {}
    counts = results.get("n-samples") or {}
    for task, figures in {**results.get("groups", {}), **results.get("results", {})}.items():
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            half = 1.96 * error if isinstance(error, (int, float)) else None
            name = f"{task}/{metric}" + ("" if kind == "none" else f",{kind}")
            count = (counts.get(task) or {}).get("effective")
            found[name] = {"value": value, "mean": value, "std": None, "ci95": half, "count": count}
    return found
