"""From a sweep's file to a plan: read, expanded, forecast, every problem found; and then run where it was asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from brim.forecasting.gpus import find_gpu, gpu_of_memory
from brim.monitor.live import LiveRun, both
from brim.settings.caller import named, resume_with
from brim.settings.config_files import SweepFile, inspect_sweep
from brim.settings.grid import Experiment
from brim.settings.problems import Problem, raise_errors, strictly
from brim.settings.sweep_request import SweepCommand, SweepRequest
from brim.settings.yaml_file import parse_overrides
from brim.storage.run_lock import locked_folder
from brim.sweeps import forecast_process
from brim.sweeps.forecasts import CachedForecasts, SizeForecast, forecast_experiments, foreseen, foreseen_data
from brim.sweeps.job import SweepListener
from brim.sweeps.launch_local import LocalLauncher
from brim.sweeps.live_figures import LiveSweep
from brim.sweeps.run import Launcher, SweepPlan, SweepResult, run_sweep
from brim.sweeps.scheduler import Device, local_devices, mps_is_running
from brim.sweeps.state import check_contents

__all__ = ["Preparation", "choose_launcher", "prepared", "sweep"]


class Preparation:
    """From a file to a plan; the listener is notified of what is forecast, and gets the notes."""

    def __init__(
        self, settings: SweepCommand, process: forecast_process.ForecastProcess, listener: SweepListener
    ) -> None:
        self.seconds: float | None = None  # that forecasting took
        self._settings = settings
        self._request = settings.request
        self._process = process
        self._listener = listener
        self._found: list[dict[str, Any]] | None = None
        self._sweep: SweepFile | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where experiments run on this machine."""
        assert self._sweep is not None
        return local_devices(self._cards(), jobs_per_gpu=self._request.jobs_per_gpu, device_ids=self._sweep.device_ids)

    def plan(self) -> SweepPlan:
        """The experiments with their forecasts; a `RequestError` names everything that is wrong."""
        plan, problems = self.inspect()
        raise_errors(problems)
        assert plan is not None  # without an error there is one
        return plan

    def inspect(self) -> tuple[SweepPlan | None, tuple[Problem, ...]]:
        """The plan and every problem; no plan where one of them is an error."""
        plan, problems = self._inspect()
        return plan, strictly(problems) if self._settings.strict else problems

    def final_request(self) -> SweepRequest:
        """The request with what the file says about the sweep itself."""
        assert self._sweep is not None
        return dataclasses.replace(self._request, results_file=self._request.results_file or self._sweep.results_file)

    def _inspect(self) -> tuple[SweepPlan | None, tuple[Problem, ...]]:
        changes = parse_overrides(self._request.overrides)
        if self._request.data_percentage is not None:
            changes.setdefault("data.percentage", self._request.data_percentage)
        found, problems = inspect_sweep(self._request.file, overrides=changes, check_model=self._process.check_model)
        if found is None:
            return None, problems
        self._sweep = found
        expansion, problems = found.try_expand(max_experiments=self._request.max_experiments)
        if expansion is None:
            return None, problems
        forecasting = not self._settings.no_forecast and self._card_known()
        forecasts = self._forecast(expansion.experiments) if forecasting else {}
        problems = (
            *problems,
            *foreseen(found, expansion.experiments, forecasts, retry=self._request.retry),
            *foreseen_data(found, expansion.experiments),
        )
        return SweepPlan(expansion=dataclasses.replace(expansion, problems=problems), forecasts=forecasts), problems

    def _card_known(self) -> bool:
        """Whether it is known what experiments run on: on a cluster, only by a card here or one that is named."""
        if self._request.on == "local" or self._process.card or self._cards():
            return True
        self._listener.note(
            f"note: no memory is forecast: name the cluster's card with {named('gpu')}, or each experiment has a GPU "
            f"of its own ({named('on')} {self._request.on})"
        )
        return False

    def _cards(self) -> list[dict[str, Any]]:
        if self._found is None:
            self._found = self._process.devices()
        return self._found

    def _forecast(self, experiments: Sequence[Experiment]) -> dict[str, SizeForecast]:
        cards = [card for card in self._cards() if str(card["name"]).startswith("cuda")]
        if not self._process.card and cards:
            self._process.card = {"here": True}
        known = {**self._process.card, "cards": [card.get("card") for card in cards]} if self._process.card else {}
        ask = CachedForecasts(self._process.forecast, card=known) if self._request.use_cache else self._process.forecast
        began = time.monotonic()
        found = forecast_experiments(experiments, ask, progress=self._listener.forecasting)
        self.seconds = time.monotonic() - began
        return found


@contextlib.contextmanager
def prepared(settings: SweepCommand, listener: SweepListener) -> Iterator[Preparation]:
    """A preparation and the process that it asks; a card that does not exist is refused, forecast or not."""
    if settings.gpu is not None:
        find_gpu(settings.gpu)
    if settings.memory is not None:
        gpu_of_memory(settings.memory)
    card = {"gpu": settings.gpu, "memory": settings.memory} if settings.gpu or settings.memory else {}
    limit = settings.request.timeout_seconds
    patience = forecast_process.ANSWER_SECONDS if limit is None else min(limit, forecast_process.ANSWER_SECONDS)
    with forecast_process.ForecastProcess(card=card, timeout_seconds=patience) as process:
        yield Preparation(settings, process, listener)


def sweep(settings: SweepCommand, *, listener: SweepListener | None = None) -> SweepResult:
    """Train every experiment of a file and leave the sweep's folder behind, opened before any model is."""
    watcher = listener or SweepListener()
    with (
        locked_folder(settings.output, command="sweep", note=watcher.note) as folder,
        LiveRun(folder, "sweep") as live,
    ):
        watcher = both(SweepListener, LiveSweep(live), watcher)
        check_contents(folder, resume=settings.request.resume)
        with prepared(settings, watcher) as preparation:
            plan = preparation.plan()
            devices = preparation.devices
        for problem in plan.expansion.problems:
            if problem.severity != "note":
                watcher.note(str(problem))
        return _run(plan, preparation.final_request(), devices, folder, watcher)


def _run(
    plan: SweepPlan, request: SweepRequest, devices: tuple[Device, ...], folder: Path, listener: SweepListener
) -> SweepResult:
    launcher = choose_launcher(request, devices, listener)
    try:
        return run_sweep(plan, request, launcher, output=folder, listener=listener)
    except KeyboardInterrupt:
        listener.note(f"what is finished is kept: continue with {resume_with(folder)}")
        raise


def choose_launcher(request: SweepRequest, devices: tuple[Device, ...], listener: SweepListener) -> Launcher:
    """What runs the experiments: processes here, Ray's workers, or jobs of Slurm."""
    if request.on == "ray":
        from brim.sweeps.launch_ray import RayLauncher

        return RayLauncher(timeout_seconds=request.timeout_seconds, jobs_per_gpu=request.jobs_per_gpu)
    if request.on == "slurm":
        from brim.sweeps.launch_slurm import SlurmLauncher

        return SlurmLauncher(settings=request.slurm, timeout_seconds=request.timeout_seconds)
    if any(device.kind == "cuda" for device in devices) and mps_is_running():
        listener.note("CUDA MPS runs here: experiments that share a GPU run their kernels side by side")
    return LocalLauncher(devices, shares=request.jobs_per_gpu is not None, timeout_seconds=request.timeout_seconds)
