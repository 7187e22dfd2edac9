"""One profile: an evaluation at every point, each starting where the one before it ended.

The model stays loaded and the data read while only knobs change. Every point is a run folder of its own under
`values/`, so that a point is resumed like any evaluation; finished points are not visited again, failed ones are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.data.base import SampleSet
from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.evaluation.live_figures import LiveEvaluation
from brim.evaluation.run import EvalResult, evaluate_together
from brim.evaluation.setup import open_setup, read_data
from brim.evaluation.timing import StageClock
from brim.evaluation.worker import EvalListener, Worker
from brim.memory.devices import memory_of
from brim.models.load import KeptModel
from brim.monitor.live import LiveRun, both
from brim.monitor.loggers.loggers import LoggedRun, check_loggers, open_loggers
from brim.profiling.documents import write_documents
from brim.profiling.entry import done_entry, failed_entry, mark_saturation, time_single_samples
from brim.profiling.points import Point, matches, plan_points, point_folder, point_label, scale_for
from brim.ranks.agreement import Agreement, shared_folder, stop_signal_as_error
from brim.settings.caller import given, named, resume_with
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest, ProfileSettings
from brim.sizing.priors import NeighbourPriors, Prior
from brim.storage.files import read_json, write_json
from brim.storage.fingerprint import fingerprint
from brim.storage.run_folder import check_no_other_run

__all__ = ["ProfileListener", "ProfileResult", "check_contents", "profile", "profile_as"]

POINT_FILE = "point.json"
# What of a request does not decide a point's answers.
_HOW_NOT_WHAT = (
    "batch_size", "cost_cap", "fixed", "fail_on_oom", "memory_limit", "margin", "device", "offload", "num_workers",
    "pin_memory", "prefetch_factor", "use_cache", "graphs", "fail_fast", "resume", "overlap", "non_blocking",
    "decode_loop", "pool", "batch_invariant",  # the last cannot be asked for: points run in batches
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """The result of a profile; on every rank but 0 the document is empty."""

    folder: Path
    document: dict[str, Any]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """One per point, in the order of the run."""
        entries: list[dict[str, Any]] = self.document.get("summary", [])
        return entries


def profile(
    request: ProfileRequest,
    *,
    output: Path | None = None,
    listener: ProfileListener | None = None,
    log: Sequence[str] = (),
) -> ProfileResult:
    """Profile, and leave the folder behind. Points that fail are recorded and do not stop the others."""
    listener = listener or ProfileListener()

    def check(folder: Path) -> None:
        check_contents(folder, resume=request.resume)
        check_loggers(log, folder)

    with contextlib.ExitStack() as stack:
        with Agreement(patient=True, purpose="a profile") as agreement:
            folder = stack.enter_context(
                shared_folder(agreement, output, command="profile", check=check, note=listener.note)
            )
            with agreement.step(list[Point]) as planning:
                planning.value = plan_points(request)
            live = stack.enter_context(LiveRun(folder, "profile", publishes=agreement.world.rank == 0))
            live.update(ranks=agreement.world.size, rank_pids=agreement.processes_here())
            listener = both(ProfileListener, _LiveProfile(live), listener)
            points = [dict(point) for point in planning.values[0]]
            run = _ProfileRun(request, points, folder, listener, rank=agreement.world.rank)
            with agreement.step(list[int]) as earlier:
                earlier.value = run.finished_before()
        names = log if agreement.world.rank == 0 else ()
        loggers = stack.enter_context(open_loggers(names, folder, listener.note))
        logged = stack.enter_context(loggers.open_run(folder.absolute().name, request.to_json()))
        try:
            run.go(set(earlier.values[0]), logged)
        except KeyboardInterrupt:
            listener.note(f"what is finished is kept: continue with {resume_with(folder)}")
            raise
    return ProfileResult(folder=folder, document=run.document if agreement.world.rank == 0 else {})


def check_contents(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or points of a profile without `resume`. Reads no model."""
    check_no_other_run(folder, "profile")
    points = folder / "values"
    begun = any(next(points.glob(f"*/{name}"), None) is not None for name in (POINT_FILE, "samples.jsonl"))
    if begun and not resume:
        raise RequestError(
            f"{given('output', folder)}: it holds a profile already; continue it with {named('resume')}, or choose "
            "another folder"
        )


