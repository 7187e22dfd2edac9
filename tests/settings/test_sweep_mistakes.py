"""Sweep files and overrides that are wrong: every problem, with its line and key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.config_files import expand_grid, inspect_sweep, validate_grid
from tests.settings.sweep_problems import FILES, GRID, SHORT, Write, check_model, errors


def test_every_problem_of_a_file_is_reported_at_once_with_its_line() -> None:
    found = errors(validate_grid(FILES / "wrong.yaml", check_model=check_model))
    assert found == [
        (2, "hp.epochs", "0: it must be a whole number from 1"),
        (3, "hp.batchsize", "there is no such key; did you mean hp.batch_size?"),
        (4, "grid_serach", "there is no such key; did you mean grid_search?"),
        (7, "grid_search.pairing", "'zipp': it must be one of auto, zip, product; did you mean zip?"),
        (9, "model.type", "MODEL 'r3d_81': no such model"),
        (10, "hp.batch_size", "0: it must be auto or a whole number from 1"),
        (11, "hp.learning_rate", "-1: it must be a number above 0"),
        (12, "optimizer.name", "it has no values"),
        (13, "hp.frames", "it has no values"),
        (14, "grid_search.zip", "hp.frame is no list of the grid; did you mean hp.frames?"),
        (15, "grid_search.seeds", "it must be a list of different seeds"),
        (17, "hp.epochz", "there is no such key; did you mean hp.epochs?"),
    ]
    with pytest.raises(RequestError, match="12 errors to correct"):
        expand_grid(FILES / "wrong.yaml", check_model=check_model)


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        (
            "grid_search: 3\n",
            1,
            "grid_search",
            "it is a section of keys, not 3",
        ),
        (
            "grid_search:\n  grid: [1]\n",
            2,
            "grid_search.grid",
            "it is a section of keys, not [1]",
        ),
        (
            f"hp: 3\n{SHORT}",
            1,
            "hp",
            "it is a section of keys, not 3",
        ),
        (
            "model: {type: a}\nhp:\n  batch_size: 12.5\n",
            3,
            "hp.batch_size",
            "12.5: it must be auto or a whole number from 1",
        ),
        (
            "model: {type: a}\nhp:\n  batch_size: yes\n",
            3,
            "hp.batch_size",
            "True: it must be auto or a whole number from 1",
        ),
        (
            "grid_search:\n  grid:\n    model.type:\n      - a\n      - 3\n",
            5,
            "model.type",
            "3: it must be a text",
        ),
        (
            f"{GRID}  fixed:\n    model.type: b\n",
            4,
            "model.type",
            "it is fixed, and a list of the grid as well",
        ),
        (
            f"{GRID}  groups: {{g: {{model.type: [b]}}}}\n",
            3,
            "grid_search.groups",
            "grid and groups are both given",
        ),
        (
            "grid_search:\n  groups:\n    g: 3\n",
            3,
            "grid_search.groups.g",
            "a group is a mapping of keys to lists",
        ),
        (
            f"{GRID}  zip: [[model.type]]\n",
            3,
            "grid_search.zip",
            "it must be a list of groups of two or more keys",
        ),
        (
            "grid_search:\n  grid: {model.type: a, hp.size: 1}\n  zip: [[hp.size, model.type], [hp.size, hp.size]]\n",
            3,
            "grid_search.zip",
            "hp.size is named twice",
        ),
        (
            f"{GRID}  repeat: 0\n",
            3,
            "grid_search.repeat",
            "0: it must be a whole number from 1",
        ),
        (
            f"{GRID}  repeat: 2\n  seeds: [1]\n",
            4,
            "grid_search.seeds",
            "seeds and repeat are both given",
        ),
        (
            "grid_search:\n  grid: {model.type: [a], hp.seed: [1]}\n  repeat: 2\n",
            3,
            "grid_search.repeat",
            "hp.seed is a list of the grid as well",
        ),
        (
            f"{GRID}  exclude: 3\n",
            3,
            "grid_search.exclude",
            "it must be a list of mappings, not 3",
        ),
        (
            f"{GRID}  include:\n    - 3\n",
            4,
            "grid_search.include",
            "3: it must be a mapping of keys and values",
        ),
        (
            f"{GRID}  piring: zip\n",
            3,
            "grid_search.piring",
            "there is no such key; did you mean pairing?",
        ),
        (
            f"pairing: zip\n{SHORT}",
            1,
            "pairing",
            "it belongs under grid_search",
        ),
        (
            f"models_to_train: [3]\n{SHORT}",
            1,
            "models_to_train",
            "[3]: it must be a list of models",
        ),
        (
            f"max_experiments: 0\n{SHORT}",
            1,
            "max_experiments",
            "0: it must be a whole number from 1",
        ),
        (
            f"gpu: {{device_ids: '0,x'}}\n{SHORT}",
            1,
            "gpu.device_ids",
            "'0,x': it must be numbers of GPUs",
        ),
        (
            f"gpu: {{device_ids: [0, 0]}}\n{SHORT}",
            1,
            "gpu.device_ids",
            "[0, 0]: it must be numbers of GPUs",
        ),
        (
            f"loss: {{name: focal}}\n{SHORT}",
            1,
            "loss.name",
            "'focal': brim has no such loss, only the task's own",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    optimizer.params.x: [1]\n    optimizer.params.x.y: [2]\n",
            5,
            "optimizer.params.x.y",
            "optimizer.params.x has a value, so nothing can be under it",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    optimizer.name: [adam]\n    optimizer: [{name: sgd}]\n",
            5,
            "optimizer",
            "optimizer.name is in the list of optimizer.name as well",
        ),
        (
            "grid_search:\n  grid:\n    model.type: [a]\n    model_name: [b]\n",
            4,
            "model_name",
            "model.type is there twice",
        ),
        (
            "hp: {epochs: 1}\nhp.epochs: 2\nmodel: {type: a}\n",
            2,
            "hp.epochs",
            "hp.epochs is there twice",
        ),
        (
            "model: {type: a}\noptimizer: {params: {x: .inf}}\n",
            2,
            "optimizer.params.x",
            "inf is not a finite number",
        ),
        (
            "hp: {epochs: 1}\n",
            None,
            "model.type",
            "it is missing; name a model, such as r3d_18 or mlp",
        ),
        (
            "model: {type: a}\nhp: {weight_decay: 0.1}\ngrid_search: {grid: {optimizer.params.weight_decay: 1}}\n",
            2,
            "hp.weight_decay",
            "optimizer.params.weight_decay is given as well; keep one of them",
        ),
        (
            "grid_search:\n  grid: {model.type: [a, b], hp.batch_size: [1, 2, 3]}\n  pairing: zip\n",
            2,
            "hp.batch_size",
            "pairing is zip, and there are 2 models and 3 batch sizes",
        ),
        (
            "a..b: 3\nmodel: {type: a}\n",
            1,
            "a..b",
            "there is no such key",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_key(
    write: Write, text: str, line: int | None, key: str, message: str
) -> None:
    problems = validate_grid(write(text))
    assert (line, key, message) in errors(problems)
    assert all(one.file.endswith("sweep.yaml") for one in problems)
    with pytest.raises(RequestError):
        expand_grid(write(text))


def test_problems_of_the_yaml_itself_come_the_same_way(write: Write) -> None:
    problems = validate_grid(write("hp: {epochs: 1}\nhp: {epochs: 2}\n"))
    assert errors(problems) == [(2, "hp", "the key is there twice, first on line 1")]


def test_a_warning_is_an_error_when_strict_and_a_note_never_is(write: Write) -> None:
    path = write("task: {tag: regression}\ngrid_search:\n  grid: {model.type: [a, b], hp.batch_size: [1, 2, 3]}\n")
    assert [one.severity for one in validate_grid(path)] == ["note", "warning"]
    assert [one.severity for one in validate_grid(path, strict=True)] == ["note", "error"]
    assert len(expand_grid(path)) == 6
    with pytest.raises(RequestError, match="2 models and 3 batch sizes cannot be paired"):
        expand_grid(path, strict=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "hp.learning_rat=1",
            "command line: error: hp.learning_rat: there is no such key; did you mean hp.learning_rate",
        ),
        ("hp.lr=1", "command line: error: hp.lr: there is no such key; did you mean hp.learning_rate?"),
        ("optimizer=[{name: sgd}, 3]", "command line: error: optimizer: it is a section of keys, not 3"),
        ("hp.batch_size=0", "command line: error: hp.batch_size: 0: it must be auto"),
        ("hp.batch_size=[]", "command line: error: hp.batch_size: it has no values"),
        ("grid_search.grid.hp.size=3", "name the setting alone"),
        ("grid_search.pairing=both", "command line: error: grid_search.pairing: 'both': it must be one of"),
        ("hp.epochs", "a setting is written KEY=VALUE"),
        ("=3", "a setting is written KEY=VALUE"),
        ("--epochs=3", "written without dashes"),
        ("hp.epochs=", "there is no value; write null for none"),
        ("hp.epochs=[1", "not YAML"),
        ("hp..x=1", "a name on each side of a dot"),
        ("model.type=nope", "no such model"),
    ],
)
def test_a_wrong_override_is_reported_as_what_it_is(override: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        expand_grid(FILES / "seed.yaml", overrides=[override], check_model=check_model)
    assert message in str(caught.value)


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


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
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
