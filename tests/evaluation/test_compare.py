"""`--compare-batch` of evaluations: the same samples at every size, what does not fit, what Ctrl-C keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from brim.comparing.record import Comparison
from brim.comparing.rounds import RoundRules
from brim.evaluation import compare as evaluation_compare
from brim.evaluation.compare import compare_batch_sizes, measured_setup
from brim.evaluation.worker import EvalListener
from brim.settings.eval_settings import EvalRequest
from tests.evaluation.evaluation_runs import write_words

MODELS = """
def shout():
    return lambda samples: [sample.prompt.upper() for sample in samples]

def small():
    def answer(samples):
        if len(samples) > 4:
            raise MemoryError("too many")
        return [sample.prompt.upper() for sample in samples]
    return answer
"""


def compare(folder: Path, sizes: list[int], *, model: str = "shout", limit: int = 20, **more: Any) -> Comparison:
    (folder / "models.py").write_text(MODELS)
    data = write_words(folder / "data.jsonl", 40)
    request = EvalRequest(model=f"py:{folder / 'models.py'}:{model}", data=str(data), device="cpu", limit=limit)
    return compare_batch_sizes(request, sizes, output=folder / "run", rules=RoundRules(most=3), **more)


def test_batch_sizes_are_compared_on_the_same_samples(tmp_path: Path) -> None:
    found = compare(tmp_path, [1, 4, 16])
    rows = found.rows
    assert [row["batch_size"] for row in rows] == [1, 4, 16]
    assert [row["batch_sizes"]["largest"] for row in rows] == [1, 4, 16]
    assert {row["num_samples"] for row in rows} == {20}
    assert {row["rounds"] for row in rows} == {3}
    assert rows[0]["speed_up"] == 1.0
    assert all(row["speed_up"] > 0 for row in rows)
    assert len({json.dumps(row["metrics"]) for row in rows}) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["rows"] == rows


def test_a_size_with_few_batches_is_not_clear(tmp_path: Path) -> None:
    row = compare(tmp_path, [1, 16]).rows[1]
    assert (row["clear"], row["unclear_because"]) == (False, "20 samples are only 2 batches of 16")


def test_a_size_that_does_not_fit_is_a_row_with_its_reason(tmp_path: Path) -> None:
    found = compare(tmp_path, [1, 4, 8], model="small")
    assert [bool(row["failed"]) for row in found.rows] == [False, False, True]
    assert found.rows[2]["failed"].startswith("does not fit: out of memory at 8")
    assert found.rows[2]["samples_per_second"] is None
    assert found.recommendation["batch_size"] in (None, 1, 4)
    assert not found.failed


class Notes(EvalListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_the_warm_up_has_a_note_for_each_size_and_a_round_one_for_all(tmp_path: Path) -> None:
    notes = Notes()
    compare(tmp_path, [1, 4, 8], model="small", listener=notes)
    assert [re.sub(r"[\d,]+\.\d", "N", line) for line in notes.lines] == [
        "warm-up: batch 1 N samples/s",
        "warm-up: batch 4 N samples/s",
        "a batch of 8 failed (host out of memory): its samples run again in smaller ones",
        "batch 8: does not fit: out of memory at 8, batches of at most 4 ran",
        *(f"round {number}: batch 1 N, batch 4 N samples/s" for number in (1, 2, 3)),
    ]


def test_ctrl_c_keeps_the_turns_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        turns.append(given)
        if len(turns) == 6:  # after the warm-up, a round, and the first turn of another
            raise KeyboardInterrupt
        return measured_setup(*given)

    monkeypatch.setattr(evaluation_compare, "measured_setup", measure)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, [1, 4])
    summary = json.loads((tmp_path / "run" / "run.json").read_text())["summary"]
    assert summary["interrupted"] is True
    assert [row["rounds"] for row in summary["rows"]] == [2, 1]
    assert summary["recommendation"]["clear"] is False
