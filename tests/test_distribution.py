"""Wheel and sdist as they would be published: what they hold, and the demo from the wheel in a bare environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = "import sys; from setuptools import build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
IGNORED = shutil.ignore_patterns(".git", ".*", "build", "dist", "runs", "wheels", "__pycache__", "*.egg-info")

# Seven minutes, most of them to install torch; the demo from the source tree (tests/cli/test_profile.py) catches most.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*words: str | Path, cwd: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(folder: Path, *requirements: str) -> Path:
    """The Python of a fresh environment with these installed, at the pinned versions."""
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *requirements, cwd=ROOT)
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The sdist of a copy of this tree, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT, folder / "tree", ignore=IGNORED, symlinks=True)
    python = new_environment(folder / "builder", *PROJECT["build-system"]["requires"])
    (folder / "dist").mkdir()
    run(python, "-c", BUILD, "build_sdist", folder / "dist", cwd=folder / "tree")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(python, "-c", BUILD, "build_wheel", folder / "dist", cwd=source)
    (wheel,) = (folder / "dist").glob("*.whl")
    yield sdist, wheel
    shutil.rmtree(folder)


def package_files() -> set[str]:
    """Every file of the package that is not left behind by a test or a build."""
    found = (path for path in (ROOT / "src" / "brim").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in found}


def test_the_wheel_holds_the_package_and_its_metadata_alone(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_the_sdist_holds_what_a_build_needs_and_nothing_else(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {name for name in names if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    expected = {f"src/{name}" for name in package_files()} | {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    assert names - generated == expected


def test_the_demo_runs_from_the_wheel_in_a_bare_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    try:
        python = new_environment(tmp_path / "bare", f"{built[1]}[demo,report]")
        brim = python.with_name("brim")
        assert run(brim, "--version", cwd=tmp_path).startswith(f"brim {PROJECT['project']['version']}, torch ")
        document = json.loads(run(brim, "doctor", "--json", cwd=tmp_path))
        assert document["extras"]["demo"]["installed"]
        assert [problem for problem in document["problems"] if problem["severity"] == "error"] == []
        run(brim, "demo", "--questions", "40", "-o", "demo", cwd=tmp_path)
        assert (tmp_path / "demo" / "report.html").is_file()
        assert json.loads((tmp_path / "demo" / "profile.json").read_text())["recommendation"]["text"]
    finally:
        shutil.rmtree(tmp_path / "bare", ignore_errors=True)  # several GiB
