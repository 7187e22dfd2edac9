from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from brim.cli.main import run


class Result(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Brim = Callable[..., Result]


@pytest.fixture(autouse=True)
def _quick(short_probes: None) -> None:
    """Every search here makes short probes."""


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def brim(capsys: pytest.CaptureFixture[str]) -> Brim:
    """Run a command in this process, as the `brim` script does."""

    def call(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            run(list(arguments))
        captured = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int) or code is None
        return Result(code or 0, captured.out, captured.err)

    return call


@pytest.fixture
def factories(tmp_path: Path) -> str:
    """A file of factories; `py:{factories}:rows` is a workload of which 32 rows fit 64 KiB."""
    file = tmp_path / "nets.py"
    file.write_text(
        textwrap.dedent(
            """
            import torch

            def rows(width: int = 256):
                return (lambda batch: batch * 2), (lambda n: torch.ones(n, width))

            def broken():
                raise ValueError("no checkpoint at step 7")

            def halves():
                return (lambda batch: batch * 2), (lambda n: torch.ones(n // 2, 256))

            def faulty_step():
                def step(batch):
                    raise KeyError("labels")
                return step, lambda n: torch.ones(n, 256)

            def interrupted():
                def step(batch):
                    raise KeyboardInterrupt
                return step, lambda n: torch.ones(n, 256)

            def nothing():
                return 5
            """
        ),
        encoding="utf-8",
    )
    return str(file)
