"""Multiple choice of lm-eval with what rows share read once: the answers of `hf`, resumed, short of memory, on ranks.

The module is also the program of a rank: `python test_lm_eval_shared.py MODEL TASKS FOLDER`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script

pytest.importorskip("lm_eval")

from brim.errors import RequestError
from brim.generation import likelihoods
from brim.integrations.harness_tasks import ScoredRow, ScoreTask, rows_that_share
from brim.integrations.harness_work import LmEvalResult
from tests.integrations import lm_eval_tasks
from tests.integrations.lm_eval_tasks import assert_same_answer, assert_same_answers, evaluated, hf, ours, requests
from tests.integrations.test_lm_eval_runs import Watched, answers_of, lines_of, run

pytestmark = pytest.mark.usefixtures("no_environment")

SHARING = ("shot", "drawn")  # the same examples before every question, and others before each


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models on the CPU share contexts too, and short prefixes."""
    monkeypatch.setattr(likelihoods, "MIN_CPU_PARAMETERS", 0)
    monkeypatch.setattr(likelihoods, "MIN_SHARED_PREFIX", 4)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks") / "made")
    words = random.Random(8)
    documents = [
        {"q": lm_eval_tasks.phrase(words, words.randint(3, 12)), "gold": words.randint(0, 3),
         "choices": [lm_eval_tasks.phrase(words, words.randint(1, 4)) for _ in range(4)]}
        for _ in range(15)
    ]  # fmt: skip
    files = {"test": documents[:9], "examples": documents[9:]}
    for split, some in files.items():
        lm_eval_tasks.write_jsonl(folder / f"few.{split}.jsonl", some)
    asked: dict[str, Any] = {
        "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "num_fewshot": 3,
        "dataset_kwargs": {"data_files": {split: str(folder / f"few.{split}.jsonl") for split in files}},
        "fewshot_split": "examples",
    }  # fmt: skip
    for name, sampler in zip(SHARING, ("first_n", "default"), strict=True):
        lm_eval_tasks.write_task(folder, name, "multiple_choice", "acc", fewshot_config={"sampler": sampler}, **asked)
    return folder


