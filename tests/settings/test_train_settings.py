from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.train_settings import (
    SETTING_KEYS,
    TrainSettings,
    find_setting_key,
    setting_problems,
    train_settings,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def problems(nested: dict[str, Any]) -> dict[str, str]:
    return {problem.key: problem.message for problem in setting_problems(nested)}


def test_a_model_is_enough() -> None:
    settings = train_settings({"model": {"type": "r3d_18"}})
    assert settings.hp.batch_size == "auto"
    assert settings.optimizer.name == "adamw"
    assert settings.data.root is None


def test_what_a_file_of_the_seed_has_is_read() -> None:
    settings = train_settings(
        {
            "task": "video_classification",
            "model": {"type": "r3d_18"},
            "data": {"type": "ucf101", "root": "UCF101", "num_workers": 4, "params": {"fold": 1}},
            "hp": {"batch_size": 128, "learning_rate": "1e-3", "epochs": 3},
            "optimizer": {"name": "adam", "params": {"weight_decay": 0.01, "betas": [0.9, 0.99]}},
            "scheduler": {"name": "cosine", "params": {"T_max": 3}},
            "training": {"gradient_clip": 1.0},
            "gpu": {"device_ids": [0, 1]},
            "multi_gpu": True,
        }
    )
    assert settings.task == "classify"
    assert settings.hp.learning_rate == 0.001  # YAML reads 1e-3 as text
    assert settings.optimizer.params == {"weight_decay": 0.01, "betas": [0.9, 0.99]}


def test_dotted_keys_and_sections_say_the_same() -> None:
    dotted = train_settings({"model.type": "mlp", "hp.epochs": 3, "optimizer.params.weight_decay": 0.1})
    nested = train_settings(
        {"model": {"type": "mlp"}, "hp": {"epochs": 3}, "optimizer": {"params": {"weight_decay": 0.1}}}
    )
    assert dotted == nested


@pytest.mark.parametrize("empty", [None, {}])
def test_a_section_with_nothing_in_it_is_a_section(empty: Any) -> None:
    settings = train_settings({"model": {"type": "mlp", "params": empty}, "data": empty, "scheduler": empty})
    assert settings == train_settings({"model": {"type": "mlp"}})


@pytest.mark.parametrize(
    ("nested", "key", "words"),
    [
        ({"model": {"typ": "x"}}, "model.typ", "did you mean model.type"),
        ({"model": {"type": "x"}, "hp": {"epoch": 3}}, "hp.epoch", "did you mean hp.epochs"),
        ({"model": {"type": "x"}, "batch_size": 3}, "batch_size", "did you mean hp.batch_size"),
        ({"model": {"type": "x"}, "optimiser": {"name": "adam"}}, "optimiser.name", "did you mean optimizer.name"),
        ({"model": {"type": "x"}, "hp": {"batch_size": 0}}, "hp.batch_size", "auto or a whole number from 1"),
        ({"model": {"type": "x"}, "hp": {"batch_size": "many"}}, "hp.batch_size", "auto or a whole number from 1"),
        ({"model": {"type": "x"}, "hp": {"batch_size": True}}, "hp.batch_size", "auto or a whole number from 1"),
        ({"model": {"type": "x"}, "hp": {"learning_rate": -1}}, "hp.learning_rate", "above 0"),
        ({"model": {"type": "x"}, "hp": {"learning_rate": float("nan")}}, "hp.learning_rate", "above 0"),
        ({"model": {"type": "x"}, "hp": {"epochs": 1.5}}, "hp.epochs", "whole number"),
        ({"model": {"type": "x"}, "data": {"percentage": 101}}, "data.percentage", "up to 100"),
        ({"model": {"type": "x"}, "training": {"dtype": "half"}}, "training.dtype", "one of auto, float32"),
        ({"model": {"type": "x"}, "training": {"memory_limit": "lots"}}, "training.memory_limit", "24GiB"),
        ({"model": {"type": "x"}, "training": {"lr_scale": "cubic"}}, "training.lr_scale", "none, sqrt, linear, auto"),
        ({"model": {"type": "x"}, "training": {"fsdp": "perhaps"}}, "training.fsdp", "true or false"),
        ({"model": {"type": "x"}, "task": "dance"}, "task", "must be one of"),
        ({"model": {"type": ""}}, "model.type", "must be a text"),
        ({"model": "r3d_18"}, "model", "a section of keys"),
        ({}, "model.type", "it is missing"),
        ({"grid_search": {"grid": {}}}, "grid_search", "run it with brim sweep"),
        (
            {"model": {"type": "x"}, "hp": {"weight_decay": 0.1}, "optimizer": {"params": {"weight_decay": 0.2}}},
            "hp.weight_decay",
            "optimizer.params.weight_decay is given as well",
        ),
        ({"model": {"type": "x"}, "optimizer": {"params": {"lr": 1}}}, "optimizer.params.lr", "hp.learning_rate"),
        ({"model": {"type": "x", "knobs": {"size": 8}}, "hp": {"size": 9}}, "hp.size", "is given as well"),
    ],
)
def test_a_mistake_is_reported_with_its_key(nested: dict[str, Any], key: str, words: str) -> None:
    found = problems(nested)
    assert key in found
    assert words in found[key]
    with pytest.raises(RequestError, match=re.escape(key)):
        train_settings(nested)


def test_every_mistake_is_reported_at_once() -> None:
    found = problems({"model": {"type": "x"}, "hp": {"epochs": 0, "seed": -1}, "data": {"limit": 0}})
    assert set(found) == {"hp.epochs", "hp.seed", "data.limit"}


def test_settings_survive_json() -> None:
    settings = train_settings(
        {
            "model": {"type": "mlp", "params": {"hidden": [4], "deep": {"er": 1}}},
            "hp": {"effective_batch": "auto"},
            "data": {"limit": 5},
        }
    )
    assert train_settings(settings.to_json()) == settings


def values_of(key: str) -> st.SearchStrategy[Any]:
    takes = SETTING_KEYS[key].takes
    if takes == "true or false":
        return st.booleans()
    if takes.startswith("whole number"):
        return st.integers(1, 10_000)
    if takes.startswith("number"):
        return st.floats(0.001, 100, allow_nan=False)
    if takes.startswith("auto or"):
        return st.one_of(st.just("auto"), st.integers(1, 10_000))
    if takes == "fraction below 1":
        return st.floats(0, 0.999)
    if takes == "size":
        return st.integers(1, 1000).map(lambda count: f"{count}MiB")
    if " or " in takes:
        return st.sampled_from(takes.split(" or "))
    return st.just("none" if key == "training.lr_scale" else "classify" if key == "task" else "text")


PLAIN_KEYS = [
    key for key in SETTING_KEYS
    if not key.endswith("*")
    and key not in ("training.dtype", "data.limit", "data.percentage", "scheduler.warmup_steps")
]  # fmt: skip


@given(st.fixed_dictionaries({}, optional={key: values_of(key) for key in PLAIN_KEYS}))
def test_any_good_values_are_taken_and_come_back(values: dict[str, Any]) -> None:
    settings = train_settings({"model.type": "mlp", **values})
    assert isinstance(settings, TrainSettings)
    assert train_settings(settings.to_json()) == settings


def test_a_key_under_a_star_is_found_however_deep_it_is() -> None:
    assert find_setting_key("optimizer.params.betas") is SETTING_KEYS["optimizer.params.*"]
    assert find_setting_key("data.params.a.b") is SETTING_KEYS["data.params.*"]
    assert find_setting_key("optimizer.params.") is None
    assert find_setting_key("hp.nothing") is None


def test_the_table_of_the_documentation_is_the_list_of_keys() -> None:
    """docs/training.md: one row for each key, with what it takes, its default and its meaning."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {key: (takes, default, text) for key, takes, default, text in rows}
    expected = {
        key: (row.takes, "" if row.default is None else f"`{str(row.default).lower()}`"
              if isinstance(row.default, bool) else f"`{row.default}`", row.help.replace("|", "\\|"))
        for key, row in SETTING_KEYS.items()
    }  # fmt: skip
    assert documented == expected
