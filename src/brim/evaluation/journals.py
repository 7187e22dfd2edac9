"""The journals of a run: `samples.jsonl`, and one more for every further rank until the run is merged.

Three steps, and all ranks must have made one before any makes the next: rank 0 gathers what earlier starts have left
(`gather_earlier`), every rank writes its own file (`with`), rank 0 merges them (`merged`, `finalise`). So no file is
read while another rank writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import LostError, RequestError
from brim.storage.files import write_atomic
from brim.storage.journal import Journal

__all__ = ["Journals"]

NAME = "samples.jsonl"
LABEL = "journal.json"


class Journals:
    """The files of one run folder, as one rank of them all uses them."""

    def __init__(self, folder: Path, *, fingerprint: str, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self._ranks = ranks
        # Whatever may be there has been gathered before this is opened: a further rank finds no file of its own.
        self._journal = self._open(self._path(rank), resume=rank == 0)

    def gather_earlier(self, *, resume: bool, drop_failed: bool = False) -> list[dict[str, Any]]:
        """The lines of earlier starts, of however many ranks, in `samples.jsonl` alone from here on.

        For rank 0, while no rank has its journal open. Without `resume` there must be none. With `drop_failed` samples
        that failed count as not done.
        """
        if resume and not self._leftovers():
            raise RequestError(f"--resume: {self.folder} holds no {NAME} to go on from; leave --resume out")
        lines: dict[str, dict[str, Any]] = {}
        for path in [self._path(0), *(path for path in self._leftovers() if path != self._path(0))]:
            with self._open(path, resume=resume) as journal:
                for entry in journal.entries:
                    lines.setdefault(str(entry.get("id")), entry)
        kept = [line for line in lines.values() if not drop_failed or line.get("error") is None]
        if len(self._leftovers()) > 1 or len(kept) < len(lines):
            self.finalise(kept)
        return kept

    def __enter__(self) -> Self:
        self._journal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Journal finished samples."""
        self._journal.append(entries)

    def merged(self) -> list[dict[str, Any]]:
        """Every rank's lines, once all ranks have closed their files."""
        return [entry for rank in range(self._ranks) for entry in self._lines(rank)]

    def finalise(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """These lines as `samples.jsonl`; the other ranks' files have served."""
        text = "".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n" for entry in entries)
        write_atomic(self.folder / NAME, text)
        for leftover in [*self.folder.glob("samples.rank-*.jsonl"), *self.folder.glob("journal.rank-*.json")]:
            leftover.unlink(missing_ok=True)

    def _leftovers(self) -> list[Path]:
        main = [self._path(0)] if self._path(0).exists() else []
        return main + sorted(self.folder.glob("samples.rank-*.jsonl"))

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        path = self._path(rank)
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise LostError(
                f"rank 0 does not see {path}, which rank {rank} has written: -o must be a folder that all machines "
                "share. Copy the file there and start again with --resume"
            ) from error
        return [json.loads(line) for line in content.decode().split("\n") if line]

    def _path(self, rank: int) -> Path:
        return self.folder / (NAME if rank == 0 else f"samples.rank-{rank}.jsonl")

    def _open(self, path: Path, *, resume: bool) -> Journal:
        label = LABEL if path.name == NAME else path.name.replace("samples", "journal").replace(".jsonl", ".json")
        return Journal(path, fingerprint=self._fingerprint, resume=resume, label=path.with_name(label))
