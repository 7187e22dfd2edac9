"""`brim lm-eval` as a run: in a folder, killed and resumed, short of memory, on two ranks, and asked wrongly.

The module is also the program of a run that is killed: `python test_lm_eval_runs.py MODEL TASKS FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script

pytest.importorskip("lm_eval")

import brim
from brim.errors import DoesNotFitError, RequestError
from brim.evaluation.worker import EvalListener, Lines
from brim.integrations.harness_tasks import ContinueTask, ScoreTask
from brim.integrations.harness_work import LmEvalResult
from brim.integrations.lm_eval_run import run_lm_eval
from brim.settings.lm_eval_settings import LmEvalRequest, LmEvalSettings
from tests.integrations import lm_eval_tasks
from tests.integrations.lm_eval_tasks import NAMES, assert_same_answers, evaluated, ours, requests

pytestmark = pytest.mark.usefixtures("no_environment")

KILLED_AFTER = 3  # batches


class Watched(EvalListener):
    """Counts what is computed, and may end it."""

    def __init__(self, after: int = 0, end: Callable[[], None] | None = None) -> None:
        self.lines: Lines = []
        self.notes: list[str] = []
        self._left, self._end = after, end

    def scored(self, lines: Lines) -> None:
        self.lines += lines
        self._left -= 1
        if self._left == 0 and self._end is not None:
            self._end()

    def note(self, line: str) -> None:
        self.notes.append(line)


def run(model: Path, made: Path, output: Path, listener: EvalListener | None = None, **settings: Any) -> LmEvalResult:
    asked = {"tasks": NAMES, "device": "cpu", "dtype": "float32", "use_cache": False, "bootstrap_iters": 0, **settings}
    request = LmEvalRequest(model=str(model), include_path=(str(made),), **asked)
    return run_lm_eval(LmEvalSettings(request=request, output=output), listener=listener)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def answers_of(result: LmEvalResult) -> dict[str, Any]:
    return {"samples": result.samples}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks") / "made")


@pytest.fixture(scope="module")
def whole(language_model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> LmEvalResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        return run(language_model, tasks, tmp_path_factory.mktemp("whole") / "run")


def test_a_run_leaves_lm_evals_results_and_brims_record(whole: LmEvalResult) -> None:
    record = json.loads((whole.folder / "run.json").read_text(encoding="utf-8"))
    results = json.loads((whole.folder / "results.json").read_text(encoding="utf-8"))
    assert record["kind"] == record["request"]["command"] == "lm-eval"
    assert set(results["results"]) == set(NAMES)
    assert record["summary"]["metrics"]["chosen/acc"]["value"] == results["results"]["chosen"]["acc,none"]
    assert (
        record["summary"]["num_samples"]
        == len(lines_of(whole.folder))
        == len({line["id"] for line in lines_of(whole.folder)})
    )
    logged = (whole.folder / "tasks" / "chosen.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["doc_id"] for line in logged] == list(range(10))
    assert record["plan"]["unit"] == "tokens"


def test_contexts_that_are_cut_are_counted_in_a_note(whole: LmEvalResult) -> None:
    cut = [note for note in whole.notes if "lost their beginning" in note]
    assert len(cut) == 2  # the prompts, and with their continuations; the windows of long texts are whole
    assert all(note.startswith(("1 of 10 contexts", "5 of 50 contexts")) for note in cut)


def test_a_group_has_the_metrics_of_its_tasks(language_model: Path, tmp_path: Path) -> None:
    folder = lm_eval_tasks.write_tasks(tmp_path / "made")
    group = {"group": "all", "task": ["spoken", "chosen"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "all.yaml").write_text(json.dumps(group), encoding="utf-8")
    metrics = run(language_model, folder, tmp_path / "run", tasks=("all",)).metrics
    assert metrics.keys() == {"all/acc", "spoken/acc", "chosen/acc"}
    assert metrics["all/acc"]["value"] == sum(metrics[f"{name}/acc"]["value"] for name in ("spoken", "chosen")) / 2


def test_the_report_and_the_checks_know_the_run(whole: LmEvalResult) -> None:
    checked = brim.check(whole.folder)
    assert checked.lines[0].verdict == "pass"
    page = brim.report(whole.folder).path.read_text(encoding="utf-8")
    assert "chosen/acc" in page


def test_a_request_that_comes_again_is_computed_once(language_model: Path, tasks: Path, tmp_path: Path) -> None:
    watched = Watched()
    result = run(language_model, tasks, tmp_path / "run", watched, tasks=("spoken", "continued"))
    assert len(result.samples["spoken"]) == 10
    assert len(watched.lines) == 18  # of ten documents two are the same


def test_rows_that_differ_in_their_last_token_are_read_once(
    language_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, launch = [], ScoreTask.launch

    def counted(self: Any, items: Any, prepared: Any) -> Any:
        rows.extend(prepared)
        return launch(self, items, prepared)

    monkeypatch.setattr(ScoreTask, "launch", counted)
    options = [("what is 3 plus", f" {number}") for number in range(4)]
    found = ours(language_model).loglikelihood(requests("loglikelihood", options))
    assert len(rows) == 1
    assert len({score for score, _ in found}) == 4


def test_killed_in_the_middle_it_computes_only_what_is_missing(
    language_model: Path, tasks: Path, tmp_path: Path, whole: LmEvalResult
) -> None:
    command = [sys.executable, __file__, str(language_model), str(tasks), str(tmp_path / "run")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{root}/src", root])}
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = lines_of(tmp_path / "run")
    assert 0 < len(before) < len(lines_of(whole.folder))
    with pytest.raises(RequestError, match="resume"):
        run(language_model, tasks, tmp_path / "run")
    watched = Watched()
    resumed = run(language_model, tasks, tmp_path / "run", watched, resume=True)
    assert {line["id"] for line in watched.lines}.isdisjoint(line["id"] for line in before)
    assert len(watched.lines) + len(before) == resumed.summary["num_samples"]
    assert resumed.summary["num_resumed"] == len(before)
    assert_same_answers(answers_of(resumed), answers_of(whole))
    assert resumed.metrics.keys() == whole.metrics.keys()


def test_after_ctrl_c_it_says_how_to_continue(language_model: Path, tasks: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    watched = Watched(after=2, end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(language_model, tasks, tmp_path / "run", watched)
    assert any("resume=True" in note for note in watched.notes)
    again = run(language_model, tasks, tmp_path / "run", resume=True)
    assert again.summary["num_resumed"] == len(watched.lines)


def test_a_finished_run_answers_further_tasks_from_its_journal(
    language_model: Path, tasks: Path, tmp_path: Path
) -> None:
    run(language_model, tasks, tmp_path / "run", tasks=("spoken",))
    watched = Watched()
    run(language_model, tasks, tmp_path / "run", watched, tasks=("spoken", "chosen"), limit=5, resume=True)
    assert {line["request"] for line in watched.lines} == {"loglikelihood"}
    assert len(watched.lines) <= 20


def test_the_answers_of_another_model_are_not_taken(
    language_model: Path, chat_model: Path, tasks: Path, tmp_path: Path
) -> None:
    run(language_model, tasks, tmp_path / "run", tasks=("spoken",), limit=2)
    with pytest.raises(RequestError, match="model differ"):
        run(chat_model, tasks, tmp_path / "run", tasks=("spoken",), limit=2, resume=True)


def test_answers_of_another_generation_configuration_are_computed_again(
    language_model: Path, tasks: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(language_model, tmp_path / "lm")
    asked: dict[str, Any] = {"tasks": ("continued", "spoken"), "limit": 4}
    first = run(model, tasks, tmp_path / "run", **asked)
    described = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    (model / "generation_config.json").write_text(json.dumps({**described, "suppress_tokens": list(range(30))}))
    watched = Watched()
    again = run(model, tasks, tmp_path / "run", watched, resume=True, **asked)
    assert {line["request"] for line in watched.lines} == {"generate_until"}
    assert answers_of(again)["samples"]["continued"] != answers_of(first)["samples"]["continued"]
    assert_same_answers(answers_of(again), answers_of(run(model, tasks, tmp_path / "fresh", **asked)))


def test_out_of_memory_in_the_middle_costs_no_answer(
    language_model: Path, tasks: Path, tmp_path: Path, whole: LmEvalResult
) -> None:
    one = run(language_model, tasks, tmp_path / "one", batch_size=1, memory_limit="1GiB").summary
    limit = int(1.5 * one["peak_reserved_bytes"])
    watched = Watched()
    short = run(language_model, tasks, tmp_path / "run", watched, batch_size=64, memory_limit=limit)
    assert short.summary["oom_events"] > 0
    assert short.summary["peak_reserved_bytes"] <= limit
    assert any("smaller" in note for note in watched.notes)
    assert_same_answers(answers_of(short), answers_of(whole))


def test_where_nothing_fits_it_says_what_may_help(language_model: Path, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="even alone") as caught:
        run(language_model, tasks, tmp_path / "run", tasks=("spoken",), memory_limit=60_000)
    assert "bfloat16" in str(caught.value)


def test_requests_that_raise_are_an_error_and_tried_again(
    language_model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, items: Any, prepared: Any) -> Any:
        raise ValueError("an odd prompt")

    with monkeypatch.context() as patch:
        patch.setattr(ContinueTask, "launch", broken)
        with pytest.raises(RequestError, match="an odd prompt"):
            run(language_model, tasks, tmp_path / "run", tasks=("continued",))
    result = run(language_model, tasks, tmp_path / "run", tasks=("continued",), resume=True)
    assert result.summary["num_failed"] == 0


def test_lm_evals_own_cache_of_answers_is_filled_and_used(
    language_model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = {"use_cache": str(tmp_path / "answers")}
    first = evaluated(ours(language_model), tasks, **cached)
    lm = ours(language_model)
    monkeypatch.setattr(lm.work, "score", None)
    monkeypatch.setattr(lm.work, "write", None)
    assert_same_answers(evaluated(lm, tasks, **cached), first)


def test_an_open_folder_is_locked_and_closing_frees_it(language_model: Path, tmp_path: Path) -> None:
    scored = requests("loglikelihood", [("what is", " 3")])
    with ours(language_model, output=tmp_path / "run") as lm:
        (first,) = lm.loglikelihood(scored)
        (tmp_path / "run" / ".lock").stat()
    with ours(language_model, output=tmp_path / "run", resume=True) as lm:
        assert lm.loglikelihood(scored) == [first]
        assert len(lines_of(tmp_path / "run")) == 1
    with pytest.raises(RequestError, match="closed; make it again, with resume=True"):
        lm.loglikelihood(requests("loglikelihood", [("what is", " 4")]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tasks": ("spokn",)}, "did you mean spoken"),
        ({"tasks": ("spoken",), "include_path": ("nowhere",)}, "no such folder"),
        ({"tasks": ()}, "at least one task"),
        ({"tasks": ("spoken",), "limit": 2.5}, "whole number"),
        ({"tasks": ("spoken",), "fewshot_as_multiturn": True}, "apply_chat_template"),
        ({"tasks": ("spoken",), "apply_chat_template": True}, "chat template"),
        ({"tasks": ("lost",)}, "cannot load"),
        ({"tasks": ("unsafe",)}, "confirm_run_unsafe_code"),
        ({"tasks": ("failing",)}, r"TypeError: .* \(scoring.py, line 2\).*resume"),
        ({"tasks": ("other",)}, r"other.yaml has another task"),
    ],
)
def test_a_wrong_request_says_what_to_do(
    language_model: Path, tasks: Path, tmp_path: Path, settings: dict[str, Any], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = lm_eval_tasks.write_tasks(tmp_path / "made")
    lm_eval_tasks.write_task(folder, "lost", "loglikelihood", "acc", data="nothing", doc_to_text="", doc_to_target="x")
    code = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "unsafe_code": True}
    lm_eval_tasks.write_task(folder, "unsafe", "generate_until", "exact_match", **code)
    lm_eval_tasks.write_task(folder, "failing", "generate_until", "exact_match", **code)
    failing = (
        (folder / "failing.yaml")
        .read_text(encoding="utf-8")
        .replace('"unsafe_code": true', '"process_results": !function scoring.score')
    )
    (folder / "failing.yaml").write_text(failing, encoding="utf-8")
    (folder / "scoring.py").write_text("def score(doc, results):\n    return results[0] + 1\n", encoding="utf-8")
    (folder / "spoken.yaml").rename(folder / "other.yaml")
    if settings["tasks"] in (("spokn",), ("other",)):
        monkeypatch.setattr("brim.integrations.lm_eval_run._index", lambda request: own_tasks(folder))
    with pytest.raises(RequestError, match=words):
        asked_as(str(language_model), tmp_path / "run", {"include_path": (str(folder),), **settings})
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("asked", [{"num_beams": 4}, {"max_gen_toks": 320}])
def test_a_generation_setting_is_refused_before_anything_is_computed(
    language_model: Path, tasks: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    watched = Watched()
    with pytest.raises(RequestError, match=next(iter(asked))) as caught:
        run(language_model, tasks, tmp_path / "run", watched, tasks=("spoken", "continued"), gen_kwargs=asked)
    assert "continued" in str(caught.value)
    assert not watched.lines


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"prefix_token_id": "first"}, {"chat_template_args": "short"}])
def test_a_wrong_parameter_of_the_model_is_named(language_model: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        ours(language_model, **wrong)


def asked_as(model: str, output: Path, settings: dict[str, Any]) -> None:
    run_lm_eval(LmEvalSettings(request=LmEvalRequest(model=model, device="cpu", **settings), output=output))


def own_tasks(folder: Path) -> Any:
    """lm-eval's own names take seconds to read."""
    return lm_eval_tasks.index(folder)


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(RequestError, match="need a language model"):
        run(Path("torchvision:resnet18"), tasks, tmp_path / "run", tasks=("spoken",))


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api.model", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "brim.integrations.lm_eval")
    with pytest.raises(RequestError, match=r"pip install 'brim\[lm-eval\]'"):
        __import__("brim.integrations.lm_eval")


