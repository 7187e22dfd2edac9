"""Ranks of a test, started without torchrun: a process each, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_ranks"]


def run_ranks(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run a Python command on two ranks; one that fails, or takes longer, fails the test with what it printed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | shared | dict(environment or {}) | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=cwd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], errors
