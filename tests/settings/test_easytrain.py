"""Files of EasyTrain: they work unchanged, and what brim does otherwise is said."""

from __future__ import annotations

from typing import Any

import pytest

from brim.settings.config_files import expand_grid, read_sweep
from brim.settings.easytrain import read_foreign
from brim.settings.train_settings import train_settings
from tests.settings.sweep_problems import FILES, Write, check_model, messages


def test_a_whole_file_of_that_system_works_unchanged() -> None:
    sweep = read_sweep(FILES / "easytrain_grid.yaml", check_model=check_model)
    assert (sweep.max_experiments, sweep.device_ids, sweep.results_file) == (50, (2, 3), "actions.csv")
    expansion = sweep.expand(strict=True)
    found = [
        (one.varied["model.type"], one.varied["hp.batch_size"], one.varied["hp.learning_rate"]) for one in expansion
    ]
    assert found == [("mc3_18", 64, 0.001), ("mc3_18", 64, 0.01), ("s3d", 32, 0.001), ("s3d", 32, 0.01)]
    assert expansion.experiments[0].settings == {
        "task": "video_classification",
        "data": {"type": "ucf101", "root": "data/ucf101", "num_workers": 16},
        "hp": {"frames": 16, "epochs": 10, "batch_size": 64, "learning_rate": 0.001},
        "optimizer": {"params": {"eps": 1e-8, "weight_decay": 0.01}, "name": "adamw"},
        "scheduler": {"name": "cosine", "params": {"T_max": 10}},
        "model": {"type": "mc3_18"},
    }
    notes = messages(expansion.problems, "note")
    assert notes["task.tag"] == "read as task"
    assert notes["data.params.clip_len"] == "read as hp.frames"
    assert notes["multi_gpu.strategy"].startswith("brim does not need it")
    assert {"swanlab.project_name", "training.exp_name", "loss.name", "output.results_dir"} <= set(notes)
    assert all(one.line is not None for one in expansion.problems)
    assert all(train_settings(one.settings) for one in expansion)


def test_named_groups_pair_each_for_itself() -> None:
    expansion = expand_grid(FILES / "easytrain_groups.yaml", check_model=check_model)
    found = [(one.group, one.settings["model"]["type"], one.settings["hp"]["batch_size"]) for one in expansion]
    assert found == [
        ("light", "r3d_18", 64), ("light", "mc3_18", 64), ("light", "r2plus1d_18", 64),
        ("separable", "s3d", 32), ("separable", "s3d", 32), ("separable", "s3d", 64), ("separable", "s3d", 64),
        ("attention", "mvit_v1_b", 36), ("attention", "mvit_v1_b", 36),
        ("attention", "mvit_v2_s", 32), ("attention", "mvit_v2_s", 32),
    ]  # fmt: skip
    assert all(one.settings["optimizer"]["name"] == "adamw" for one in expansion)
    assert [one.settings.get("scheduler") for one in expansion][3:9] == [
        {"name": "cosine"}, {"name": "none"}, {"name": "cosine"}, {"name": "none"},
        {"name": "cosine", "params": {"eta_min": 5e-5}, "warmup_epochs": 1},
        {"name": "step", "params": {"step_size": 3, "gamma": 0.9}},
    ]  # fmt: skip
    assert messages(expansion.problems, "note")["scheduler"].startswith("schedulers are read as EasyTrain has them")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "warmup_cosine"}, {"name": "cosine", "warmup_epochs": 1, "params": {"eta_min": 1e-5}}),
        (
            {"name": "warmup_cosine", "params": {"warmup_epochs": 99, "eta_min": 1e-6, "gamma": 2}},
            {"name": "cosine", "warmup_epochs": 9, "params": {"eta_min": 1e-6}},
        ),
        (
            {"name": "cosine", "params": {"eta_min_factor": 0.5, "T_max": 4}},
            {"name": "cosine", "params": {"eta_min": 5e-4, "T_max": 4}},
        ),
        ({"name": "none", "params": {"eta_min_factor": 0.5}}, {"name": "none"}),
        (
            {"name": "exponential", "params": {"warmup_epochs": 1, "gamma": 0.5}},
            {"name": "exponential", "params": {"gamma": 0.5}},
        ),
        (
            {"name": "cosine", "params": {"gamma": 0.5}},
            {"name": "cosine", "params": {"gamma": 0.5}},
        ),  # for the trainer to refuse
    ],
)
def test_their_schedulers_are_turned_into_brims(given: dict[str, Any], found: dict[str, Any]) -> None:
    expansion = expand_grid({"scheduler": given, "grid_search": {"grid": {"model.type": ["a"]}}})
    assert expansion.experiments[0].settings["scheduler"] == found


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("hyperparameters.learning_rate", 0.1, ("hp.learning_rate", 0.1)),
        ("hp.data_percentage", 0.5, ("data.percentage", 50.0)),
        ("model.params.pretrained", True, ("model.weights", "auto")),
        ("model.params.pretrained", False, ("model.weights", "none")),
        ("data.train_split", 0.8, ("data.val_fraction", 0.2)),
        ("data.train_split", "train", ("data.train_split", "train")),
        ("training.early_stopping.patience", 5, ("training.early_stopping", 5)),
        ("loss.params.label_smoothing", 0.1, ("hp.label_smoothing", 0.1)),
        ("optimizer.name", "adam", ("optimizer.name", "adam")),
    ],
)
def test_their_keys_are_turned_into_brims(key: str, value: Any, found: tuple[str, Any]) -> None:
    reading = read_foreign(key, [value])
    assert (reading.key, reading.values[0]) == found
    assert reading.severity == (None if reading.key == key else "note")


