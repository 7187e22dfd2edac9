"""`brim lm-eval`: a table, one document, and how a wrong name ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from tests import saved_models
from tests.integrations import lm_eval_tasks

Brim = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    saved_models.save_language_model(folder / "lm")
    lm_eval_tasks.write_tasks(folder / "tasks")
    return folder


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(made / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def arguments(made: Path, output: Path, *more: str) -> list[str]:
    return ["lm-eval", "-m", str(made / "lm"), "--include-path", str(made / "tasks"), "--device", "cpu", "--no-cache",
            "--bootstrap-iters", "0", "-o", str(output), *more]  # fmt: skip


def test_metrics_and_figures_are_printed(brim: Brim, made: Path, tmp_path: Path) -> None:
    done = brim(*arguments(made, tmp_path / "run", "--tasks", "spoken,chosen", "--limit", "4"))
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert ["spoken/acc", "0.0000"] in lines
    assert {"chosen/acc", "requests", "requests/s", "batch"} <= {line[0] for line in lines if line}
    assert "loglikelihood:" in done.err
    assert (tmp_path / "run" / "report.html").exists()


def test_what_lm_eval_prints_is_not_among_the_metrics(brim: Brim, made: Path, tmp_path: Path) -> None:
    more_tasks = tmp_path / "more"
    more_tasks.mkdir()
    (more_tasks / "asked.jsonl").write_bytes((made / "tasks" / "asked.jsonl").read_bytes())
    metric = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
    lm_eval_tasks.write_task(more_tasks, "perplexed", "loglikelihood", "acc", data="asked",
                             doc_to_text="{{q}}", doc_to_target=" {{a}}", metric_list=[metric])  # fmt: skip
    more = ("--include-path", str(more_tasks), "--tasks", "perplexed", "--bootstrap-iters", "2")
    done = brim(*arguments(made, tmp_path / "run", *more))
    assert done.out.startswith("perplexed/perplexity")
    assert "bootstrapping" in done.err


def test_one_document_is_all_that_json_prints(brim: Brim, made: Path, tmp_path: Path) -> None:
    done = brim(*arguments(made, tmp_path / "run", "--tasks", "continued", "--limit", "2", "--json"))
    document = json.loads(done.out)
    assert document["kind"] == "lm-eval"
    assert "continued/exact_match" in document["summary"]["metrics"]
    assert document["request"]["limit"] == 2


def test_settings_are_read_as_lm_eval_writes_them(brim: Brim, made: Path, tmp_path: Path) -> None:
    more = ("--tasks", "continued", "--limit", "0.2", "--gen_kwargs", "max_gen_toks=2,until=w3", "--num_fewshot", "1")
    assert brim(*arguments(made, tmp_path / "run", *more)).code == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["request"]["gen_kwargs"] == {"max_gen_toks": 2, "until": "w3"}
    assert record["summary"]["answer_tokens"]["max"] <= 2
    assert record["summary"]["num_samples"] == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--tasks", "chosen", "--limit", "0"), "--limit 0"),
        (("--tasks", "chosen", "--num-fewshot", "-1"), "--num-fewshot -1"),
        ((), "--tasks"),
        (("--tasks", "chosen", "--resume"), "--resume"),
    ],
)
def test_a_wrong_request_ends_with_the_flag_in_the_message(
    brim: Brim, made: Path, tmp_path: Path, more: tuple[str, ...], words: str
) -> None:
    done = brim(*arguments(made, tmp_path / "run", *more))
    assert done.code == 2
    assert words in done.err
