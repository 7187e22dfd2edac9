"""Plans on disk: filed by what was asked, trusted by what it ran under.

An entry's name is the fingerprint of workload, knobs, dtype, device and search settings. Inside it keeps the
environment it was made in (versions, allocator settings, …). The same environment and enough free memory: the
plan is used as it is. Another environment: it is stale, and one probe decides instead of a search. A file that is
damaged, or that does not answer the request it is filed under, is ignored with a note. `PlanFile` is the place of one
piece of live work among them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import BrimError, RequestError
from brim.records import MemoryFigures, Plan, Probe, Unit
from brim.sizing.constants import MAX_SIZE_OVER_SEEN, MIN_LIMIT_OF_PLAN, MORE_ROOM_THAN_PLAN
from brim.sizing.live import LiveSizer
from brim.storage.files import cache_folder, read_json, write_json
from brim.storage.fingerprint import fingerprint

__all__ = ["CachedPlan", "PlanCache", "PlanFile"]

LATEST_TIME = 253_402_300_799.0  # the last second of the year 9999: what a clock can be made of


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPlan:
    """A plan as it was filed."""

    plan: Plan
    identity: Mapping[str, Any]
    environment: str
    saved_at: float  # seconds since the epoch

    def has_room(self, limit_bytes: int, *, named: bool) -> bool:
        """Whether the plan's size fits a limit, and was not found on a card with much less room.

        A plan made while other processes filled the card does not apply to an empty one, unless the limit was `named`.
        """
        chosen = self.plan.chosen_probe()
        if chosen is None or (chosen.peak_reserved_bytes or 0) > limit_bytes:
            return False
        return named or limit_bytes <= MORE_ROOM_THAN_PLAN * (self.plan.memory.limit_bytes or 0)

    @property
    def command(self) -> str:
        """Which command made it: find, eval or train."""
        return str(self.identity.get("kind", "find"))

    @property
    def model(self) -> str:
        """The model it is for: its name, the key that the user gave, or else all that the user's workload says."""
        workload = self._workload
        named = workload.get("model") or workload.get("key")
        return str(named or ", ".join(f"{name}={value}" for name, value in workload.items()))

    @property
    def work(self) -> str:
        """What the model does: the mode of a search or a training run, the task of an evaluation."""
        task = self.identity.get("task")
        return str(task.get("task") if isinstance(task, Mapping) else self.identity.get("mode", ""))

    @property
    def _workload(self) -> Mapping[str, Any]:
        # A search and a training run file their workload in a part of its own, an evaluation beside the rest.
        workload = self.identity.get("workload")
        return workload if isinstance(workload, Mapping) else self.identity


class PlanCache:
    """The folder of plans."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "plans"

    def load(
        self, identity: Mapping[str, Any], problem_of: Callable[[Plan], str | None]
    ) -> tuple[CachedPlan | None, tuple[str, ...]]:
        """The plan filed under this identity, or None; and a note where there is one that cannot be used.

        `problem_of` says why a well-formed plan cannot be an answer to the request, or None if it can.
        """
        path = self._path(identity)
        if not path.exists():
            return None, ()
        try:
            entry = _read_entry(path)
            if (problem := problem_of(entry.plan)) is not None:
                raise RequestError(problem)
        except BrimError as error:
            return None, (f"the cached plan {path} is ignored: {error}",)
        return entry, ()

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
        found = []
        for path in self.files():
            with contextlib.suppress(BrimError):
                found.append(_read_entry(path))
        yield from sorted(found, key=lambda entry: -entry.saved_at)

    def files(self) -> list[Path]:
        """The files of all entries, readable or not."""
        return [path for path in self.folder.glob("*.json") if path.is_file()]

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        paths = self.files()
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / f"{fingerprint(identity)}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The plan of one piece of live work: where a run of it starts, and what it leaves for the next."""

    identity: Mapping[str, Any]
    environment: Mapping[str, Any]
    device: str
    limit_bytes: int
    unit: Unit | None = None  # that a plan must count in
    use_cache: bool = True

    def load(self) -> tuple[Plan | None, tuple[str, ...]]:
        """The plan of an earlier run, if it holds here; and a note on one that is damaged."""
        if not self.use_cache:
            return None, ()
        entry, notes = PlanCache().load(self.identity, self._problem_of)
        if entry is None or entry.environment != fingerprint(self.environment):
            return None, notes
        made_for = entry.plan.memory.limit_bytes or 0
        return (entry.plan if self.limit_bytes >= MIN_LIMIT_OF_PLAN * made_for else None), ()

    def save(self, plan: Plan) -> None:
        """File it for the next run, unless the user switched that off."""
        if self.use_cache:
            PlanCache().save(plan, self.identity, self.environment)

    def plan(
        self,
        sizer: LiveSizer,
        *,
        unit: Unit,
        size: int,
        largest: int,
        reason: str,
        cached: bool,
        peak_bytes: int | None,
        probes: tuple[Probe, ...],
    ) -> Plan:
        """What a run settled at, and the evidence."""
        return Plan(
            unit=unit,
            size=max(size, 1),
            batch_size_max=largest,
            batch_size_max_estimate=sizer.evidence.bytes.largest_within(self.limit_bytes),
            objective="fastest",
            reason=reason,
            cached=cached,
            device=self.device,
            memory=MemoryFigures(
                limit_bytes=self.limit_bytes,
                headroom_bytes=None if not peak_bytes else self.limit_bytes - peak_bytes,
            ),
            probes=probes,
            fingerprint=fingerprint(self.identity),
        )

    def _problem_of(self, plan: Plan) -> str | None:
        """Why a plan cannot be believed: it counts something else, or nothing near its size ever ran."""
        if self.unit is not None and plan.unit != self.unit:
            return f"it counts {plan.unit}, and this task {self.unit}"
        seen = max([plan.batch_size_max, *(probe.cost or 0 for probe in plan.probes if probe.fits)])
        if plan.size <= MAX_SIZE_OVER_SEEN * seen:
            return None
        return f"its size {plan.size} is far above the largest batch that it was found by ({seen})"


def _read_entry(path: Path) -> CachedPlan:
    """The entry in a file; a `RequestError` says what is wrong with one that cannot be used."""
    data: Any = read_json(path)
    if not isinstance(data, dict):
        raise RequestError("the file cannot be read as a JSON object")
    identity, environment, saved_at = (data.get(name) for name in ("identity", "environment", "saved_at"))
    if not isinstance(identity, dict) or fingerprint(identity) != path.stem:
        raise RequestError("the file is not named after the request in it")
    if not isinstance(environment, str):
        raise RequestError(f"environment is {environment!r}")
    if not isinstance(saved_at, float | int) or isinstance(saved_at, bool) or not 0 <= saved_at <= LATEST_TIME:
        raise RequestError(f"saved_at is {saved_at!r}")
    return CachedPlan(
        plan=Plan.from_json(data.get("plan", {})), identity=identity, environment=environment, saved_at=float(saved_at)
    )
