"""`brim sweep`: every experiment of a file, previewed, run safely, as many at once as fit."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.settings.sweep_file import SweepFile
    from brim.sweeps.forecast_process import ForecastProcess
    from brim.sweeps.request import SweepRequest
    from brim.sweeps.run import Launcher, SweepPlan, SweepResult
    from brim.sweeps.scheduler import Device

__all__ = ["sweep"]

SOME_FAILED = 1
_WHAT, _HOW, _WHERE, _OUT = "Experiments", "Running", "Where", "Output"


def _flag(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


File = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A YAML file with a grid; docs/sweeps.md.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings of the file, changed: hp.learning_rate=[0.1,0.01].", show_default=False
    ),
]
Config = Annotated[str | None, _flag("--config", text="The same as FILE.", panel=_WHAT, metavar="FILE")]
DryRun = Annotated[bool, _flag("--dry-run", text="Only show what would run, how it pairs, and its memory.")]
Check = Annotated[bool, _flag("--check", text="Only look for mistakes in the file.")]
Strict = Annotated[bool, _flag("--strict", text="Warnings are errors.", panel=_WHAT)]
MaxExperiments = Annotated[int | None, _flag("--max-experiments", text="Only the first N.", panel=_WHAT, metavar="N")]
DataPercentage = Annotated[
    float | None, _flag("--data-percentage", text="Train on a part of the data.", panel=_WHAT, metavar="PERCENT")
]
JobsPerGpu = Annotated[
    int | None,
    _flag("--jobs-per-gpu", text="Experiments that may share a GPU (default: as many as fit), or the CPU (default 1).",
          panel=_HOW, metavar="N"),
]  # fmt: skip
Timeout = Annotated[
    float | None, _flag("--timeout", text="End an experiment that takes longer.", panel=_HOW, metavar="SECONDS")
]
NoRetry = Annotated[bool, _flag("--no-retry", text="A batch size that does not fit fails its experiment.", panel=_HOW)]
ResumeSweep = Annotated[
    bool, _flag("--resume", text="Go on with the sweep in -o; failed experiments are tried again.", panel=_OUT)
]
On = Annotated[str, _flag("--on", text="local, ray or slurm.", panel=_WHERE, metavar="WHERE")]
Slurm = Annotated[
    list[str] | None,
    _flag("--slurm", text="With --on slurm: partition=gpu, account=…; repeatable.", panel=_WHERE, metavar="KEY=VALUE"),
]
ForecastGpu = Annotated[
    str | None, _flag("--gpu", text="Forecast for this card instead of the one here.", panel=_WHERE, metavar="NAME")
]
ForecastMemory = Annotated[
    str | None, _flag("--memory", text="Forecast for a card of this memory.", panel=_WHERE, metavar="SIZE")
]
NoForecast = Annotated[
    bool, _flag("--no-forecast", text="Do not forecast memory; experiments do not share a GPU then.", panel=_HOW)
]
NoCaches = Annotated[bool, _flag("--no-cache", text="Neither use cached plans and forecasts nor keep any.", panel=_HOW)]
TopN = Annotated[int, _flag("--top-n", text="How many of the best to show.", panel=_OUT, metavar="N")]
ResultsFile = Annotated[
    str | None, _flag("--results-file", text="Also write results.csv here.", panel=_OUT, metavar="FILE")
]
Log = Annotated[
    list[str] | None,
    _flag("--log", text="tensorboard, mlflow or wandb; repeatable.", panel=_OUT, metavar="NAME"),
]
MultiGpu = Annotated[bool, typer.Option("--multi-gpu", help="Always on: every GPU is used.", hidden=True)]


def sweep(
    file: File = None,
    overrides: Overrides = None,
    config: Config = None,
    dry_run: DryRun = False,
    check: Check = False,
    strict: Strict = False,
    max_experiments: MaxExperiments = None,
    data_percentage: DataPercentage = None,
    jobs_per_gpu: JobsPerGpu = None,
    timeout: Timeout = None,
    no_retry: NoRetry = False,
    no_forecast: NoForecast = False,
    no_cache: NoCaches = False,
    on: On = "local",
    slurm: Slurm = None,
    gpu: ForecastGpu = None,
    memory: ForecastMemory = None,
    multi_gpu: MultiGpu = False,
    top_n: TopN = 10,
    results_file: ResultsFile = None,
    log: Log = None,
    resume: ResumeSweep = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Train every experiment of a grid, each in its own process: models paired with batch sizes, or with auto.

    Example: brim sweep config/ucf101_video_grid.yaml hp.learning_rate=0.01 --max-experiments 3 --dry-run
    """
    from brim.storage.run_lock import locked_folder
    from brim.sweeps.forecast_process import ANSWER_SECONDS, ForecastProcess
    from brim.sweeps.request import SweepRequest
    from brim.sweeps.state import check_contents

    del multi_gpu
    file, changes = _source(file, overrides, config)
    if resume and output is None:
        raise RequestError("--resume: say which sweep with -o DIR")
    if gpu is not None and memory is not None:
        raise RequestError(f"--gpu {gpu} and --memory {memory} both name a card; give one")
    _check_card(gpu, memory)
    request = SweepRequest(
        file=file,
        overrides=tuple(changes),
        on=on,  # type: ignore[arg-type]  # checked by the request
        jobs_per_gpu=jobs_per_gpu,
        timeout_seconds=timeout,
        retry=not no_retry,
        resume=resume,
        use_cache=not no_cache,
        top_n=top_n,
        results_file=results_file,
        max_experiments=max_experiments,
        data_percentage=data_percentage,
        loggers=tuple(log or ()),
        slurm=_slurm_settings(slurm or []),
    )
    named = {"gpu": gpu, "memory": memory} if gpu or memory else {}
    patience = ANSWER_SECONDS if timeout is None else min(timeout, ANSWER_SECONDS)
    with contextlib.ExitStack() as held:
        folder = None
        if not (check or dry_run):  # the folder is opened before any model is
            folder = held.enter_context(locked_folder(output, command="sweep", note=error_console().print))
            check_contents(folder, resume=resume)
        with ForecastProcess(card=named, timeout_seconds=patience) as scout:
            preparation = _Preparation(request, scout, strict=strict, forecasting=not no_forecast)
            if check:
                _show_check(preparation, json_output=json_output)
                return
            plan = preparation.plan()
            if folder is None:
                _show_preview(plan, request, preparation.seconds, json_output=json_output)
                return
            devices = preparation.devices
        result = _run(plan, preparation.settled(request), devices, folder, json_output=json_output)
        _show_result(result, request, json_output=json_output)


