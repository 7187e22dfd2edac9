from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from brim.cli.main import run
from brim.search.probe import ProbeSettings


class Result(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Brim = Callable[..., Result]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other, ten times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steady steps in a probe: nothing here depends on how fast a step is."""
    short = functools.partial(ProbeSettings, steady_seconds=0.001, max_steps=3)
    monkeypatch.setattr("brim.search.find.ProbeSettings", short)


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
