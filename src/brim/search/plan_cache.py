"""Plans on disk: filed by what was asked, trusted by what it ran under.

An entry's name is the fingerprint of workload, knobs, dtype, device and search settings. Inside it keeps the
environment it was made in (versions, allocator settings, …). The same environment and enough free memory: the
plan is used as it is. Another environment: it is stale, and one probe decides instead of a search.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import BrimError
from brim.records import Plan
from brim.storage.files import cache_folder, read_json, write_json
from brim.storage.fingerprint import fingerprint

__all__ = ["CachedPlan", "PlanCache"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPlan:
    """A plan as it was filed."""

    plan: Plan
    identity: Mapping[str, Any]
    environment: str
    saved_at: float  # seconds since the epoch


class PlanCache:
    """The folder of plans; a file that cannot be read or understood is no entry."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "plans"

    def load(self, identity: Mapping[str, Any]) -> CachedPlan | None:
        """The plan filed under this identity, or None."""
        return _read_entry(self._path(identity))

    def save(self, plan: Plan, identity: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """File a plan; an unwritable cache loses the entry, not the run."""
        entry = {
            "identity": dict(identity),
            "environment": fingerprint(environment),
            "environment_facts": dict(environment),
            "saved_at": time.time(),
            "plan": plan.to_json(),
        }
        try:
            write_json(self._path(identity), entry)
        except BrimError:
            return

    def entries(self) -> Iterator[CachedPlan]:
        """Every readable entry, newest first."""
        found = (_read_entry(path) for path in self.folder.glob("*.json"))
        yield from sorted((entry for entry in found if entry), key=lambda entry: -entry.saved_at)

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        paths = list(self.folder.glob("*.json"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / f"{fingerprint(identity)}.json"


def _read_entry(path: Path) -> CachedPlan | None:
    data: Any = read_json(path)
    try:
        return CachedPlan(
            plan=Plan.from_json(data["plan"]),
            identity=data["identity"],
            environment=str(data["environment"]),
            saved_at=float(data["saved_at"]),
        )
    except (BrimError, KeyError, TypeError, ValueError):
        return None