class _ProfileRun:
    """One rank's way through the points."""

    def __init__(
        self, request: ProfileRequest, points: Sequence[Point], folder: Path, listener: ProfileListener, *, rank: int
    ) -> None:
        self.request = request
        self.points = points
        self.folder = folder
        self.listener = listener
        self.rank = rank
        self.document: dict[str, Any] = {}
        self._entries: dict[int, dict[str, Any]] = {}
        self._started_at = datetime.datetime.now(datetime.UTC)
        self._opener = _Opener(request)
        self._data: SampleSet | None = None

    def finished_before(self) -> list[int]:
        """The points that need no work: rank 0 reads the folder, and all ranks use its answer."""
        self._data = self._opener.data()  # mistakes in the data are reported before anything is written
        if self.rank > 0:
            return []
        done = []
        for place, point in enumerate(self.points):
            entry = self._earlier(point)
            if entry is not None and entry["state"] == "done":
                self._entries[place] = entry
                done.append(place)
        return done

    def go(self, done: set[int], logged: LoggedRun) -> None:
        """Visit every point that is left, and write the documents after each."""
        self.listener.planned(len(self.points), len(done))
        for place, point in enumerate(self.points):
            if place in done:
                continue
            self.listener.point(place, len(self.points), point_label(point))
            entry = self._visit(point)
            if self.rank == 0:
                self._entries[place] = entry
                write_json(self._place_of(point) / POINT_FILE, {"identity": self._identity(point), "entry": entry})
                self._write()
                _log_point(logged, place, point, entry)
            self.listener.point_done(entry)
        if self.rank == 0 and not self.document:
            self._write()
        logged.summary = {name: self.document.get(name) for name in ("recommendation", "duration_seconds")}
        failed = [entry for entry in self._entries.values() if entry["state"] == "failed"]
        if failed and len(failed) == len(self.points) and all(entry["exit_code"] == 3 for entry in failed):
            raise DoesNotFitError(f"no point fits: {failed[-1]['error']}\nThe record is in {self.folder}")
        if failed and len(failed) == len(self.points) and all(entry["exit_code"] == 2 for entry in failed):
            raise RequestError(f"no point can run: {failed[-1]['error']}\nThe record is in {self.folder}")

    def _visit(self, point: Point) -> dict[str, Any]:
        """Evaluate one point; an error of its own becomes its entry, a lost device or rank ends the profile."""
        started_at = datetime.datetime.now(datetime.UTC)
        folder = self._place_of(point)
        request = self._request_for(point, folder)
        place = folder.relative_to(self.folder).as_posix()
        try:
            with Agreement(patient=True, purpose="a profile") as agreement, stop_signal_as_error(agreement):
                self._opener.aim(point)
                result = evaluate_together(agreement, request, folder, self.listener, self._opener)
            singles = self._opener.time_singles(self.request.latency_samples) if self.rank == 0 else []
        except LostError as error:
            if error.exit_code == LostError.exit_code:
                error.args = (f"{error}\nWhat is finished is kept: continue with {resume_with(self.folder)}",)
                raise
            return failed_entry(point, str(error), folder=place, exit_code=error.exit_code, started_at=started_at)
        except Exception as error:
            code = error.exit_code if isinstance(error, BrimError) else 1
            line = str(error) if isinstance(error, BrimError) else f"{type(error).__name__}: {error}"
            self._opener.forget()
            return failed_entry(point, line, folder=place, exit_code=code, started_at=started_at)
        self._opener.learn(point, result)
        if self.rank > 0:
            return {**point, "state": "done"}
        return done_entry(
            point,
            result,
            folder=place,
            ceiling=request.batch_size,
            times=self._opener.times(),
            single_times=singles,
            started_at=started_at,
        )

    def _request_for(self, point: Point, folder: Path) -> EvalRequest:
        base = self.request.base
        sizes = [size for named, size in self.request.batch_size_for if matches(point, named)]
        knobs = {**base.knobs, **point}
        return dataclasses.replace(
            base,
            knobs=knobs,
            max_new_tokens=None if "max_new_tokens" in knobs else base.max_new_tokens,
            dtype="auto" if "dtype" in point else base.dtype,
            batch_size=sizes[-1] if sizes else base.batch_size,
            resume=self.request.resume and (folder / "samples.jsonl").exists(),
        )

    def _write(self) -> None:
        entries = [self._entries[place] for place in sorted(self._entries)]
        notes = mark_saturation([entry for entry in entries if entry["state"] == "done"], list(self.request.axes))
        before = read_json(self.folder / "profile.json") or {}  # of the run that this one resumes, or its own
        started_at = datetime.datetime.fromisoformat(before.get("started_at") or self._started_at.isoformat())
        environment = self._opener.environment or before.get("environment", {})
        self.document = write_documents(self.folder, self.request, environment, started_at, entries, notes)

    def _earlier(self, point: Point) -> dict[str, Any] | None:
        """What an earlier run left of a point; without --resume there is nothing."""
        if not self.request.resume:
            return None
        folder = self._place_of(point)
        kept = read_json(folder / POINT_FILE)
        if not isinstance(kept, Mapping) or "entry" not in kept:
            return None
        if kept.get("identity") != self._identity(point):
            raise RequestError(
                f"{named('resume')}: {folder / POINT_FILE} was made with another model, data or settings; choose "
                "another folder"
            )
        entry: dict[str, Any] = kept["entry"]
        return entry

    def _identity(self, point: Point) -> str:
        """What the answers of a point depend on."""
        plain = self._request_for(point, self._place_of(point)).to_json()
        facts = {} if self._data is None else dict(self._data.facts)
        return fingerprint({"request": {k: v for k, v in plain.items() if k not in _HOW_NOT_WHAT}, "data": facts})

    def _place_of(self, point: Point) -> Path:
        return self.folder / "values" / point_folder(point)


