"""The journals of a run: `samples.jsonl`, and one more for every further rank until the run is merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from brim.errors import RequestError
from brim.ranks.world import World
from brim.storage.files import write_atomic
from brim.storage.journal import Journal

__all__ = ["Journals"]

NAME = "samples.jsonl"
LABEL = "journal.json"


class Journals:
    """Opens this rank's journal and reads what every rank of an earlier start has left."""

    def __init__(self, folder: Path, world: World, *, fingerprint: str, resume: bool) -> None:
        self.folder = folder
        self.path = folder / (NAME if world.rank == 0 else f"samples.rank-{world.rank}.jsonl")
        label = folder / (LABEL if world.rank == 0 else f"journal.rank-{world.rank}.json")
        self._journal = Journal(self.path, fingerprint=fingerprint, resume=resume, label=label)
        self._resume = resume

    def __enter__(self) -> list[dict[str, Any]]:
        if self._resume and not any(self.folder.glob("samples*.jsonl")):
            raise RequestError(f"--resume: {self.folder} holds no samples.jsonl to go on from; leave --resume out")
        others = self._others() if self._resume else []
        self._journal.__enter__()
        return [*others, *self._journal.entries]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Journal finished samples."""
        self._journal.append(entries)

    def merged(self) -> list[dict[str, Any]]:
        """Every rank's lines; an unfinished last line is no line."""
        return [entry for path in sorted(self.folder.glob("samples*.jsonl")) for entry in _lines(path)]

    def finalise(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """One samples.jsonl in the data's order; the other ranks' files have served."""
        text = "".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n" for entry in entries)
        write_atomic(self.folder / NAME, text)
        for leftover in [*self.folder.glob("samples.rank-*.jsonl"), *self.folder.glob("journal.rank-*.json")]:
            leftover.unlink(missing_ok=True)

    def _others(self) -> list[dict[str, Any]]:
        return [
            entry for path in sorted(self.folder.glob("samples*.jsonl")) if path != self.path for entry in _lines(path)
        ]


def _lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    return [json.loads(line) for line in complete.split("\n") if line]
