"""Files of sweeps and of single runs that work: seeds, filters, overrides, what stays when a file is edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import RequestError
from brim.settings.config_files import expand_grid, inspect_training_file, read_sweep, read_training_file, validate_grid
from brim.settings.train_settings import SETTING_KEYS, train_settings
from tests.settings.sweep_problems import FILES, GRID, KNOWN, Write, check_model, errors


def test_the_seeds_own_file_works_unchanged() -> None:
    expansion = brim.expand_grid(FILES / "seed.yaml", check_model=check_model, strict=True)
    found = [(one.settings["model"]["type"], one.settings["hp"]["batch_size"]) for one in expansion]
    assert found == list(zip(KNOWN, (128, 64, 128, 32, 16, 16, 16, 16, 16), strict=True))
    assert (expansion.pairing.mode, expansion.product) == ("zip", 81)
    assert brim.validate_grid(FILES / "seed.yaml") == ()
    for one in expansion:
        assert train_settings(one.settings).optimizer.name == "adam"


def test_exclude_include_repeat_and_zip_of_a_file(write: Write) -> None:
    path = write(
        """
data: {root: here}
grid_search:
  fixed: {hp: {epochs: 3}}
  grid:
    model: {type: [r3d_18, s3d]}
    hp.frames: [8, 16]
    hp.batch_size: [64, 32]
    hp.learning_rate: [0.1, 0.01]
  zip: [model.type, hp.batch_size, hp.frames]
  exclude:
    - {model.type: s3d, hp.learning_rate: [0.1, 0.2]}
  include:
    - model.type: mc3_18
      hp.batch_size: auto
  repeat: 2
"""
    )
    expansion = expand_grid(path)
    found = [
        tuple(one.settings["hp"].get(key) for key in ("batch_size", "frames", "learning_rate", "seed"))
        for one in expansion
    ]
    assert found == [
        (64, 8, 0.1, 0), (64, 8, 0.1, 1), (64, 8, 0.01, 0), (64, 8, 0.01, 1),
        (32, 16, 0.01, 0), (32, 16, 0.01, 1), ("auto", None, None, 0), ("auto", None, None, 1),
    ]  # fmt: skip
    assert all(one.settings["hp"]["epochs"] == 3 for one in expansion)
    assert expansion.problems == ()


@pytest.mark.parametrize(
    ("seeds", "found"), [("seeds: [3, 5]", [3, 5]), ("seeds: 2", [4, 5]), ("repeat: 2", [4, 5]), ("repeat: 1", [4])]
)
def test_seeds_are_a_list_or_a_number_from_the_files_own(write: Write, seeds: str, found: list[int]) -> None:
    path = write(f"hp: {{seed: 4}}\ngrid_search:\n  grid: {{model.type: [a]}}\n  {seeds}\n")
    assert [one.settings["hp"]["seed"] for one in expand_grid(path)] == found


def test_overrides_replace_single_values_lists_and_pairs() -> None:
    def first(*overrides: str) -> dict[str, Any]:
        return expand_grid(FILES / "seed.yaml", overrides=overrides).experiments[0].flat

    assert first("hp.learning_rate=0.01")["hp.learning_rate"] == 0.01
    assert first("hp.epochs=3")["hp.epochs"] == 3
    assert first("optimizer={name: sgd, params: {momentum: 0.9}}")["optimizer.params.momentum"] == 0.9
    broadcast = expand_grid(FILES / "seed.yaml", overrides=["hp.batch_size=auto"])
    assert {one.settings["hp"]["batch_size"] for one in broadcast} == {"auto"}
    assert (len(broadcast), broadcast.pairing.mode) == (9, "product")
    more = expand_grid(FILES / "seed.yaml", overrides=["hp.learning_rate=[0.1, 0.01]", "hp.frames=[8, 16]"])
    assert len(more) == 36
    sections = expand_grid(FILES / "seed.yaml", overrides=["scheduler=[{name: none}, {name: cosine}]"])
    assert [one.flat["scheduler.name"] for one in sections][:2] == ["none", "cosine"]
    crossed = expand_grid(FILES / "seed.yaml", overrides=["grid_search.pairing=product"])
    assert (len(crossed), crossed.product) == (36, 81)
    fewer = expand_grid(FILES / "seed.yaml", overrides={"models_to_train": ["s3d"], "grid_search.seeds": [1, 2]})
    assert [(one.settings["model"]["type"], one.settings["hp"]["seed"]) for one in fewer] == [("s3d", 1), ("s3d", 2)]


def test_overrides_reach_groups_and_included_experiments(write: Write) -> None:
    groups = expand_grid(FILES / "easytrain_groups.yaml", overrides=["hp.batch_size=8", "hp.epochs=1"])
    assert {(one.settings["hp"]["batch_size"], one.settings["hp"]["epochs"]) for one in groups} == {(8, 1)}
    included = expand_grid(
        write("grid_search: {include: [{model.type: a, hp.epochs: 3}]}\n"), overrides=["hp.epochs=7", "hp.seed=2"]
    )
    assert [one.flat for one in included] == [{"model.type": "a", "hp.epochs": 7, "hp.seed": 2}]


def test_an_overriding_seed_comes_before_the_files_seeds(write: Write) -> None:
    path = write("grid_search: {grid: {model.type: [a]}, seeds: [1, 2]}\n")
    assert [one.flat["hp.seed"] for one in expand_grid(path, overrides=["hp.seed=9"])] == [9]
    assert [one.flat["hp.seed"] for one in expand_grid(path, overrides=["hp.seed=[8, 9]"])] == [8, 9]


def test_a_python_mapping_is_a_grid_or_a_whole_file() -> None:
    grid = {"model.type": ("a", "b"), "hp.batch_size": (1, 2), "hp": {"epochs": range(1, 3)}}
    assert len(expand_grid(grid)) == 4
    whole = {"hp": {"epochs": 3}, "grid_search": {"grid": {"model.type": ["a", "b"]}}}
    assert [one.settings["hp"]["epochs"] for one in expand_grid(whole)] == [3, 3]
    assert str(validate_grid({"hp.batch_size": [0]})[0]).startswith("error: hp.batch_size: 0")
    with pytest.raises(RequestError, match=r"hp\.size: \{1\} is a set"):
        expand_grid({"hp.size": [{1}]})


def test_a_limit_in_the_file_is_noted_and_overridden_by_a_flag(write: Write) -> None:
    path = write("max_experiments: 2\ngrid_search:\n  grid: {model.type: [a, b, c]}\n")
    expansion = expand_grid(path)
    assert len(expansion) == 2
    assert [(one.severity, one.line) for one in expansion.problems] == [("note", 1)]
    assert len(expand_grid(path, max_experiments=3)) == 3
    with pytest.raises(RequestError, match="max_experiments=0"):
        expand_grid(path, max_experiments=0)


def test_a_later_finding_about_an_experiment_gets_its_line(write: Write) -> None:
    path = write(
        """grid_search:
  grid:
    model.type: [a, b]
    hp.batch_size:
      - 64
      - 32
    hp.learning_rate: [1]
  fixed:
    hp.frames: 16
  include:
    - model.type: c
      hp.batch_size: 4
