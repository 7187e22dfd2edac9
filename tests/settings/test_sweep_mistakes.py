"""Sweep files and overrides that are wrong: every problem, with its line and key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.config_files import expand_grid, inspect_sweep, validate_grid
from brim.settings.problems import Problem
from tests.settings.sweep_problems import FILES, GRID, SHORT, Write, check_model


def assert_told(found: Sequence[Problem], line: int | None, key: str, words: str) -> None:
    """One of the errors is of this line and key, and has the value, the names or the choices that help."""
    messages = [one.message for one in found if (one.severity, one.line, one.key) == ("error", line, key)]
    assert any(all(word in message for word in words.split(" … ")) for message in messages), (words, found)


def test_every_problem_of_a_file_is_reported_with_its_line() -> None:
    found = validate_grid(FILES / "wrong.yaml", check_model=check_model)
    expected = [
        (2, "hp.epochs", "0"),
        (3, "hp.batchsize", "hp.batch_size"),
        (4, "grid_serach", "grid_search"),
        (7, "grid_search.pairing", "'zipp' … auto, zip, product"),
        (9, "model.type", "r3d_81"),
        (10, "hp.batch_size", "0 … auto"),
        (11, "hp.learning_rate", "-1"),
        (12, "optimizer.name", "no values"),
        (13, "hp.frames", "no values"),
        (14, "grid_search.zip", "hp.frame … hp.frames"),
        (15, "grid_search.seeds", "seeds"),
        (17, "hp.epochz", "hp.epochs"),
    ]
    assert [(one.line, one.key) for one in found if one.severity == "error"] == [case[:2] for case in expected]
    for case in expected:
        assert_told(found, *case)
    with pytest.raises(RequestError, match="12 errors"):
        expand_grid(FILES / "wrong.yaml", check_model=check_model)


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        (
            "grid_search: 3\n",
            1,
            "grid_search",
            "section … 3",
        ),
        (
            "grid_search:\n  grid: [1]\n",
            2,
            "grid_search.grid",
            "section … [1]",
        ),
        (
            f"hp: 3\n{SHORT}",
            1,
            "hp",
            "section … 3",
        ),
        (
            "model: {type: a}\nhp:\n  batch_size: 12.5\n",
            3,
            "hp.batch_size",
            "12.5 … auto",
        ),
        (
            "model: {type: a}\nhp:\n  batch_size: yes\n",
            3,
            "hp.batch_size",
            "True … auto",
        ),
        (
            "grid_search:\n  grid:\n    model.type:\n      - a\n      - 3\n",
            5,
            "model.type",
            "3 … text",
        ),
        (
            f"{GRID}  fixed:\n    model.type: b\n",
            4,
            "model.type",
            "fixed … grid",
        ),
        (
            f"{GRID}  groups: {{g: {{model.type: [b]}}}}\n",
            3,
            "grid_search.groups",
            "grid … groups",
        ),
        (
            "grid_search:\n  groups:\n    g: 3\n",
            3,
            "grid_search.groups.g",
            "group",
        ),
        (
            f"{GRID}  zip: [[model.type]]\n",
            3,
            "grid_search.zip",
            "two or more",
        ),
        (
            "grid_search:\n  grid: {model.type: a, hp.size: 1}\n  zip: [[hp.size, model.type], [hp.size, hp.size]]\n",
            3,
            "grid_search.zip",
            "hp.size … twice",
        ),
        (
            f"{GRID}  repeat: 0\n",
            3,
            "grid_search.repeat",
            "0 … 1",
        ),
        (
            f"{GRID}  repeat: 2\n  seeds: [1]\n",
            4,
            "grid_search.seeds",
            "seeds … repeat",
        ),
        (
            "grid_search:\n  grid: {model.type: [a], hp.seed: [1]}\n  repeat: 2\n",
            3,
            "grid_search.repeat",
            "hp.seed",
        ),
        (
            f"{GRID}  exclude: 3\n",
            3,
            "grid_search.exclude",
            "list … 3",
        ),
        (
            f"{GRID}  include:\n    - 3\n",
            4,
            "grid_search.include",
            "3 … mapping",
        ),
        (
            f"{GRID}  piring: zip\n",
            3,
            "grid_search.piring",
            "pairing",
        ),
        (
            f"pairing: zip\n{SHORT}",
            1,
            "pairing",
            "grid_search",
        ),
        (
            f"models_to_train: [3]\n{SHORT}",
            1,
            "models_to_train",
            "[3] … models",
        ),
        (
            f"max_experiments: 0\n{SHORT}",
            1,
            "max_experiments",
            "0 … 1",
        ),
        (
            f"gpu: {{device_ids: '0,x'}}\n{SHORT}",
            1,
            "gpu.device_ids",
            "'0,x' … GPU",
        ),
        (
            f"gpu: {{device_ids: [0, 0]}}\n{SHORT}",
            1,
            "gpu.device_ids",
            "[0, 0] … GPU",
        ),
        (
            f"loss: {{name: focal}}\n{SHORT}",
            1,
            "loss.name",
            "'focal' … loss",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    optimizer.params.x: [1]\n    optimizer.params.x.y: [2]\n",
            5,
            "optimizer.params.x.y",
            "optimizer.params.x",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    optimizer.name: [adam]\n    optimizer: [{name: sgd}]\n",
            5,
            "optimizer",
            "optimizer.name",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    model_name: [b]\n",
            4,
            "model_name",
            "model.type … twice",
        ),
        (
            "hp: {epochs: 1}\nhp.epochs: 2\nmodel: {type: a}\n",
            2,
            "hp.epochs",
            "hp.epochs … twice",
        ),
        (
            "model: {type: a}\noptimizer: {params: {x: .inf}}\n",
            2,
            "optimizer.params.x",
            "inf",
        ),
        (
            "hp: {epochs: 1}\n",
            None,
            "model.type",
            "missing … r3d_18",
        ),
        (
            "model: {type: a}\nhp: {weight_decay: 0.1}\ngrid_search: {grid: {optimizer.params.weight_decay: 1}}\n",
            2,
            "hp.weight_decay",
            "optimizer.params.weight_decay",
        ),
        (
            "grid_search:\n  grid: {model.type: [a, b], hp.batch_size: [1, 2, 3]}\n  pairing: zip\n",
            2,
            "hp.batch_size",
            "zip … 2 … 3",
        ),
        (
            "a..b: 3\nmodel: {type: a}\n",
            1,
            "a..b",
            "no such key",
        ),
    ],
)
def test_a_mistake_is_reported_with_line_and_key(
    write: Write, text: str, line: int | None, key: str, words: str
) -> None:
    problems = validate_grid(write(text))
    assert_told(problems, line, key, words)
    assert all(one.file.endswith("sweep.yaml") for one in problems)
    with pytest.raises(RequestError):
        expand_grid(write(text))


def test_problems_of_the_yaml_itself_come_the_same_way(write: Write) -> None:
    problems = validate_grid(write("hp: {epochs: 1}\nhp: {epochs: 2}\n"))
    assert [(one.severity, one.line, one.key) for one in problems] == [("error", 2, "hp")]
    assert_told(problems, 2, "hp", "twice … line 1")


def test_a_warning_is_an_error_when_strict_and_a_note_never_is(write: Write) -> None:
    path = write("task: {tag: regression}\ngrid_search:\n  grid: {model.type: [a, b], hp.batch_size: [1, 2, 3]}\n")
    assert [one.severity for one in validate_grid(path)] == ["note", "warning"]
    assert [one.severity for one in validate_grid(path, strict=True)] == ["note", "error"]
    assert len(expand_grid(path)) == 6
    with pytest.raises(RequestError, match="2 models and 3 batch sizes"):
        expand_grid(path, strict=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hp.learning_rat=1", "command line: error: hp.learning_rat: … hp.learning_rate"),
        ("hp.lr=1", "command line: error: hp.lr: … hp.learning_rate"),
        ("optimizer=[{name: sgd}, 3]", "command line: error: optimizer: … 3"),
        ("hp.batch_size=0", "command line: error: hp.batch_size: 0 … auto"),
        ("hp.batch_size=[]", "command line: error: hp.batch_size: … no values"),
        ("grid_search.grid.hp.size=3", "setting alone"),
        ("grid_search.pairing=both", "command line: error: grid_search.pairing: 'both'"),
        ("hp.epochs", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("--epochs=3", "without dashes"),
        ("hp.epochs=", "null"),
        ("hp.epochs=[1", "YAML"),
        ("hp..x=1", "dot"),
        ("model.type=nope", "nope"),
    ],
)
def test_a_wrong_override_is_reported_as_an_override(override: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        expand_grid(FILES / "seed.yaml", overrides=[override], check_model=check_model)
    assert all(word in str(caught.value) for word in words.split(" … "))


def test_an_override_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match=r"hp\.epochs: it is given twice"):
        expand_grid(FILES / "seed.yaml", overrides=["hp.epochs=1", "hp.epochs=2"])


GRID_NAMES = ("grid", "groups", "fixed", "zip", "exclude", "include", "seeds", "repeat", "pairing")
SHAPES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(["auto", "a.b", "", "adam"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [*GRID_NAMES, "hp", "model.type", "hp.batch_size", "optimizer", "name", "params", "x", "a..b"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    SHAPES,
    st.dictionaries(st.sampled_from(["hp", "model", "gpu", "models_to_train", "grid", "task"]), SHAPES, max_size=3),
)
def test_whatever_a_file_holds_ends_in_experiments_or_a_wrong_request(grid: Any, rest: dict[str, Any]) -> None:
    source = {**rest, "grid_search": grid}
    try:
        expansion = expand_grid(source, max_experiments=20)
    except RequestError:
        return
    sweep, problems = inspect_sweep(source)
    assert sweep is not None
    assert not any(one.severity == "error" for one in problems)
    assert 1 <= len(expansion) <= 20
