"""A job on a machine of a cluster: done in the sweep's folder where that is shared, else beside it and sent back.

The worker starts the same process as on one machine and waits for it, so that a crash, a hang or an out-of-memory
error means the same there. Knows neither Ray nor Slurm.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from brim.sweeps.experiment_process import CHILD_COMMAND, LOG_FILE, run_to_end
from brim.sweeps.job import OUTCOME_FILE, Job, Outcome, write_outcome

__all__ = ["Delivery", "do_remotely", "mark_of", "receive"]

MARK_FILE = ".sweep-mark"  # by its content a worker knows that it sees the very folder of the sweep
SENT_FILES = ("run.json", "epochs.csv", "steps.jsonl", "monitor.csv", LOG_FILE, "weights-best.safetensors")
MOST_BYTES = 256 * 2**20  # of a file that is sent back; larger weights stay on the worker's machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """What comes back from a worker."""

    outcome: Outcome
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # none where the folder is shared
    left_behind: tuple[str, ...] = ()  # files too large to be sent, by their path on the worker's machine
    host: str = ""


def do_remotely(
    job: Job, *, mark: tuple[str, str], timeout_seconds: float | None, command: tuple[str, ...] | None, place: str
) -> Delivery:
    """One attempt on this machine. `mark` is the path of a file of the sweep's folder and its content."""
    if Path(place).is_dir():
        os.chdir(place)
    starts = CHILD_COMMAND if command is None else command
    if _shared(mark):
        outcome = run_to_end(job, timeout_seconds=timeout_seconds, command=starts)
        return Delivery(outcome=outcome, host=platform.node())
    files: dict[str, bytes] = {}
    behind: list[str] = []
    own = Path(tempfile.mkdtemp(prefix="brim-sweep-"))
    folder = own / job.id
    try:
        outcome = run_to_end(
            dataclasses.replace(job, folder=str(folder)), timeout_seconds=timeout_seconds, command=starts
        )
        for name in SENT_FILES:
            path = folder / name
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                files[name] = path.read_bytes()
            elif path.is_file():
                behind.append(str(path))
    finally:
        if not behind:  # all that counts is on its way
            shutil.rmtree(own, ignore_errors=True)
    return Delivery(outcome=outcome, files=files, left_behind=tuple(behind), host=platform.node())


def receive(delivery: Delivery, folder: Path) -> None:
    """Put what was sent back into the experiment's folder, the outcome last."""
    if not delivery.files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in delivery.files.items():
        assert name in SENT_FILES
        (folder / name).write_bytes(content)
    (folder / OUTCOME_FILE).unlink(missing_ok=True)
    if delivery.outcome.state == "completed":
        write_outcome(folder, delivery.outcome)


def mark_of(experiment: Path) -> tuple[str, str]:
    """A file of the folder of an experiment's sweep, and what is in it."""
    path = experiment.parent.parent / MARK_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(16), encoding="utf-8")
    return str(path), path.read_text(encoding="utf-8")


def _shared(mark: tuple[str, str]) -> bool:
    path, content = mark
    try:
        return Path(path).read_text(encoding="utf-8") == content
    except OSError:
        return False
