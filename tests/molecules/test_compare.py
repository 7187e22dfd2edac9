"""`brim ood --compare-batch`, `--plan` and `--gradient-checkpointing`: sizes of the heads' steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.comparing.rounds import RoundRules
from brim.errors import RequestError
from brim.molecules.run import OodResult, compare_ood, ood
from brim.settings.molecule_settings import OodCommand, OodRequest
from tests.molecules.molecule_files import features_of

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

QUICK = RoundRules(most=3)


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, str]:
    inner = features_of(tmp_path / "in.safetensors", 120, shift=0.0)
    outer = features_of(tmp_path / "out.safetensors", 100, shift=1.5, seed=1)
    return {"id": str(inner), "ood": str(outer)}


def request(sides: dict[str, str], **more: Any) -> OodRequest:
    return OodRequest(**{**sides, "seeds": (0, 1), "epochs": 4, "hidden": (16, 8), "device": "cpu", **more})


def train(asked: OodRequest, output: Path) -> OodResult:
    return ood(OodCommand(request=asked, output=output))


def test_each_size_has_speed_memory_time_and_auroc(sides: dict[str, str], tmp_path: Path) -> None:
    command = OodCommand(request=request(sides), compare_batch=(8, 16), output=tmp_path / "run")
    found = compare_ood(command, rules=QUICK)
    fields = (
        "samples_per_second", "speed_up", "clear", "micro_batch_size", "accumulation_steps", "epoch_seconds",
        "total_seconds", "auroc", "final_loss", "peak_reserved_bytes", "limit_bytes", "headroom_fraction", "risk",
    )  # fmt: skip
    for row in found.rows:
        assert set(fields) <= set(row)
        assert row["rounds"] == 3
        assert 0.5 < row["auroc"] <= 1
        assert row["risk"] == "low"
        assert 0.5 < row["forecast_peak_bytes"] / row["peak_reserved_bytes"] < 2
        assert row["total_seconds"] == pytest.approx(4 * row["epoch_seconds"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["kind"], record["request"]["command"]) == ("comparison", "ood --compare-batch")
    assert not (tmp_path / "run" / "heads").exists()


def test_a_size_with_few_steps_is_not_clear(sides: dict[str, str], tmp_path: Path) -> None:
    command = OodCommand(request=request(sides, epochs=1), compare_batch=(8, 4096), output=tmp_path / "run")
    found = compare_ood(command, rules=QUICK)
    assert found.rows[1]["clear"] is False
    assert "of 4096" in found.rows[1]["unclear_because"]
    assert found.recommendation["batch_size"] in (None, 8)


def write_record(folder: Path, **parts: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"schema": "brim.run/1", **parts}))
    return str(folder)


def test_the_recommended_size_is_taken_from_a_comparison(sides: dict[str, str], tmp_path: Path) -> None:
    asked = {"command": "ood --compare-batch"}
    summary = {"recommendation": {"batch_size": 24, "text": "batch size 24"}}
    folder = write_record(tmp_path / "compared", kind="comparison", request=asked, summary=summary)
    result = train(request(sides, plan=folder), tmp_path / "run")
    assert result.summary["effective_batch_size"] == 24
    named = train(request(sides, plan=folder, effective_batch=8), tmp_path / "named")
    assert named.summary["effective_batch_size"] == 8


def test_sizes_are_taken_from_an_earlier_run(sides: dict[str, str], tmp_path: Path) -> None:
    first = train(request(sides, effective_batch=32, batch_size=8), tmp_path / "first")
    again = train(request(sides, plan=str(tmp_path / "first")), tmp_path / "again")
    for name in ("effective_batch_size", "micro_batch_size", "accumulation_steps", "eval_batch_size"):
        assert again.summary[name] == first.summary[name]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kind": "eval", "request": {"command": "eval"}, "summary": {}}, "no run of brim ood"),
        ({"kind": "comparison", "request": {"command": "ood --compare-batch"},
          "summary": {"recommendation": {"batch_size": None, "text": "not clear: noise"}}}, "not clear: noise"),
    ],
)  # fmt: skip
def test_a_plan_without_sizes_is_refused(
    sides: dict[str, str], tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    folder = write_record(tmp_path / "other", **record)
    with pytest.raises(RequestError, match=words):
        train(request(sides, plan=folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_checkpointed_heads_learn_the_same_and_are_not_stacked(sides: dict[str, str], tmp_path: Path) -> None:
    plain = train(request(sides), tmp_path / "plain")
    checkpointed = train(request(sides, gradient_checkpointing=True), tmp_path / "checkpointed")
    assert checkpointed.summary["fast_path"] == "resident"
    for one, other in zip(plain.cells, checkpointed.cells, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"hidden": (16,)}, "too few layers"), ({"fast_path": "stacked"}, "share one backward pass")],
)
def test_checkpointing_is_refused_where_it_saves_nothing(
    sides: dict[str, str], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        request(sides, gradient_checkpointing=True, **more)


def test_a_comparison_is_not_resumed(sides: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not resumed"):
        OodCommand(request=request(sides, resume=True), compare_batch=(8, 16), output=tmp_path)
