"""What the files around the package claim, compared with the package: versions, schemas, what runs no code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import brim
from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from tests.versions import CORE, MINORS, NOT_ON_OLDEST, environments, requirements

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "brim"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEMA = re.compile(r"brim\.[a-z_]+/\d+")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every call in the package: its file, what is called, and its plain keyword arguments."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                plain = {one.arg: one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)}
                yield path.relative_to(SOURCE).as_posix(), ast.unparse(node.func), {str(k): v for k, v in plain.items()}


def imports() -> set[str]:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return found


def test_one_version_is_named_everywhere() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert PROJECT["version"] == brim.__version__ == str(citation["version"])
    assert PROJECT["license"] == citation["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_stability_page_lists_every_schema() -> None:
    used = {name for path in SOURCE.rglob("*.py") for name in SCHEMA.findall(path.read_text(encoding="utf-8"))}
    listed = SCHEMA.findall(text_of("docs/stability.md").partition("## The schemas")[2])
    assert sorted(listed) == sorted(used)


def test_the_stability_page_lists_every_exit_code() -> None:
    line = next(line for line in text_of("docs/stability.md").splitlines() if line.startswith("| **Exit codes**"))
    codes = {int(code) for code in re.findall(r"\d+", line.partition("|")[2].partition("|")[0])}
    assert codes == {0, 130} | {kind.exit_code for kind in (BrimError, RequestError, DoesNotFitError, LostError)}


def test_weights_and_features_are_read_without_running_code() -> None:
    """SECURITY.md says so: no pickle, no unsafe torch or numpy file, no YAML that makes objects, no evaluated text."""
    found = list(calls())
    loads = [(file, arguments) for file, name, arguments in found if name == "torch.load"]
    arrays = [(file, arguments) for file, name, arguments in found if name in ("np.load", "numpy.load")]
    assert loads
    assert arrays
    assert [file for file, arguments in loads if arguments.get("weights_only") is not True] == []
    assert [file for file, arguments in arrays if arguments.get("allow_pickle") is not False] == []
    assert imports().isdisjoint({"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"})
    unsafe = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "os.system"}
    assert sorted((file, name) for file, name, _ in found if name in unsafe) == []


def test_users_files_are_run_in_one_place_and_remote_code_is_never_trusted_by_default() -> None:
    """SECURITY.md names the flags that lead there."""
    running = {file for file, name, _ in calls() if name.endswith("exec_module")}
    assert running == {"storage/python_files.py"}
    trusting = [arguments for _, _, arguments in calls() if arguments.get("trust_remote_code") is True]
    assert trusting == []


def test_the_versions_to_try_cover_the_classifiers_and_the_oldest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    assert listed == {f"3.{minor}" for minor in MINORS}
    monkeypatch.setattr("tests.versions._version", lambda program: program.removeprefix("python"))
    monkeypatch.setenv("PYTHONS", "python3.13 python3.11 python3.12 python3.9")
    planned = [(one.version, one.torch, one.newest) for one in environments()]
    newest = re.search(r"^torch==(.+)$", text_of("constraints.txt"), re.MULTILINE)
    assert newest is not None
    assert planned == [("3.11", "2.6.*", False), *((f"3.{minor}", newest[1], True) for minor in MINORS)]
    assert len({one.folder for one in environments()}) == 4


def test_the_core_of_the_tests_is_there_and_needs_what_is_installed_for_it() -> None:
    assert [path for path in (*CORE, *NOT_ON_OLDEST) if not (ROOT / path).exists()] == []
    names = {re.split(r"[<>=\[]", one)[0] for one in requirements()}
    assert {"torch", "typer", "torchvision", "transformers", "pytest", "pytest-timeout", "hypothesis"} <= names
