"""The journals of a run: `samples.jsonl`, and one more for every further rank until the run is merged.

Three steps, and all ranks must have made one before any makes the next: rank 0 gathers what earlier starts have left
(`gather_earlier`), every rank writes its own file (`with`), rank 0 merges them (`merged`, `finalise`). So no file is
read while another rank writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import LostError, RequestError
from brim.settings.caller import given, named
from brim.storage.files import read_json, write_atomic
from brim.storage.journal import JOURNAL_SCHEMA, Journal, journal_lines, read_lines
from brim.storage.run_folder import check_no_other_run

__all__ = ["Journals", "check_contents"]

NAME = "samples.jsonl"
LABEL = "journal.json"


def check_contents(folder: Path, *, resume: bool, command: str = "eval") -> None:
    """Refuse a folder that holds another run, or results without `resume`, or nothing to resume. Reads no model."""
    check_no_other_run(folder, command)
    found = _leftovers(folder)
    if resume and not found:
        raise RequestError(f"{named('resume')}: {folder} holds no {NAME} to resume from; leave {named('resume')} out")
    if resume or not any(path.stat().st_size > 0 for path in found):
        return
    labels = (read_json(path) for path in folder.glob("journal*.json"))
    if any(isinstance(label, dict) and label.get("schema") == JOURNAL_SCHEMA for label in labels):
        raise RequestError(
            f"{given('output', folder)}: it holds the results of an evaluation; continue it with {named('resume')}, "
            "or choose another folder"
        )
    raise RequestError(
        f"{given('output', folder)}: it holds a {NAME} that brim {command} did not write; choose another folder"
    )


class Journals:
    """The files of one run folder, as one rank of them all uses them. `notes` is what happened to damaged lines."""

    def __init__(self, folder: Path, *, fingerprint: str, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._fingerprint = fingerprint
        self._ranks = ranks
        # Whatever may be there has been gathered before this is opened: a further rank finds no file of its own.
        self._journal = self._open(self._path(rank), resume=rank == 0)

    def gather_earlier(self, *, resume: bool, drop_failed: bool = False) -> list[dict[str, Any]]:
        """The lines of earlier starts, of however many ranks, in `samples.jsonl` alone from here on.

        For rank 0, while no rank has its journal open. Without `resume` there must be none. With `drop_failed` samples
        that failed count as not done.
        """
        lines: dict[str, dict[str, Any]] = {}
        for path in [self._path(0), *(path for path in _leftovers(self.folder) if path != self._path(0))]:
            with self._open(path, resume=resume) as journal:
                self.notes += journal.notes
                for entry in journal.entries:
                    lines.setdefault(str(entry.get("id")), entry)
        kept = [line for line in lines.values() if not drop_failed or line.get("error") is None]
        if len(_leftovers(self.folder)) > 1 or len(kept) < len(lines):
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
        write_atomic(self.folder / NAME, journal_lines(entries))
        for leftover in [*self.folder.glob("samples.rank-*.jsonl"), *self.folder.glob("journal.rank-*.json")]:
            leftover.unlink(missing_ok=True)

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        path = self._path(rank)
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise LostError(
                f"rank 0 does not see {path}, which rank {rank} has written: {named('output')} must be a folder that "
                f"all machines share. Copy the file there and start again with {named('resume')}"
            ) from error
        entries, damaged = read_lines(content, _problem)
        if damaged:
            one = damaged[0]
            raise LostError(
                f"{path}, line {one.line} was damaged during the run ({one.reason}): start again with "
                f"{named('resume')}, which computes it again"
            )
        return entries

    def _path(self, rank: int) -> Path:
        return self.folder / (NAME if rank == 0 else f"samples.rank-{rank}.jsonl")

    def _open(self, path: Path, *, resume: bool) -> Journal:
        label = LABEL if path.name == NAME else path.name.replace("samples", "journal").replace(".jsonl", ".json")
        return Journal(path, fingerprint=self._fingerprint, resume=resume, label=path.with_name(label), check=_problem)


def _leftovers(folder: Path) -> list[Path]:
    """What earlier starts have left, of however many ranks."""
    main = [folder / NAME] if (folder / NAME).exists() else []
    return main + sorted(folder.glob("samples.rank-*.jsonl"))


def _problem(line: Mapping[str, Any]) -> str | None:
    """Why a line is not one of a sample; None: it is."""
    absent = next((name for name in ("id", "prediction", "scores", "batch_size", "error") if name not in line), None)
    if absent is not None:
        return f"no {absent!r}"
    error = line["error"]
    known = (
        isinstance(line["batch_size"], int)
        and isinstance(line["scores"], dict)
        and isinstance(line.get("tokens"), int | None)
        and (error is None or (isinstance(error, dict) and isinstance(error.get("message"), str)))
    )
    return None if known else "not the line of a sample"
