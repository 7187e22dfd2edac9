"""One run, one folder: `run.json`, written atomically."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.storage.files import write_json

__all__ = ["RUN_SCHEMA", "write_run"]

RUN_SCHEMA = "brim.run/1"


def write_run(
    folder: Path,
    *,
    kind: str,
    request: dict[str, Any],
    environment: dict[str, Any],
    plan: dict[str, Any] | None,
    summary: dict[str, Any],
    started_at: datetime.datetime,
) -> Path:
    """Write `run.json` into the folder; a path that is a file is a `RequestError`."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--output {folder}: it is a file; give a folder")
    ended_at = datetime.datetime.now(datetime.UTC)
    path = folder / "run.json"
    document = {
        "schema": RUN_SCHEMA,
        "kind": kind,
        "request": request,
        "environment": environment,
        "plan": plan,
        "summary": summary,
        "started_at": started_at.isoformat(),
        "ended_at": ended_at.isoformat(),
        "duration_seconds": (ended_at - started_at).total_seconds(),
    }
    write_json(path, document)
    return path