def test_what_brim_cannot_do_is_warned_of_only_where_it_is_asked_for() -> None:
    assert read_foreign("hp.dropout", [0.1]).severity == "warning"
    assert read_foreign("hp.dropout", [0]).severity == "note"
    assert read_foreign("model.params.freeze_backbone", [False]).severity == "note"
    assert read_foreign("data.params.labels_file", ["x.csv"]).severity == "warning"
    assert read_foreign("swanlab.config.task", ["x"]).severity == "note"


def test_the_arguments_of_a_factory_of_ones_own_are_left_alone(write: Write) -> None:
    text = "model: {{params: {{num_classes: 7, pretrained: true}}}}\ngrid_search: {{grid: {{model.type: [{model}]}}}}\n"
    own = expand_grid(write(text.format(model="'py:net.py:make'"))).experiments[0].settings["model"]
    assert own == {"type": "py:net.py:make", "params": {"num_classes": 7, "pretrained": True}}
    other = expand_grid(write(text.format(model="r3d_18"))).experiments[0].settings["model"]
    assert other == {"type": "r3d_18", "weights": "auto"}


@pytest.mark.parametrize("text", ["0", '"2,3"', "[2, 3]", "' 1 '"])
def test_devices_are_written_in_three_ways(write: Write, text: str) -> None:
    sweep = read_sweep(write(f"gpu: {{device_ids: {text}}}\nmodel: {{type: a}}\n"))
    assert read_sweep(write(f"gpu.device_ids: {text}\nmodel: {{type: a}}\n")).device_ids == sweep.device_ids
    assert sweep.device_ids == {"0": (0,), '"2,3"': (2, 3), "[2, 3]": (2, 3), "' 1 '": (1,)}[text]


def test_the_oldest_forms_of_a_grid_are_read(write: Write) -> None:
    loose = expand_grid(
        write("grid_search:\n  model.type: [a, b]\n  hyperparameters.batch_size: [4, 8]\n  max_experiments: 1\n")
    )
    assert [one.flat for one in loose] == [{"model.type": "a", "hp.batch_size": 4}]
    top = expand_grid(write("grid:\n  model_type: [a, b]\n  learning_rate: [1e-3]\n  optimizer_type: [sgd]\n"))
    assert [one.flat["model.type"] for one in top] == ["a", "b"]
    assert top.experiments[0].flat["optimizer.name"] == "sgd"
