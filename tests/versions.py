"""A core of the tests on the oldest and the newest torch, and on each Python that is found here.

    make test-versions                                     # or: python tests/versions.py
    make test-versions PYTHONS="python3.12 python3.13"     # these only

The oldest torch is the least one of pyproject.toml, tried on the oldest Python here; the newest is the one of
constraints.txt, tried on every Python. All else has the versions of constraints.txt. Environments stay in
build/versions (some 5 GiB each) and are used again. A plain script: it runs without anything installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "versions"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MINORS = (11, 12, 13)
EXTRAS = ("vision", "hf", "data", "report")
TOOLS = ("hypothesis", "jsonschema", "pytest", "pytest-timeout")
# What depends on torch's or Python's own behaviour. Not here: what other libraries decide (Ray, reports, metrics).
CORE = (
    "tests/test_records.py", "tests/test_public_names.py", "tests/settings", "tests/storage", "tests/memory",
    "tests/workloads", "tests/sizing", "tests/forecasting", "tests/running", "tests/searching", "tests/generation",
    "tests/monitor",
)  # fmt: skip
NOT_ON_OLDEST = ("tests/forecasting/test_stored_peaks.py",)  # peaks that newer versions of torch had on a card
FOLLOW_TORCH = re.compile(r"(torch|torchvision|triton|sympy|nvidia-|cuda-)", re.IGNORECASE)  # pins of the newest alone


class Environment(NamedTuple):
    """One Python with one torch."""

    python: str  # its program
    version: str  # 3.11
    torch: str  # 2.6.* or 2.15.0
    newest: bool

    @property
    def folder(self) -> Path:
        return PLACE / f"py{self.version}-torch{self.torch.removesuffix('.*')}"


def pythons() -> Iterator[tuple[str, str]]:
    """Each Python that brim supports and that starts: its version and its program."""
    asked = os.environ.get("PYTHONS", "").split()
    for minor in MINORS:
        name = f"python3.{minor}"
        installed = sorted(map(str, Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python")))
        for program in asked or [sys.executable, shutil.which(name) or name, *installed]:
            if _version(program) == f"3.{minor}":
                yield f"3.{minor}", program
                break


def _version(program: str) -> str | None:
    code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([program, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environments() -> list[Environment]:
    """The oldest torch on the oldest Python, the newest torch on every Python."""
    least = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["dependencies"]))
    newest = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert least is not None
    assert newest is not None
    found = list(pythons())
    return [
        *(Environment(program, version, f"{least[1]}.*", newest=False) for version, program in found[:1]),
        *(Environment(program, version, newest[1], newest=True) for version, program in found),
    ]


def requirements() -> list[str]:
    """What brim needs, with some extras, and what runs the tests; from pyproject.toml."""
    extras = PROJECT["optional-dependencies"]
    tools = [one for one in extras["dev"] if re.split(r"[<>=\[]", one)[0] in TOOLS]
    return [*PROJECT["dependencies"], *(one for extra in EXTRAS for one in extras[extra]), *tools]


def prepare(environment: Environment) -> bool:
    """Make the environment, unless it is there with the same requirements; False where that fails."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [pin for pin in pins if environment.newest or not FOLLOW_TORCH.match(pin)]
    wanted = [f"torch=={environment.torch}", *requirements()]
    ready, content = environment.folder / "ready", "\n".join([*wanted, *kept])
    if ready.is_file() and ready.read_text() == content:
        return True
    constraints = environment.folder.with_name(f"{environment.folder.name}.txt")
    if subprocess.run([environment.python, "-m", "venv", "--clear", str(environment.folder)]).returncode != 0:
        return False
    constraints.write_text("\n".join(kept))
    python = str(environment.folder / "bin" / "python")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(constraints)]
    if subprocess.run([python, *install, *wanted], cwd=ROOT).returncode != 0:
        return False
    ready.write_text(content)
    return True


def run_core(environment: Environment) -> bool:
    """Whether the core of the tests passes there."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [str(environment.folder / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", *CORE]
    left_out = () if environment.newest else NOT_ON_OLDEST
    return subprocess.run([*words, *(f"--ignore={path}" for path in left_out)], cwd=ROOT, env=variables).returncode == 0


def main() -> int:
    """Each environment in turn; 1 if one could not be made or a test failed."""
    rows = []
    for environment in environments():
        title = f"Python {environment.version}, torch {environment.torch}"
        print(f"== {title}", flush=True)
        begun = time.monotonic()
        result = "no environment" if not prepare(environment) else "passed" if run_core(environment) else "FAILED"
        rows.append((title, result, f"{time.monotonic() - begun:.0f} s"))
    missing = sorted({f"3.{minor}" for minor in MINORS} - {environment.version for environment in environments()})
    for row in rows:
        print("  ".join(row))
    if missing:
        print(f"not found here: Python {', '.join(missing)}")
    return 0 if rows and all(result == "passed" for _, result, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