def _log_point(logged: LoggedRun, place: int, point: Point, entry: Mapping[str, Any]) -> None:
    """One step for each point, which its knobs' values go with; one that failed has no figures."""
    names = ("accuracy", "samples_per_second", "batch_size_used", "peak_reserved_bytes", "oom_events")
    figures = {name: entry.get(name) for name in names}
    logged.log({**{f"knob/{name}": value for name, value in point.items()}, **figures}, step=place)


class _Opener:
    """Opens the worker of every point over one data set and one model, with what earlier points have shown."""

    def __init__(self, request: ProfileRequest) -> None:
        self._request = request
        self._data: SampleSet | None = None
        self._model = KeptModel()
        self._worker: Worker | None = None
        self._clock: StageClock | None = None
        self._priors = NeighbourPriors()
        self._prior = Prior()
        self.environment: Mapping[str, Any] = {}

    def data(self) -> SampleSet:
        """The data, read once."""
        if self._data is None:
            self._data = read_data(self._request.base)
        return self._data

    def aim(self, point: Point) -> None:
        """The next worker is for this point."""
        share = scale_for(self._request.initial_scale, _crops_of(point))
        self._prior = self._priors.prior_for(point, ceiling_share=share)

    def __call__(self, request: EvalRequest, listener: EvalListener, monitor: Path) -> Worker:
        self.forget()
        setup = open_setup(request, data=self.data(), load=self._model)
        self._clock = StageClock(setup.device, setup.model.module, generates=setup.task.unit == "tokens")
        self._worker = Worker(request, setup, listener, monitor=monitor, prior=self._prior, stages=self._clock)
        self.environment = setup.facts().environment
        return self._worker

    def learn(self, point: Point, result: EvalResult) -> None:
        """Keep where this point's run settled."""
        self._priors.learn(point, result.plan)

    def times(self) -> list[Any]:
        """How long the batches of the last worker took."""
        return [] if self._clock is None else self._clock.times()

    def time_singles(self, count: int) -> list[Any]:
        """Single samples of the last setup, timed."""
        if count == 0 or self._worker is None:
            return []
        return time_single_samples(self._worker.setup, count)

    def forget(self) -> None:
        """Let go of the last worker and its keys, values and graphs, before the next one needs the memory."""
        if self._worker is not None:
            setup = self._worker.setup
            setup.task.release()
            self._worker = None
            memory_of(setup.device).release()


def _crops_of(point: Mapping[str, Any]) -> Any:
    """The value that the rule of thumb is about: the most crops, patches or tiles of a picture; None without one."""
    names = ("max_crops", "max_patches", "max_tiles", "max_image_tiles")
    return next((value for name, value in point.items() if name in names), None)


class ProfileListener(EvalListener):
    """Is called for every point, and for the evaluation inside it; each method does nothing by default."""

    def planned(self, points: int, done: int) -> None:
        """So many points, of which so many were finished by an earlier run."""

    def point(self, place: int, points: int, label: str) -> None:
        """A point begins; places count from 0."""

    def point_done(self, entry: Mapping[str, Any]) -> None:
        """A point has ended, well or not."""


class _LiveProfile(LiveEvaluation, ProfileListener):
    """Publishes the points; the evaluation under way is the `part`."""

    def __init__(self, live: LiveRun) -> None:
        super().__init__(live, inside=True)
        self._points = 0

    def planned(self, points: int, done: int) -> None:
        """How much there is to do."""
        self._points = done
        self._live.update(state="running", done=done, total=points, unit="points")

    def point(self, place: int, points: int, label: str) -> None:
        """Which point it is."""
        del place, points
        self._live.update(label=label, part=None, metric=None)

    def point_done(self, entry: Mapping[str, Any]) -> None:
        """One more."""
        del entry
        self._points += 1
        self._live.update(done=self._points)


def profile_as(settings: ProfileSettings, *, listener: ProfileListener | None = None) -> ProfileResult:
    """Evaluate at every point, and leave the profile's folder behind."""
    return profile(settings.request, output=settings.output, listener=listener, log=settings.log)
