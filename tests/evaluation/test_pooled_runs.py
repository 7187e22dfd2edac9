"""Evaluations whose answers come from a pool: the same answers, each recorded when it ends, nothing lost.

A pool pays on a GPU; here the same code runs in plain operations on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.advice.run_reader import open_run
from brim.advice.trials import _Evaluation
from brim.errors import DoesNotFitError, RequestError
from brim.evaluation.run import EvalResult, evaluate
from brim.evaluation.setup import open_setup
from brim.evaluation.worker import EvalListener, Lines, Worker
from brim.generation.pool import GenerationPool
from brim.memory.devices import CpuMemory
from brim.running.pooled import PooledExecutor
from brim.settings.eval_settings import EvalRequest
from brim.sizing.constants import MOST_POOL_FAILURES
from brim.tasks import text_pools
from brim.tasks.generate import GenerateTask
from brim.tasks.prompts import PromptWriter
from tests.evaluation.evaluation_runs import lines_of, record_of, run, without_sizes, write_lines

TOKENS = 12

# The command, in a pool on the CPU, which is killed at the third turn with sequences in it.
KILLED_IN_A_POOL = """
import os, signal, torch
from brim.generation.pool import GenerationPool
from brim.tasks import text_pools

text_pools.pool_pays_on = lambda device, dtype: True
advance, turns = GenerationPool.advance, []

@torch.inference_mode()
def killed(pool):
    if pool.settings.max_new_tokens == 12:  # not the trial's
        turns.append(pool.active)
    if len(turns) == 4 and pool.active:
        pool._step(pool._top, left=1)  # answers have grown since the host last read them
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(pool)

GenerationPool.advance = killed
import brim.__main__
"""


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is used on the CPU too."""
    monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: True)


