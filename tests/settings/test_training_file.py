"""One training run's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.settings.train_settings import train_settings
from brim.settings.training_file import inspect_training_file, read_training_file

TEXT = """task: {tag: video_classification}
model: {type: r3d_18, params: {num_classes: 101}}
hp:
  batch_size: auto
  learning_rate: 1e-3
optimizer.name: sgd
scheduler: {name: multisteplr, params: {milestones: [3, 5]}}
gpu: {device_ids: "0,1"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_becomes_settings(tmp_path: Path) -> None:
    settings, problems = read_training_file(write(tmp_path, TEXT), overrides=["hp.epochs=3"])
    checked = train_settings(settings)
    assert (checked.model.type, checked.hp.batch_size, checked.hp.learning_rate) == ("r3d_18", "auto", 0.001)
    assert (checked.hp.epochs, checked.optimizer.name) == (3, "sgd")
    assert checked.scheduler.params == {"milestones": [3, 5]}
    assert {problem.severity for problem in problems} == {"note"}
    assert (8, "gpu.device_ids") in [(problem.line, problem.key) for problem in problems]


def test_a_list_on_the_command_line_is_one_value(tmp_path: Path) -> None:
    overrides = ["scheduler.params.milestones=[1, 2]", "model.params.hidden=[8, 8]"]
    settings, _ = read_training_file(write(tmp_path, TEXT), overrides=overrides)
    assert settings["scheduler"]["params"] == {"milestones": [1, 2]}
    assert settings["model"]["params"] == {"hidden": [8, 8]}


def test_every_problem_comes_with_its_line(tmp_path: Path) -> None:
    text = TEXT.replace("auto", "-3").replace("learning_rate", "learning_rat")
    settings, problems = inspect_training_file(write(tmp_path, text))
    assert settings is None
    found = [(problem.line, problem.key) for problem in problems if problem.severity == "error"]
    assert found == [(4, "hp.batch_size"), (5, "hp.learning_rat")]


def test_settings_that_are_wrong_together_come_with_their_line(tmp_path: Path) -> None:
    text = TEXT + "hp.weight_decay: 0.1\noptimizer.params.weight_decay: 0.1\n"
    with pytest.raises(RequestError, match=r"train\.yaml:9: error: hp\.weight_decay: optimizer\.params\.weight_decay"):
        read_training_file(write(tmp_path, text))
    with pytest.raises(RequestError, match=r"model\.type: it is missing"):
        read_training_file(write(tmp_path, "hp: {epochs: 1}\n"))


@pytest.mark.parametrize("line", ["grid_search: {grid: {hp.epochs: [1, 2]}}", "models_to_train: [a]"])
def test_a_sweeps_file_is_pointed_to_the_sweep(tmp_path: Path, line: str) -> None:
    with pytest.raises(RequestError, match=r"train\.yaml:9: error: .* brim sweep"):
        read_training_file(write(tmp_path, TEXT + line))
    with pytest.raises(RequestError, match="brim sweep"):
        read_training_file(write(tmp_path, TEXT), overrides=["grid_search.repeat=2"])


def test_warnings_are_errors_when_strict(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + "hp.dropout: 0.5\n")
    assert [one.key for one in read_training_file(path)[1] if one.severity == "warning"] == ["hp.dropout"]
    with pytest.raises(RequestError, match=r"hp\.dropout"):
        read_training_file(path, strict=True)
