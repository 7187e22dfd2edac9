"""Libraries, extras and torch's build, read from metadata and files without importing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brim.diagnosis.installed import is_older, read_extras, read_libraries, torch_build

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `importlib.metadata` says of brim and of what is installed; a test changes it."""
    facts: dict[str, Any] = {
        "requires": [
            "torch>=2.6",
            'timm>=1.0.12; extra == "vision"',
            "altair[save] (>=5.5) ; extra == 'report'",
            'brim[vision]; extra == "demo"',
            'scikit_learn>=1.4; extra == "demo"',
            'brim[all]; extra == "all"',  # of itself
        ],
        "extras": ["vision", "report", "demo", "all"],
        "versions": {"torch": "2.6.0", "timm": "1.0.30"},
    }

    def version(name: str) -> str:
        if name not in facts["versions"]:
            raise importlib.metadata.PackageNotFoundError(name)
        return facts["versions"][name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: facts["requires"])
    monkeypatch.setattr(
        importlib.metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda key: facts["extras"])
    )
    monkeypatch.setattr(importlib.metadata, "version", version)
    return facts


def test_what_is_always_needed_is_listed_with_its_version(metadata: dict[str, Any]) -> None:
    assert read_libraries() == [{"name": "torch", "needs": ">=2.6", "version": "2.6.0"}]


def test_an_extra_has_its_libraries_and_those_of_the_extras_in_it(metadata: dict[str, Any]) -> None:
    extras = read_extras()
    timm = {"name": "timm", "needs": ">=1.0.12", "version": "1.0.30"}
    assert extras["vision"] == {"installed": True, "libraries": [timm]}
    assert extras["report"]["libraries"] == [{"name": "altair", "needs": ">=5.5", "version": None}]
    assert not extras["report"]["installed"]
    assert [library["name"] for library in extras["demo"]["libraries"]] == ["timm", "scikit_learn"]
    assert not extras["demo"]["installed"]
    assert extras["all"]["libraries"] == []


def test_without_metadata_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert read_libraries() is None
    assert read_extras() == {}


def test_every_extra_of_the_project_is_read() -> None:
    """From the metadata of the installation: nothing here lists them."""
    extras = read_extras()
    assert set(extras) == set(PROJECT["optional-dependencies"])
    assert [library["name"] for library in extras["vision"]["libraries"]] == ["torchvision", "timm"]
    assert {"torchvision", "transformers", "pyarrow", "scikit-learn"} <= {
        library["name"] for library in extras["demo"]["libraries"]
    }
    libraries = read_libraries()
    assert libraries is not None
    assert len(libraries) == len(PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("version", "needs", "older"),
    [
        ("2.5.1", ">=2.6", True),
        ("2.6.0+cu124", ">=2.6", False),
        ("2.15.0", ">=2.6", False),  # not by letters
        ("2.6", ">=2.6.0", False),
        ("12.535.161", ">=12.560", True),
        ("3.0.0rc1", ">=3", False),
        ("1.0", "", False),
        ("unknown", ">=1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, needs: str, older: bool) -> None:
    assert is_older(version, needs) is older


def test_torchs_build_is_read_from_its_file() -> None:
    assert torch_build() == {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}


def test_a_torch_without_its_file_has_the_version_of_its_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata: dict[str, Any]
) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert torch_build() == {"version": "2.6.0", "cuda": None, "hip": None}
    (tmp_path / "version.py").write_text("raise SystemExit\n__version__ = '2.7.0'\ncuda: str = '12.6'\nhip = f()\n")
    assert torch_build() == {"version": "2.7.0", "cuda": "12.6", "hip": None}  # and the file was not run
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build() is None