@pytest.fixture(scope="module")
def batched(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    """The same work in batches."""
    return run(language_model, questions, tmp_path_factory.mktemp("batched") / "run", max_new_tokens=TOKENS)


@pytest.mark.usefixtures("pooled")
class TestPooled:
    @pytest.mark.parametrize("size", [{}, {"batch_size": 3}, {"cost_cap": 60}, {"batch_size": 1}])
    def test_answers_are_those_of_batches(
        self, language_model: Path, questions: Path, tmp_path: Path, batched: EvalResult, size: dict[str, int]
    ) -> None:
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, **size)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))
        assert max(line["batch_size"] for line in lines_of(result.folder)) <= size.get("batch_size", 14)
        assert result.summary["oom_events"] == 0

    def test_a_turn_in_which_no_answer_ends_is_no_error(
        self, endless_model: Path, questions: Path, tmp_path: Path
    ) -> None:
        """A tokenizer may make one text of no tokens at all."""
        result = run(endless_model, questions, tmp_path / "run", max_new_tokens=20)
        assert result.notes == ()
        assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"

    def test_the_plan_counts_bytes_of_keys_and_values(
        self, language_model: Path, questions: Path, tmp_path: Path
    ) -> None:
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
        plan = record_of(result.folder)["plan"]
        assert plan["unit"] == "kv_bytes"
        slot_bytes = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their width, float32
        assert plan["size"] % slot_bytes == 0
        assert plan["size"] >= 14 * TOKENS * slot_bytes

    def test_samples_that_cannot_be_prepared_fail_and_the_others_run(
        self, language_model: Path, tmp_path: Path
    ) -> None:
        data = write_lines(
            tmp_path / "data.jsonl",
            [{"id": f"s{n}", "question": "what is " * (1 + 199 * (n == 2)), "answer": "1"} for n in range(5)],
        )
        result = run(language_model, data, tmp_path / "run", max_new_tokens=TOKENS)
        errors = {line["id"]: line["error"] for line in lines_of(result.folder)}
        assert [name for name, error in errors.items() if error is not None] == ["s2"]
        assert "positions" in errors["s2"]["message"]
        with pytest.raises(RequestError, match="s2"):
            run(language_model, data, tmp_path / "fast", max_new_tokens=TOKENS, fail_fast=True)

    def test_samples_that_are_never_read_neither_size_the_pool_nor_keep_others_from_it(
        self, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One prompt beyond the model's positions would take all its slots, or be beyond an attention window."""
        monkeypatch.setattr("brim.generation.likelihoods.MIN_SHARED_PREFIX", 4)
        usual, token_ids = text_pools.pool_obstacle, PromptWriter.token_ids
        asked: list[tuple[int, bool]] = []

        def recorded(*arguments: Any, longest: int, prefix: bool, **named: Any) -> str | None:
            asked.append((longest, prefix))
            return usual(*arguments, longest=longest, prefix=prefix, **named)

        def without_nothing(writer: PromptWriter, texts: list[str]) -> list[list[int]]:
            return [[] if text == "4" else ids for text, ids in zip(texts, token_ids(writer, texts), strict=True)]

        monkeypatch.setattr(text_pools, "pool_obstacle", recorded)
        monkeypatch.setattr(PromptWriter, "token_ids", without_nothing)
        read = [{"id": f"s{n}", "question": f"what is 1 plus {n}", "answer": "1"} for n in range(5)]
        never = [
            {"id": "long", "question": "plus " * 400, "answer": "1"},
            {"id": "none", "question": "4", "answer": "1"},
        ]
        sizes = []
        for name, records in (("all", [*read, *never]), ("read", read)):
            result = run(
                language_model, write_lines(tmp_path / f"{name}.jsonl", records), tmp_path / name, max_new_tokens=TOKENS
            )
            assert result.summary["num_failed"] == len(records) - 5
            sizes.append(record_of(result.folder)["plan"]["size"])
        assert asked == [(5, True), (5, True)]
        assert sizes[0] - sizes[1] <= 2 * 16 * 256, "a region of the smallest size each"

    @pytest.mark.parametrize("pays", [True, False])
    def test_a_prompt_without_tokens_is_that_samples_failure(
        self, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
    ) -> None:
        monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: pays)
        texts, token_ids = ["what is 1", "nothing", "plus 2 ?"], PromptWriter.token_ids

        def without_nothing(writer: PromptWriter, texts: list[str]) -> list[list[int]]:
            found = token_ids(writer, texts)
            return [[] if text == "nothing" else ids for text, ids in zip(texts, found, strict=True)]

        monkeypatch.setattr(PromptWriter, "token_ids", without_nothing)  # a tokenizer without a token for the unknown
        records = [{"id": f"s{n}", "question": text, "answer": "1"} for n, text in enumerate(texts)]
        data = write_lines(tmp_path / "data.jsonl", records)
        lines = lines_of(run(language_model, data, tmp_path / "run", max_new_tokens=TOKENS).folder)
        assert [line["error"] is None for line in lines] == [True, False, True]
        assert "no tokens" in lines[1]["error"]["message"]

    def test_stop_strings_end_answers_as_in_batches(
        self, language_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"max_new_tokens": 40, "stop": ("w1",)}
        result = run(language_model, questions, tmp_path / "pool", **options)
        monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: False)
        usual = run(language_model, questions, tmp_path / "batches", **options)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(usual.folder))

    @pytest.mark.parametrize("pays", [True, False])
    def test_for_stop_strings_only_the_last_tokens_are_decoded(
        self, endless_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
    ) -> None:
        """All of every answer at every check takes longer than the steps between two."""
        monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: pays)
        decode, most = GenerateTask._stopped, []

        def counted(task: GenerateTask, answers: list[list[int]]) -> list[bool]:
            tokenizer = task.model.tokenizer
            usual = tokenizer.batch_decode
            monkeypatch.setattr(
                tokenizer, "batch_decode", lambda rows, **named: most.extend(map(len, rows)) or usual(rows, **named)
            )
            try:
                return decode(task, answers)
            finally:
                monkeypatch.setattr(tokenizer, "batch_decode", usual)

        monkeypatch.setattr(GenerateTask, "_stopped", counted)
        result = run(endless_model, questions, tmp_path / "run", max_new_tokens=90, stop=("never",))
        assert result.summary["answer_tokens"]["p50"] == 90
        assert max(most) < 60

    def test_a_pool_that_does_not_fit_is_made_smaller_and_nothing_is_lost(
        self,
        language_model: Path,
        questions: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        admit, sizes = GenerationPool.admit, []

        def short_of_memory(pool: GenerationPool, prompts: Any) -> int:
            sizes.append(pool.arena.slots)
            if pool.arena.slots > 0.8 * max(sizes) and pool.active:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return admit(pool, prompts)

        monkeypatch.setattr("brim.tasks.text_pools.chunk_tokens_of", lambda *_, **__: 128)
        monkeypatch.setattr(GenerationPool, "admit", short_of_memory)
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "memory_limit": "1MiB"}
        result = run(language_model, questions, tmp_path / "a", **options)
        assert result.summary["oom_events"] > 0
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))
        assert any("ran out of memory" in note for note in result.notes)
        with pytest.raises(DoesNotFitError):
            run(
                language_model, questions, tmp_path / "b", batch_size=14, fixed=True, fail_on_oom=True, **options
            )  # fmt: skip

    def test_a_trial_keeps_the_memory_limit_and_its_failure_leaves_the_run_to_batches(
        self,
        language_model: Path,
        questions: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        limits: list[int | None] = []
        memories: list[CpuMemory] = []
        make = CpuMemory.__init__

        def kept(memory: CpuMemory, device: torch.device) -> None:
            make(memory, device)
            memories.append(memory)

        def short(*_: Any, **__: Any) -> Any:
            limits.extend(memory._limit_bytes for memory in memories)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr(CpuMemory, "__init__", kept)
        monkeypatch.setattr("brim.generation.trial._pool_disagreement", short)
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, memory_limit="1GiB")
        assert 2**30 in limits
        assert any("a trial of it ran out of memory" in note for note in result.notes)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))

    def test_a_pool_that_never_fits_leaves_all_to_batches_and_says_so(
        self,
        language_model: Path,
        questions: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def short_of_memory(pool: GenerationPool, prompts: Any) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr("brim.tasks.text_pools.pool_obstacle", lambda *_, **__: None)
        monkeypatch.setattr(GenerationPool, "admit", short_of_memory)
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
        assert result.summary["oom_events"] == MOST_POOL_FAILURES
        assert result.notes[-1] == "there is too little memory for a pool of answers: batches take over"
        assert len(result.notes) == 2, "that a smaller one takes over is noted only where one does"
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))

    def test_the_memory_limit_is_held(
        self, language_model: Path, questions: Path, tmp_path: Path, batched: EvalResult
    ) -> None:
        least = run(language_model, questions, tmp_path / "a", max_new_tokens=TOKENS, batch_size=1, memory_limit="1GiB")
        limit = int(1.15 * least.summary["peak_reserved_bytes"])
        result = run(language_model, questions, tmp_path / "b", max_new_tokens=TOKENS, memory_limit=f"{limit}B")
        assert 0 < result.summary["peak_reserved_bytes"] <= limit
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))

    def test_an_error_that_is_not_memorys_leaves_the_rest_to_batches(
        self,
        language_model: Path,
        questions: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        advance, calls = GenerationPool.advance, []

        def breaks(pool: GenerationPool) -> Any:
            calls.append(pool)
            if len(calls) > 1:
                raise ValueError("broken")
            return advance(pool)

        monkeypatch.setattr(GenerationPool, "advance", breaks)
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, batch_size=6)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))
        assert result.notes == ("the pool ended with an error (ValueError: broken): batches take over",)

    def test_answers_are_recorded_as_they_end_and_a_killed_run_continues(
        self, language_model: Path, questions: Path, tmp_path: Path, batched: EvalResult
    ) -> None:
        class Killed(EvalListener):
            def scored(self, lines: Lines) -> None:
                self.lines = lines
                raise KeyboardInterrupt

        request = EvalRequest(
            model=str(language_model), data=str(questions), max_new_tokens=TOKENS, device="cpu", use_cache=False
        )
        listener = Killed()
        with pytest.raises(KeyboardInterrupt):
            evaluate(request, output=tmp_path / "run", listener=listener)
        written = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
        done = [line["id"] for line in written if "id" in line]
        assert 0 < len(done) < 14, "answers that end first are there before the last one has ended"
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, resume=True)
        assert result.summary["num_resumed"] == len(done)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))

    def test_a_command_that_is_killed_with_answers_half_finished_continues(
        self,
        language_model: Path,
        questions: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        command = [
            "eval", "-m", str(language_model), "-d", str(questions), "--device", "cpu", "--max-tokens", str(TOKENS),
            "-b", "4", "--no-cache", "-o", str(tmp_path / "run"),
        ]  # fmt: skip
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_IN_A_POOL, *command], capture_output=True, text=True, timeout=120
        )
        assert killed.returncode == -9, killed.stderr
        done = [line["id"] for line in lines_of(tmp_path / "run")]
        assert 0 < len(done) < 14
        given: list[int] = []
        usual = PooledExecutor.run

        def recorded(executor: PooledExecutor, items: Any) -> Any:
            given.extend(items)
            return usual(executor, items)

        monkeypatch.setattr(PooledExecutor, "run", recorded)
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, resume=True)
        assert sorted([*done, *(f"q{item}" for item in given)]) == sorted(f"q{number}" for number in range(14))
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))

    def test_advice_that_is_tried_takes_no_cap_from_a_pool(
        self, language_model: Path, questions: Path, tmp_path: Path
    ) -> None:
        done = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
        tried = _Evaluation(open_run(done.folder), samples=6)
        rate, answers = tried.measure({})
        assert rate > 0
        assert len(answers) == 6
        assert [request.cost_cap for request in tried._requests.values()] == [None]

    def test_a_pool_that_has_given_up_is_not_tried_again(
        self, language_model: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[int] = []

        def broken(executor: PooledExecutor, items: Any) -> Any:
            opened.append(len(items))
            executor.left = list(items)
            yield from ()

        monkeypatch.setattr(PooledExecutor, "run", broken)
        request = EvalRequest(
            model=str(language_model), data=str(questions), max_new_tokens=TOKENS, device="cpu", use_cache=False
        )
        with Worker(request, open_setup(request), EvalListener()) as worker:
            lines = [line for some in (range(7), range(7, 14)) for part in worker.run(some) for line in part]
        assert len(lines) == 14
        assert opened == [7]

    def test_a_model_that_no_pool_fits_is_noted(
        self, language_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brim.tasks.text_pools.pool_obstacle", lambda *_, **__: "it is odd")
        result = run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
        assert any("whole batches" in note and "it is odd" in note for note in result.notes)

    def test_a_shared_prefix_is_read_once(
        self, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brim.generation.likelihoods.MIN_SHARED_PREFIX", 8)
        context = "what is 1 plus 2 ? 3 what is 4 plus 5 ?"
        records = [{"id": f"s{n}", "question": f"{context} {n % 9} plus {n} ?", "answer": "1"} for n in range(9)]
        data = write_lines(tmp_path / "data.jsonl", records)
        read: list[int] = []
        inside = GenerationPool._read_prefix

        def counted(pool: GenerationPool, prefix: Any) -> None:
            read.append(len(prefix))
            inside(pool, prefix)

        monkeypatch.setattr(GenerationPool, "_read_prefix", counted)
        shared = run(language_model, data, tmp_path / "shared", max_new_tokens=TOKENS)
        assert read.count(len(context.split())) == 1, "beside a trial"
        monkeypatch.setattr("brim.generation.likelihoods.MIN_SHARED_PREFIX", 1000)
        apart = run(language_model, data, tmp_path / "apart", max_new_tokens=TOKENS)
        assert without_sizes(lines_of(shared.folder)) == without_sizes(lines_of(apart.folder))


def test_a_model_with_an_encoder_says_that_no_pool_serves_it(
    seq2seq_model: Path, questions: Path, tmp_path: Path, pooled: None
) -> None:
    result = run(seq2seq_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
    assert any("has an encoder" in note for note in result.notes)
    assert record_of(result.folder)["plan"]["unit"] == "tokens"


def test_without_flash_attention_batches_run(
    language_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pool was used on the CPU")

    monkeypatch.setattr(PooledExecutor, "run", never)
    assert run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS).notes == ()


class TestBatchInvariant:
    @pytest.fixture(autouse=True)
    def of_small_shapes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("brim.generation.pool", "brim.tasks.text_pools"):
            monkeypatch.setattr(f"{module}.INVARIANT_ROWS", 6)
        monkeypatch.setattr("brim.generation.pool.INVARIANT_CHUNK_TOKENS", 64)

    @pytest.mark.usefixtures("pooled")
    @pytest.mark.parametrize("size", [{}, {"batch_size": 2}])
    def test_answers_are_those_of_batches_on_the_cpu(
        self, language_model: Path, questions: Path, tmp_path: Path, batched: EvalResult, size: dict[str, int]
    ) -> None:
        asked = {"max_new_tokens": TOKENS, "batch_invariant": True, **size}
        result = run(language_model, questions, tmp_path / "run", **asked)
        assert without_sizes(lines_of(result.folder)) == without_sizes(lines_of(batched.folder))
        assert max(line["batch_size"] for line in lines_of(result.folder)) == size.get("batch_size", 6)

    def test_where_there_is_no_pool_it_is_refused(self, language_model: Path, questions: Path, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"batch_invariant.* language model on CUDA"):
            run(language_model, questions, tmp_path / "run", batch_invariant=True)

    @pytest.mark.usefixtures("pooled")
    def test_a_model_that_no_pool_fits_is_refused_with_the_reason(
        self, language_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brim.tasks.text_pools.pool_obstacle", lambda *_, **__: "it is odd")
        with pytest.raises(RequestError, match=r"batch_invariant.* it is odd"):
            run(language_model, questions, tmp_path / "run", batch_invariant=True)

    @pytest.mark.usefixtures("pooled")
    def test_batches_never_take_over(self, language_model: Path, questions: Path, tmp_path: Path) -> None:
        with pytest.raises(DoesNotFitError, match="batch_invariant"):
            run(language_model, questions, tmp_path / "run", batch_invariant=True, cost_cap=1, memory_limit="200KiB")

    @pytest.mark.usefixtures("pooled")
    def test_a_run_without_it_is_not_resumed_with_it(
        self, language_model: Path, questions: Path, tmp_path: Path
    ) -> None:
        run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS)
        with pytest.raises(RequestError, match="resume"):
            run(language_model, questions, tmp_path / "run", max_new_tokens=TOKENS, batch_invariant=True, resume=True)
