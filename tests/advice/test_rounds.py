"""Advice tried, applied, kept in rounds and taken back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.advice.advise import advise_run
from brim.advice.run_reader import Run, open_run
from brim.cli.main import run as run_command
from brim.errors import RequestError
from tests import saved_models
from tests.advice import advised_runs
from tests.training import training_runs


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_command(words)
    return int(stopped.value.code or 0)


@pytest.fixture
def slow(tmp_path: Path) -> Run:
    """An evaluation one by one of a text classifier."""
    model = saved_models.save_text_classifier(tmp_path / "texts")
    lines = [{"text": "w1 w2", "label": ("calm", "angry", "sad")[n % 3]} for n in range(32)]
    data = advised_runs.write_lines(tmp_path / "texts.jsonl", lines)
    return advised_runs.evaluated(model, data, tmp_path / "runs" / "first", batch_size=1)


def rounds_of(run: Run) -> list[dict[str, Any]]:
    document = json.loads((run.folder / "rounds.json").read_text())
    assert document["schema"] == "brim.rounds/1"
    rounds: list[dict[str, Any]] = document["rounds"]
    return rounds


def test_a_round_is_applied_filled_in_and_taken_back(slow: Run, tmp_path: Path) -> None:
    faster, before = tmp_path / "faster.yaml", tmp_path / "before.yaml"
    brim.advise(slow.folder, apply=faster)
    original, first = rounds_of(slow)
    assert original["samples_per_second"] == slow.summary["samples_per_second"]
    assert first["settings"] == {"batch_size": "auto"}
    assert first["run"] is None
    assert first["risk"]
    assert command("eval", "--settings", str(faster), "-o", str(tmp_path / "runs" / "second")) == 0
    second = open_run(tmp_path / "runs" / "second")
    assert second.request["batch_size"] is None
    history = brim.advise(slow.folder, history=True).rounds
    assert history is not None
    assert history.rounds[1]["run"] == str(second.folder)
    assert history.rounds[1]["samples_per_second"] == second.summary["samples_per_second"]
    assert history.rounds[1]["gain"]["value"] > 0
    brim.advise(slow.folder, rollback=before)
    assert [one["rolled_back"] for one in rounds_of(slow)] == [False, True]
    assert command("eval", "--settings", str(before), "-o", str(tmp_path / "runs" / "third")) == 0
    assert open_run(tmp_path / "runs" / "third").request["batch_size"] == 1
    with pytest.raises(RequestError, match="no round is in force"):
        brim.advise(slow.folder, rollback=before)


def test_a_second_round_belongs_to_the_same_original(slow: Run, tmp_path: Path) -> None:
    brim.advise(slow.folder, apply=tmp_path / "one.yaml")
    again = tmp_path / "runs" / "again"
    assert command("eval", "--settings", str(tmp_path / "one.yaml"), "-b", "2", "-o", str(again)) == 0
    document = json.loads((again / "run.json").read_text())
    document["summary"]["samples_per_second"] = 8 * slow.summary["samples_per_second"]  # however busy the machine is
    (again / "run.json").write_text(json.dumps(document))
    brim.advise(slow.folder, against=again)
    assert rounds_of(slow)[1]["run"] == str(again)
    brim.advise(slow.folder, apply=tmp_path / "two.yaml")
    assert [one["round"] for one in rounds_of(slow)] == [0, 1, 2]


def test_the_command_of_a_piece_of_advice_runs(slow: Run, tmp_path: Path) -> None:
    words = shlex.split(advise_run(slow)[0].command)
    assert words[:2] == ["brim", "eval"]
    assert command(*words[1:], "-o", str(tmp_path / "runs" / "second")) == 0
    assert open_run(tmp_path / "runs" / "second").summary["batch_size_used"] > 1


def test_advice_is_tried_in_turns_and_has_an_interval(slow: Run) -> None:
    result = brim.advise(slow.folder, try_out=True, try_samples=16)
    (tried,) = result.tried
    assert tried.name == "batch_size"
    assert len(tried.before) == len(tried.after) == 3
    assert tried.gain is not None
    assert tried.gain.low is not None
    assert tried.changed_answers is None
    assert result.document["tried"][0]["gain"]["measurements"] == 3


def test_changed_precision_is_tried_with_its_changed_answers_counted(slow: Run) -> None:
    from brim.advice.base import Advice
    from brim.advice.trials import try_advice

    half = Advice(name="precision", cause="", evidence="", settings={"dtype": "bfloat16"}, changes_answers=True)
    wrong = Advice(name="wrong", cause="", evidence="", settings={"knob": {"nothing": "1"}})
    found = try_advice(slow, [half, wrong], samples=8, repeats=3, note=lambda line: None)
    assert found[0].changed_answers is not None
    assert found[0].answers == 8
    assert found[1].gain is None
    assert "nothing" in found[1].error


def test_a_training_is_advised_tried_and_applied(tmp_path: Path) -> None:
    features = training_runs.write_features(tmp_path / "features.npz", count=96)
    nested = training_runs.settings_of(features, training__checkpoint_every=1)
    run = advised_runs.trained(nested, tmp_path / "runs" / "first")
    file = tmp_path / "faster.yaml"
    result = brim.advise(run.folder, try_out=True, try_samples=64, take="checkpoints", apply=file)
    assert result.tried[0].gain is not None
    assert "--take checkpoints --apply advised.yaml && brim train advised.yaml" in result.advice[0].command
    assert command("train", str(file), "--no-cache", "-o", str(tmp_path / "runs" / "second")) == 0
    second = open_run(tmp_path / "runs" / "second")
    assert second.request["settings"]["training"]["checkpoint_every"] is None
    assert second.request["settings"]["hp"] == run.request["settings"]["hp"]
    found = brim.advise(run.folder, history=True).rounds
    assert found is not None
    assert found.rounds[1]["run"] == str(second.folder)


def test_a_training_from_a_file_gets_its_file_with_overrides(tmp_path: Path) -> None:
    features = training_runs.write_features(tmp_path / "features.npz", count=96)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(training_runs.settings_of(features)))
    first = tmp_path / "runs" / "first"
    assert (
        command("train", str(config), "training.checkpoint_every=2", "hp.epochs=2", "--no-cache", "-o", str(first)) == 0
    )
    piece = next(one for one in advise_run(open_run(first)) if one.name == "checkpoints")
    words = shlex.split(piece.command)
    assert words[:3] == ["brim", "train", str(config)]
    assert set(words[3:]) == {"hp.epochs=2", "--no-cache"}


def test_the_command_prints_advice_and_history_at_eighty_columns(
    slow: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command("advise", str(slow.folder), "--apply", str(tmp_path / "f.yaml")) == 0
    shown = capsys.readouterr().out
    assert "batch_size" in shown
    assert "not measured" in shown
    assert command("advise", str(slow.folder), "--history") == 0
    shown = capsys.readouterr().out
    assert "original" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert command("advise", str(slow.folder), "--history", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"][1]["advice"] == ["batch_size"]


def test_a_piece_that_is_not_there_is_refused(slow: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such advice"):
        brim.advise(slow.folder, take="checkpoints", apply=tmp_path / "f.yaml")