@pytest.fixture(scope="module")
def plain(language_model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> LmEvalResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        return run(language_model, tasks, tmp_path_factory.mktemp("plain") / "run", tasks=SHARING)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of every batch whether its items are packed, and how many tokens are read before all of them."""
    found: list[tuple[bool, int]] = []
    launch: Callable[..., Any] = ScoreTask.launch

    def watched(self: ScoreTask, items: Any, prepared: Any) -> Any:
        found.append((self.packs, 0 if self._shared is None else len(self._shared.prefix)))
        return launch(self, items, prepared)

    monkeypatch.setattr(ScoreTask, "launch", watched)
    return found


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("settings", [{}, {"batch_size": 1}, {"cost_cap": 60}])
@pytest.mark.parametrize("names", [("shot",), ("drawn",), ("shot", "chosen", "spoken", "rolled")])
def test_answers_are_those_of_the_hf_model(
    language_model: Path, tasks: Path, names: tuple[str, ...], settings: dict[str, Any], launched: list[Any]
) -> None:
    found = evaluated(ours(language_model, **settings), tasks, names)
    assert_same_answers(found, evaluated(hf(language_model), tasks, names))
    assert launched[0][0]
    assert (launched[0][1] > 0) == (names == ("shot",))


@pytest.mark.usefixtures("shared")
def test_marks_of_greedy_continuations_are_those_without_sharing(
    language_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = ours(language_model)
    contexts = [f"what is {number} plus w{number}" for number in range(8)]
    asked = requests("generate_until", [(context, {"max_gen_toks": 3, "until": []}) for context in contexts])
    likeliest = [(context, " " + text) for context, text in zip(contexts, lm.generate_until(asked), strict=True)]
    pairs = [pair for context, text in likeliest if text.strip() for pair in ((context, text), (context, f"{text} w1"))]
    scored = requests("loglikelihood", pairs)
    found = lm.loglikelihood(scored)
    monkeypatch.setattr(likelihoods, "MIN_CPU_PARAMETERS", 1 << 40)
    for answer, wanted in zip(found, ours(language_model).loglikelihood(scored), strict=True):
        assert_same_answer(answer, wanted)
    assert {greedy for _, greedy in found} == {True, False}


@pytest.mark.usefixtures("shared")
def test_rolling_likelihoods_are_computed_row_by_row(language_model: Path, tasks: Path, launched: list[Any]) -> None:
    found = evaluated(ours(language_model), tasks, ("rolled",))
    assert {packs for packs, _ in launched} == {False}
    assert_same_answers(found, evaluated(hf(language_model), tasks, ("rolled",)))


@pytest.mark.usefixtures("shared")
def test_a_resumed_run_computes_only_what_is_missing(
    language_model: Path, tasks: Path, tmp_path: Path, plain: LmEvalResult, launched: list[Any]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first = Watched(after=3, end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(language_model, tasks, tmp_path / "run", first, tasks=SHARING, batch_size=2)
    done = {line["id"] for line in lines_of(tmp_path / "run")}
    assert 0 < len(done) < len(lines_of(plain.folder))
    second = Watched()
    resumed = run(language_model, tasks, tmp_path / "run", second, tasks=SHARING, resume=True)
    assert done.isdisjoint(line["id"] for line in second.lines)
    assert {packs for packs, _ in launched} == {True}
    assert {line["id"] for line in lines_of(tmp_path / "run")} == {line["id"] for line in lines_of(plain.folder)}
    assert resumed.summary["num_resumed"] == len(done)
    assert_same_answers(answers_of(resumed), answers_of(plain))


@pytest.mark.usefixtures("shared")
def test_out_of_memory_in_the_middle_costs_no_answer(
    language_model: Path, tasks: Path, tmp_path: Path, plain: LmEvalResult, launched: list[Any]
) -> None:
    one = run(language_model, tasks, tmp_path / "one", tasks=SHARING, batch_size=1, memory_limit="1GiB").summary
    limit = int(1.5 * one["peak_reserved_bytes"])
    short = run(language_model, tasks, tmp_path / "run", tasks=SHARING, batch_size=64, memory_limit=limit)
    assert short.summary["oom_events"] > 0
    assert short.summary["peak_reserved_bytes"] <= limit
    assert {packs for packs, _ in launched} == {True}
    assert_same_answers(answers_of(short), answers_of(plain))


@pytest.mark.usefixtures("shared")
def test_groups_that_do_not_fit_alone_are_computed_row_by_row(
    language_model: Path, tasks: Path, tmp_path: Path, plain: LmEvalResult, launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(likelihoods, "MIN_CPU_PARAMETERS", 1 << 40)
        one = run(language_model, tasks, tmp_path / "one", tasks=SHARING, batch_size=1, memory_limit="1GiB").summary
    launched.clear()
    monkeypatch.setattr("brim.integrations.harness_tasks.SMALL_GROUP_TOKENS", 1 << 40)
    limit = int(1.1 * one["peak_reserved_bytes"])
    short = run(language_model, tasks, tmp_path / "run", tasks=SHARING, memory_limit=limit)
    assert {packs for packs, _ in launched} == {True, False}
    assert short.summary["num_failed"] == 0
    lines = lines_of(tmp_path / "run")
    assert len(lines) == len({line["id"] for line in lines}) == len(lines_of(plain.folder))
    assert_same_answers(answers_of(short), answers_of(plain))


@pytest.mark.usefixtures("shared")
def test_of_a_group_that_fails_only_the_request_at_fault_is_lost(
    language_model: Path, tasks: Path, tmp_path: Path, plain: LmEvalResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ScoreTask.launch
    bad: list[ScoredRow] = []

    def broken(self: ScoreTask, items: Any, prepared: Any) -> Any:
        rows = [row for group in prepared for row in group]
        bad[:] = bad or rows[:1]
        if bad[0] in rows:
            raise ValueError("an odd prompt")
        return launch(self, items, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(ScoreTask, "launch", broken)
        with pytest.raises(RequestError, match="an odd prompt") as caught:
            run(language_model, tasks, tmp_path / "run", tasks=("shot",))
    assert str(caught.value).startswith(f"{len(bad[0].continuations)} of 36 requests")
    lines = lines_of(tmp_path / "run")
    assert len([line for line in lines if line["error"] is not None]) == len(bad[0].continuations)
    assert len(lines) == len({line["id"] for line in lines})
    watched = Watched()
    again = run(language_model, tasks, tmp_path / "run", watched, tasks=("shot",), resume=True)
    assert len(watched.lines) == len(bad[0].continuations)
    assert_same_answers(answers_of(again), {"samples": {"shot": plain.samples["shot"]}})


@pytest.mark.usefixtures("shared")
def test_a_model_that_cannot_share_says_so_once(
    language_model: Path, tasks: Path, tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.integrations.harness_work.shared_contexts_obstacle", lambda *_, **__: "it has a window")
    watched = Watched()
    result = run(language_model, tasks, tmp_path / "run", watched, tasks=("shot",))
    assert {packs for packs, _ in launched} == {False}
    for notes in (watched.notes, result.notes):
        assert len([note for note in notes if note.endswith("it has a window")]) == 1


class TestGroups:
    PREFIX = tuple(range(100, 300))

    def options(self, question: int, context: Sequence[int] = PREFIX, options: int = 4) -> list[ScoredRow]:
        """Of one question of ten tokens, with options of two tokens."""
        asked = [question * 10 + place for place in range(10)]
        return [ScoredRow((*context, *asked, 500 + one), ((500 + one, 7),)) for one in range(options)]

    def test_options_of_a_question_are_joined_behind_the_prefix_of_all(self) -> None:
        rows = [row for question in range(300, 305) for row in self.options(question)]
        found = rows_that_share(rows)
        assert found is not None
        assert found.prefix == self.PREFIX
        assert sorted(map(sorted, found.groups)) == [list(range(4 * one, 4 * one + 4)) for one in range(5)]

    def test_questions_behind_the_examples_of_their_subject_are_joined(self) -> None:
        """No prefix is that of all, and every question is one row: its options differ in their last token."""
        subjects = [tuple(range(start, start + 200)) for start in (1000, 2000)]
        rows = [self.options(300 + one, subject, options=1)[0] for subject in subjects for one in range(6)]
        found = rows_that_share(rows)
        assert found is not None
        assert found.prefix == ()
        assert sorted(map(sorted, found.groups)) == [list(range(6)), list(range(6, 12))]

    def test_a_group_is_at_most_twice_as_long_as_the_longest_row(self) -> None:
        subjects = [tuple(range(start, start + 1000)) for start in (1000, 3000)]
        rows = [self.options(600 + one, subject, options=1)[0] for subject in subjects for one in range(300)]
        found = rows_that_share(rows)
        assert found is not None
        lengths = [1000 + 11 * len(group) for group in found.groups]
        assert max(lengths) <= 2 * 1011
        assert sum(lengths) < 0.1 * sum(len(row.tokens) for row in rows)

    def test_scored_tokens_are_no_part_of_the_prefix(self) -> None:
        """Rolling windows: all tokens are scored."""
        text = self.PREFIX
        rows = [ScoredRow((1, *text, last), ((*text, last, last),)) for last in (5, 6)]
        found = rows_that_share(rows)
        assert found is not None
        assert found.prefix == ()
        assert sorted(found.groups[0]) == [0, 1]

    def test_rows_that_share_little_stay_apart(self) -> None:
        assert rows_that_share([ScoredRow((1, *[place] * 50), ((2,),)) for place in range(9)]) is None


@pytest.mark.slow(reason="three processes of torch, each of which imports lm-eval")
def test_two_ranks_share_the_groups_and_have_the_same_results(
    language_model: Path, tasks: Path, tmp_path: Path, plain: LmEvalResult
) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__,
        str(language_model), str(tasks), str(tmp_path / "run"),
    ]  # fmt: skip
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{root}/src", root]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["summary"]["ranks"] == 2
    assert record["summary"]["padding_fraction"] == 0.0
    assert plain.summary["padding_fraction"] > 0.0
    lines = {line["id"]: line["prediction"] for line in lines_of(tmp_path / "run")}
    wanted = {line["id"]: line["prediction"] for line in lines_of(plain.folder)}
    assert lines.keys() == wanted.keys()
    for name, answer in lines.items():
        assert_same_answer(answer, wanted[name])


if __name__ == "__main__":
    likelihoods.MIN_CPU_PARAMETERS, likelihoods.MIN_SHARED_PREFIX = 0, 4
    run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), tasks=SHARING)