"""
    )
    sweep = read_sweep(path, overrides=["hp.epochs=3", "hp.learning_rate=2"])
    _, second, third = sweep.expand()
    found = sweep.problem(second, "hp.batch_size", "needs 30 GiB", fix="16 would fit")
    assert (found.line, found.severity) == (6, "error")
    assert str(found).endswith("sweep.yaml:6: error: hp.batch_size: needs 30 GiB; 16 would fit")
    assert sweep.problem(second, "hp.frames", "x").line == 9
    assert sweep.problem(third, "hp.batch_size", "x").line == 11
    assert sweep.problem(second, "hp.epochs", "x").file == "command line"
    assert sweep.problem(second, "hp.learning_rate", "x").file == "command line"
    assert sweep.problem(second, "hp.size", "x").line is None


def test_every_setting_of_a_training_run_is_accepted_in_a_grid() -> None:
    examples = {"text": "auto", "size": "24GiB", "any": 1, "true or false": True, "fraction below 1": 0.5}
    for key, row in SETTING_KEYS.items():
        value = examples.get(row.takes, row.default if row.default is not None else 1)
        dotted = key.replace("*", "x")
        if key == "task":
            value = "regress"
        elif key == "training.lr_scale":
            value = "sqrt"
        elif key in ("training.margin", "data.val_fraction"):
            value = 0.5
        grid = {"model.type": ["m"], dotted: [value]} if dotted != "model.type" else {dotted: ["m"]}
        assert errors(validate_grid(grid)) == [], dotted


def test_a_file_without_a_grid_is_one_experiment(write: Write) -> None:
    expansion = expand_grid(write("model: {type: r3d_18}\nhp: {epochs: 1}\n"))
    assert [one.flat for one in expansion] == [{"model.type": "r3d_18", "hp.epochs": 1}]


def test_sections_with_everything_commented_out_are_empty(write: Write) -> None:
    text = f"model:\nhp:\n  epochs:\noptimizer: {{params: {{}}}}\ndata:\ngpu:\nmodels_to_train:\n{GRID}  exclude:\n"
    assert [one.flat for one in expand_grid(write(text))] == [{"model.type": "a"}]


def test_editing_a_file_keeps_the_ids_of_what_did_not_change(write: Write) -> None:
    text = "data: {root: d}\ngrid_search:\n  grid:\n    model.type: [a, b]\n    hp.batch_size: [8, 4]\n"
    before = {one.id for one in expand_grid(write(text))}
    edited = (
        "# more\ngrid_search:\n  grid:\n    hp.batch_size: [16, 4, 8]\n    model.type: [c, b, a]\ndata: {root: d}\n"
    )
    assert before < {one.id for one in expand_grid(write(edited))}
    assert not before & {one.id for one in expand_grid(write(text.replace("root: d", "root: e")))}
    ignored = text + "training: {exp_name: other}\ngpu: {device_ids: 1}\n"
    assert before == {one.id for one in expand_grid(write(ignored))}


def test_a_name_and_a_description_are_noted(write: Write) -> None:
    problems = validate_grid(write(f"name: mine\ndescription: for people\n{GRID}"))
    assert [(one.severity, one.line, one.key) for one in problems] == [("note", 1, "name"), ("note", 2, "description")]


def test_a_model_is_looked_up_once(write: Write) -> None:
    asked: list[str] = []
    expand_grid(
        write("grid_search: {grid: {model.type: [a, b, a], hp.batch_size: [1, 2, 3]}}\n"), check_model=asked.append
    )
    assert asked == ["a", "b"]


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
