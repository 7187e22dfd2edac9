"""Another process on the card, which takes nearly all that is free and gives it back: what a shared machine does."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["Neighbour"]

_PROGRAM = """
import sys, torch
held = None
torch.zeros(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    leave = int(line)
    held = None
    torch.cuda.empty_cache()
    if leave >= 0:
        held = torch.empty(max(torch.cuda.mem_get_info()[0] - leave, 0), dtype=torch.uint8, device="cuda")
    print("done", flush=True)
"""


class Neighbour:
    """Another process that takes nearly all that is free on the card, and gives it back."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ready = False  # torch takes its time to start

    def leave(self, free_bytes: int) -> None:
        """Take all but so many bytes; -1: give everything back."""
        assert self._process.stdin is not None
        if not self._ready:
            self._expect("ready")
            self._ready = True
        self._process.stdin.write(f"{free_bytes}\n")
        self._process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise RuntimeError("the neighbour has ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
