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

            def faulty_batch():
                def make_batch(n):
                    raise KeyError("pixels")
                return (lambda batch: batch * 2), make_batch

            def pooled(device):
                net = torch.nn.Sequential(
                    torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
                ).to(device).train()
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                def step(batch):
                    optimizer.zero_grad()
                    net(batch).sum().backward()
                    optimizer.step()
                return {"step": step, "make_batch": lambda n: torch.ones(n, 3, 8, 8, device=device), "model": net,
                        "optimizer": optimizer}

            def pairs():
                def step(batch):
                    if len(batch) % 2:
                        raise ValueError("cannot split into pairs")
                    return batch * 2
                return step, lambda n: torch.ones(n, 256)

            def leaks():
                kept = []
                return (lambda batch: kept.append(batch[:1] * 2)), lambda n: torch.ones(n, 256)

            def segfaults():
                import ctypes
                return (lambda batch: ctypes.string_at(0)), lambda n: torch.ones(n, 256)

            def sleeps():
                import time
                return (lambda batch: time.sleep(600)), lambda n: torch.ones(n, 256)

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