def _check_card(gpu: str | None, memory: str | None) -> None:
    """Refuse a card that does not exist, also where no forecast asks for it."""
    from brim.forecasting.gpus import find_gpu, gpu_of_memory

    if gpu is not None:
        find_gpu(gpu)
    if memory is not None:
        gpu_of_memory(memory)


def _source(file: str | None, overrides: list[str] | None, config: str | None) -> tuple[str, list[str]]:
    """The file and the settings changed; `--config FILE` is the old way to name it."""
    changes = list(overrides or [])
    if config is not None and file is not None:
        if "=" not in file:
            raise RequestError(f"--config {config} and {file} both name a file; keep one")
        changes = [file, *changes]
        file = None
    found = config if config is not None else file
    if found is None:
        raise RequestError(
            "FILE is missing: name a YAML file with a grid, such as brim sweep config/ucf101_video_grid.yaml"
        )
    if "=" in found and not Path(found).exists():
        raise RequestError(f"{found}: that is a setting; name the file first: brim sweep FILE {found}")
    return found, changes


def _slurm_settings(texts: list[str]) -> dict[str, Any]:
    from brim.settings.overrides import parse_overrides

    return parse_overrides(texts)


class _Preparation:
    """From a file to a plan: read, expanded, forecast, every problem told."""

    def __init__(self, request: SweepRequest, scout: ForecastProcess, *, strict: bool, forecasting: bool) -> None:
        self.seconds: float | None = None  # that forecasting took
        self._request = request
        self._scout = scout
        self._strict = strict
        self._forecasting = forecasting
        self._found: list[dict[str, Any]] | None = None
        self._sweep: SweepFile | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where experiments run on this machine."""
        from brim.sweeps.devices import local_devices

        assert self._sweep is not None
        return local_devices(self._cards(), jobs_per_gpu=self._request.jobs_per_gpu, device_ids=self._sweep.device_ids)

    def plan(self) -> SweepPlan:
        """The experiments with their forecasts; a `RequestError` names everything that is wrong."""
        from brim.settings.problems import raise_errors, strictly

        plan, problems = self.inspect()
        raise_errors(strictly(problems) if self._strict else problems)
        assert plan is not None  # without an error there is one
        return plan

    def inspect(self) -> tuple[SweepPlan | None, tuple[Any, ...]]:
        """The plan and every problem; no plan where one of them is an error."""
        from brim.settings.overrides import parse_overrides
        from brim.settings.sweep_file import inspect_sweep
        from brim.sweeps.run import SweepPlan

        changes = parse_overrides(self._request.overrides)
        if self._request.data_percentage is not None:
            changes.setdefault("data.percentage", self._request.data_percentage)
        found, problems = inspect_sweep(self._request.file, overrides=changes, check_model=self._scout.check_model)
        if found is None:
            return None, problems
        self._sweep = found
        expansion, problems = found.try_expand(max_experiments=self._request.max_experiments)
        if expansion is None:
            return None, problems
        forecasts = self._forecast(expansion.experiments) if self._forecasting and self._card_known() else {}
        problems = (*problems, *self._foreseen(expansion.experiments, forecasts))
        return SweepPlan(expansion=dataclasses.replace(expansion, problems=problems), forecasts=forecasts), problems

    def settled(self, request: SweepRequest) -> SweepRequest:
        """The request with what the file says about the sweep itself."""
        assert self._sweep is not None
        return dataclasses.replace(request, results_file=request.results_file or self._sweep.results_file)

    def _card_known(self) -> bool:
        """Whether it is known what experiments run on: on a cluster, only by a card here or one that is named."""
        if self._request.on == "local" or self._scout.card or self._cards():
            return True
        error_console().print(
            f"note: no memory is forecast: name the cluster's card with --gpu, or each experiment has a GPU of its "
            f"own (--on {self._request.on})",
            markup=False,
            highlight=False,
        )
        return False

    def _cards(self) -> list[dict[str, Any]]:
        if self._found is None:
            self._found = self._scout.devices()
        return self._found

    def _forecast(self, experiments: Any) -> dict[str, Any]:
        from brim.sweeps.forecast_cache import CachedForecasts
        from brim.sweeps.forecasts import forecast_experiments

        cards = [card for card in self._cards() if str(card["name"]).startswith("cuda")]
        if not self._scout.card and cards:
            self._scout.card = {"here": True}
        known = {**self._scout.card, "cards": [card.get("card") for card in cards]} if self._scout.card else {}
        ask = CachedForecasts(self._scout.forecast, card=known) if self._request.use_cache else self._scout.forecast
        console = error_console()
        began = time.monotonic()
        if console.is_terminal:
            with console.status("forecasting memory") as status:
                found = forecast_experiments(
                    experiments, ask, told=lambda what: status.update(f"forecasting memory {what}")
                )
        else:
            found = forecast_experiments(experiments, ask)
        self.seconds = time.monotonic() - began
        return found

    def _foreseen(self, experiments: Any, forecasts: Any) -> list[Any]:
        from brim.sweeps.forecasts import foreseen, foreseen_data

        assert self._sweep is not None
        return [
            *foreseen(self._sweep, experiments, forecasts, retry=self._request.retry),
            *foreseen_data(self._sweep, experiments),
        ]


def _show_check(preparation: _Preparation, *, json_output: bool) -> None:
    from brim.settings.problems import has_errors, in_order, render_problems, strictly

    plan, problems = preparation.inspect()
    told = in_order(strictly(problems) if preparation._strict else problems)
    wrong = has_errors(told)
    if json_output:
        document = {"schema": "brim.check/1", "ok": not wrong, "problems": [problem.to_json() for problem in told]}
        print_document(document)
    else:
        if told:
            output_console().print(render_problems(told), markup=False, highlight=False)
        if not wrong and plan is not None:
            count = len(plan.expansion)
            output_console().print(f"nothing is wrong: {count:,} experiment{'s' if count != 1 else ''}")
    if wrong:
        raise typer.Exit(RequestError.exit_code)


def _show_preview(plan: SweepPlan, request: SweepRequest, seconds: float | None, *, json_output: bool) -> None:
    from brim.sweeps.preview import render_sweep
    from brim.sweeps.summary import preview_document

    if json_output:
        document = preview_document(plan.expansion, plan.forecasts, file=request.file, seconds=seconds)
        print_document(document)
        return
    width = min(shutil.get_terminal_size().columns, 160)
    output_console().print(render_sweep(plan.expansion, plan.forecasts, width=width), markup=False, highlight=False)


def _run(
    plan: SweepPlan, request: SweepRequest, devices: tuple[Device, ...], folder: Path, *, json_output: bool
) -> SweepResult:
    from brim.cli.sweep_progress import SweepProgress
    from brim.sweeps.run import run_sweep

    with SweepProgress(error_console(), lines=not json_output) as progress:
        for problem in plan.expansion.problems:
            if problem.severity != "note":
                progress.note(str(problem))
        launcher = _launcher(request, devices, progress)
        try:
            return run_sweep(plan, request, launcher, output=folder, listener=progress)
        except KeyboardInterrupt:
            progress.note(f"what is finished is kept: go on with --resume -o {folder}")
            raise


def _launcher(request: SweepRequest, devices: tuple[Device, ...], progress: Any) -> Launcher:
    from brim.sweeps.devices import mps_is_running
    from brim.sweeps.launch_local import LocalLauncher

    if request.on == "ray":
        from brim.sweeps.launch_ray import RayLauncher

        return RayLauncher(timeout_seconds=request.timeout_seconds, jobs_per_gpu=request.jobs_per_gpu)
    if request.on == "slurm":
        from brim.sweeps.launch_slurm import SlurmLauncher

        return SlurmLauncher(settings=request.slurm, timeout_seconds=request.timeout_seconds)
    cards = [device for device in devices if device.kind == "cuda"]
    if cards and mps_is_running():
        progress.note("CUDA MPS runs here: experiments that share a GPU run their kernels side by side")
    return LocalLauncher(devices, shares=request.jobs_per_gpu is not None, timeout_seconds=request.timeout_seconds)


def _show_result(result: SweepResult, request: SweepRequest, *, json_output: bool) -> None:
    from brim.cli.run_report import leave_report
    from brim.cli.sweep_progress import print_sweep

    report = leave_report(result.folder)
    if json_output:
        print_document(result.document)
    else:
        print_sweep(output_console(), result, top_n=request.top_n, report=report)
    if result.failed:
        raise typer.Exit(SOME_FAILED)