def test_the_call_takes_the_settings_of_the_command(language_model: Path, tasks: Path, tmp_path: Path) -> None:
    result = brim.lm_eval(
        str(language_model), "spoken,continued", include_path=tasks, limit=3, device="cpu", output=tmp_path / "run",
        gen_kwargs={"max_gen_toks": 3}, log_samples=False, no_cache=True, bootstrap_iters=0,
    )  # fmt: skip
    assert set(result.metrics) == {"spoken/acc", "continued/exact_match"}
    assert result.samples == {}
    assert max(line["tokens"] for line in lines_of(result.folder) if "tokens" in line) == 3


@pytest.mark.slow(reason="three processes of torch, each of which imports lm-eval")
def test_two_ranks_share_the_requests_and_have_the_same_results(
    language_model: Path, tasks: Path, tmp_path: Path, whole: LmEvalResult
) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "brim", "lm-eval",
        "-m", str(language_model), "--tasks", ",".join(NAMES), "--include-path", str(tasks), "--device", "cpu",
        "--no-cache", "--bootstrap-iters", "0", "-o", str(tmp_path / "run"),
    ]  # fmt: skip
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{root}/src", root]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["summary"]["ranks"] == 2
    for name, figure in record["summary"]["metrics"].items():
        assert figure["value"] == pytest.approx(whole.metrics[name]["value"], abs=1e-5)
    assert {line["id"] for line in lines_of(tmp_path / "run")} == {line["id"] for line in lines_of(whole.folder)}
    assert not list((tmp_path / "run").glob("samples.rank-*"))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Watched(after=KILLED_AFTER, end=kill_self))
