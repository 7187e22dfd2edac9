"""Evaluations under a memory limit: split, told, recorded, never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import DoesNotFitError
from brim.evaluation.run import EvalResult, evaluate
from brim.evaluation.worker import EvalListener
from brim.memory.devices import ModelMemory, memory_of
from brim.settings.eval_settings import EvalRequest
from tests.evaluation.evaluation_runs import lines_of, predictions, record_of, run, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

TOKENS = 6


class Notes(EvalListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def peaks(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """What batches of one and of eight take, weights and all."""
    folder = tmp_path_factory.mktemp("peaks")
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "memory_limit": "1GiB"}
    return {
        size: run(language_model, questions, folder / str(size), batch_size=size, **options).summary[
            "peak_reserved_bytes"
        ]
        for size in (1, 8)
    }


def weights_bytes(model: Path) -> int:
    return (model / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def unlimited(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    return run(language_model, questions, tmp_path_factory.mktemp("unlimited") / "run", max_new_tokens=TOKENS)


def test_the_weights_count_in_the_peak(peaks: dict[int, int], language_model: Path) -> None:
    assert weights_bytes(language_model) * 0.9 < peaks[1] < peaks[8]


def test_weights_that_a_batch_does_not_touch_count_too() -> None:
    module = torch.nn.Linear(100, 100)
    module.register_buffer("table", torch.zeros(50))
    with ModelMemory(memory_of("cpu"), module).metered() as reading:
        pass
    assert reading.peak_reserved_bytes == 4 * (100 * 100 + 100 + 50)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_that_does_not_fit_is_split_and_nothing_is_lost(
    language_model: Path, questions: Path, tmp_path: Path, peaks: dict[int, int], unlimited: EvalResult, fixed: bool
) -> None:
    limit = (peaks[1] + peaks[8]) // 2
    notes = Notes()
    request = EvalRequest(
        model=str(language_model), data=str(questions), batch_size=8, fixed=fixed, memory_limit=limit, device="cpu",
        max_new_tokens=TOKENS,
    )  # fmt: skip
    result = evaluate(request, output=tmp_path / "run", listener=notes)
    assert result.summary["oom_events"] > 0
    assert result.summary["num_failed"] == 0
    assert result.summary["peak_reserved_bytes"] <= limit
    assert result.summary["batch_sizes"]["largest"] < 8
    assert predictions(result) == predictions(unlimited)
    assert result.metrics == unlimited.metrics
    told = [line for line in notes.lines if line.startswith("a batch of 8 failed (")]
    assert len(told) == 1
    assert all("\n" not in line for line in notes.lines)


def test_auto_stays_within_the_limit(
    language_model: Path, questions: Path, tmp_path: Path, peaks: dict[int, int], unlimited: EvalResult
) -> None:
    limit = (peaks[1] + peaks[8]) // 2
    result = run(language_model, questions, tmp_path / "run", memory_limit=limit, max_new_tokens=TOKENS)
    assert predictions(result) == predictions(unlimited)
    assert result.summary["num_failed"] == 0
    assert result.summary["peak_reserved_bytes"] <= limit


def test_a_fixed_size_comes_back_after_the_batch_that_did_not_fit(language_model: Path, tmp_path: Path) -> None:
    """The costliest come first and are split; the cheap ones run at exactly the size asked for."""
    records = [{"id": str(n), "question": "w1 " * (40 if n < 8 else 2), "answer": "1"} for n in range(32)]
    data = write_lines(tmp_path / "data.jsonl", records)
    options: dict[str, Any] = {"batch_size": 8, "max_new_tokens": TOKENS}
    small = run(language_model, data, tmp_path / "peak", limit=16, memory_limit="1GiB", **options)
    cheap = write_lines(tmp_path / "cheap.jsonl", records[8:])
    enough = run(language_model, cheap, tmp_path / "cheap", memory_limit="1GiB", **options).summary[
        "peak_reserved_bytes"
    ]
    limit = (small.summary["peak_reserved_bytes"] + enough) // 2
    result = run(language_model, data, tmp_path / "run", fixed=True, memory_limit=limit, **options)
    sizes = [sample["batch_size"] for sample in result.samples]
    assert max(sizes[:8]) < 8
    assert sizes[8:] == [8] * 24
    assert result.summary["num_failed"] == 0


def test_a_sample_that_does_not_fit_alone_fails_with_what_it_needed(
    language_model: Path, tmp_path: Path, peaks: dict[int, int]
) -> None:
    records = [{"id": "giant", "question": "w1 " * 300, "answer": "1"}]
    records += [{"id": str(n), "question": "w1 w2", "answer": "1"} for n in range(24)]
    data = write_lines(tmp_path / "data.jsonl", records)
    result = run(language_model, data, tmp_path / "run", batch_size=8, memory_limit=peaks[8], max_new_tokens=TOKENS)
    giant, *others = result.samples
    assert giant["error"]["reason"] == "out_of_memory"
    assert giant["error"]["needed_bytes"] > 0
    assert "does not fit, even alone" in giant["error"]["message"]
    assert giant["score"] == 0
    assert all(sample["error"] is None for sample in others)
    assert result.summary["num_failed"] == 1
    assert result.metrics["exact_match"]["count"] == 25
    assert [sample["batch_size"] for sample in others] == [8] * 24, "one giant must not make the rest run one by one"


def test_where_nothing_fits_the_record_is_kept_and_remedies_are_named(
    language_model: Path, questions: Path, tmp_path: Path
) -> None:
    limit = weights_bytes(language_model)
    with pytest.raises(DoesNotFitError, match="no sample fits, even alone") as caught:
        run(language_model, questions, tmp_path / "run", memory_limit=limit, max_new_tokens=2, limit=4)
    for words in ("half precision", "--max-tokens", "--memory-limit", str(tmp_path / "run")):
        assert words in str(caught.value)
    assert record_of(tmp_path / "run")["summary"]["num_failed"] == 4
    assert {line["error"]["reason"] for line in lines_of(tmp_path / "run")} == {"out_of_memory"}


def test_fail_on_oom_ends_the_run(language_model: Path, questions: Path, tmp_path: Path, peaks: dict[int, int]) -> None:
    limit = (peaks[1] + peaks[8]) // 2
    options: dict[str, Any] = {"batch_size": 8, "memory_limit": limit, "max_new_tokens": TOKENS}
    with pytest.raises(DoesNotFitError, match="a batch of 8 does not fit"):
        run(language_model, questions, tmp_path / "run", fixed=True, fail_on_oom=True, **options)


def test_offload_on_the_cpu_says_that_there_is_nothing_to_move(
    language_model: Path, tmp_path: Path, peaks: dict[int, int]
) -> None:
    records = [{"question": "w1 " * 300, "answer": "1"}, {"question": "w1", "answer": "1"}]
    data = write_lines(tmp_path / "data.jsonl", records)
    options: dict[str, Any] = {"memory_limit": peaks[8], "max_new_tokens": TOKENS, "offload": "cpu"}
    result = run(language_model, data, tmp_path / "run", **options)
    assert any("--offload cpu: the model is on the CPU already" in note for note in result.notes)
    assert result.summary["num_failed"] == 1


def test_a_limit_below_the_weights_fits_nothing_even_where_samples_are_prepared_here(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    limit = weights_bytes(vision_language_model) // 2
    with pytest.raises(DoesNotFitError, match="no sample fits"):
        run(vision_language_model, picture_questions, tmp_path / "run", memory_limit=f"{limit}B", num_workers=0)
    assert {line["error"]["reason"] for line in lines_of(tmp_path / "run")} == {"out_of_memory"}
