"""The public names, and what importing them costs: no torch, no command-line library."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import brim

HEAVY = ("torch", "numpy", "typer", "rich", "torchvision", "timm", "transformers", "pynvml")


def modules_after(code: str) -> set[str]:
    """The top-level modules loaded in a fresh process once the code has run."""
    dump = "import json, sys; sys.stderr.write('\\n' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    program = f"import atexit\natexit.register(lambda: exec({dump!r}))\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def isort_style_key(name: str) -> tuple[int, str]:
    """RUF022's order: constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def test_public_names_are_sorted_and_named_once() -> None:
    assert brim.__all__ == sorted(set(brim.__all__), key=isort_style_key)


@pytest.mark.parametrize("name", brim.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    value = getattr(brim, name)
    if name != "__version__":
        assert value.__name__ == {"fit": "train", "profile_knob": "profile"}.get(name, name)
    assert name in dir(brim)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="find_batchsize"):
        _ = brim.find_batchsize


def test_importing_brim_loads_no_torch_and_no_command_line() -> None:
    loaded = modules_after("import brim")
    assert "brim" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_torch_free_names_are_used_without_torch() -> None:
    loaded = modules_after("import brim; brim.SearchSettings(batch_size=8); brim.Probe; brim.RequestError")
    assert loaded.isdisjoint(HEAVY)


def test_a_grid_is_expanded_without_torch() -> None:
    grid = "{'model.type': ['r3d_18', 's3d'], 'hp.batch_size': [8, 4]}"
    loaded = modules_after(f"import brim; assert len(brim.expand_grid({grid}).experiments) == 2")
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["find", "--help"],
        ["eval", "--help"],
        ["lm-eval", "--help"],
        ["cache", "--help"],
        ["doctor", "--help"],
        ["--show-completion", "bash"],
        ["report", "--help"],
        ["train", "--help"],
        ["train", "dpo", "--help"],
        ["ood", "--help"],
        ["sweep", "--help"],
        ["profile", "--help"],
        ["encode", "--help"],
    ],
)
def test_asking_for_help_loads_no_torch(arguments: list[str]) -> None:
    code = f"import runpy, sys; sys.argv = ['brim', *{arguments!r}]; runpy.run_module('brim', run_name='__main__')"
    loaded = modules_after(code)
    assert "typer" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "torchvision", "timm", "transformers", "pynvml"})


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--version"], {}),
        ([], {"_BRIM_COMPLETE": "complete_bash", "COMP_WORDS": "brim eval --dtype b", "COMP_CWORD": "3"}),
    ],
)
def test_the_version_and_completion_load_no_torch(arguments: list[str], variables: dict[str, str]) -> None:
    code = (
        f"import os, runpy, sys; sys.argv = ['brim', *{arguments!r}]; os.environ.update({variables!r})\n"
        "runpy.run_module('brim', run_name='__main__')"
    )
    assert modules_after(code).isdisjoint({"torch", "numpy", "torchvision", "timm", "transformers"})


def test_importing_every_submodule_leaves_the_public_names_alone() -> None:
    """A submodule of the same name would take a function's place."""
    code = """
import importlib, importlib.util, pkgutil
import brim
# lmms-eval has an environment of its own, where make test-lmms imports its file; make test-versions has none of these.
missing = tuple(name for name in ("lightning", "lm_eval", "lmms_eval") if importlib.util.find_spec(name) is None)
for module in pkgutil.walk_packages(brim.__path__, "brim."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except brim.RequestError as error:
        assert module.name.rpartition(".")[2].startswith(missing), (module.name, error)
        assert "pip install" in str(error), error
for name in brim.__all__:
    value = getattr(brim, name)
    assert name == "__version__" or callable(value), name
for name in ("find", "forecast", "evaluate", "profile", "train", "sweep", "report"):
    try:
        getattr(brim, name)(no_such_setting=1)
    except brim.RequestError as error:
        assert f"{name}() has no setting 'no_such_setting'" in str(error), error
    else:
        raise AssertionError(name)
assert list(brim.map(lambda items: [item + 1 for item in items], [1, 2])) == [2, 3]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize(
    ("call", "old"),
    [
        (brim.evaluate, ("use_cache", "fixed", "mapping", "knobs", "plugins", "max_new_tokens", "graphs")),
        (brim.profile_knob, ("use_cache", "fixed", "mapping", "knobs", "max_new_tokens")),
        (brim.fit, ("fixed", "use_cache", "validate")),
    ],
)  # fmt: skip
def test_parameters_of_before_are_understood(call: Any, old: tuple[str, ...]) -> None:
    for name in old:
        with pytest.raises(brim.RequestError) as caught:
            call(**{name: 1})  # the model, or the file, is missing
        assert "has no setting" not in str(caught.value)
