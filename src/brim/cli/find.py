"""`brim find`: the fastest batch size that fits, with the evidence."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import BrimError, RequestError
from brim.settings.search_settings import DEFAULT_MAX_SIZE, SearchSettings
from brim.settings.sizes import parse_bytes
from brim.storage.run_folder import check_folder, write_run

if TYPE_CHECKING:
    from brim.evaluation.request import EvalRequest
    from brim.models.build import WorkloadRequest
    from brim.records import Plan
    from brim.searching.probe import Prober

__all__ = ["find"]


def find(
    model: options.ModelName,
    data: options.Data = None,
    split: options.Split = None,
    limit: options.Limit = None,
    field: options.Fields = None,
    images: options.Images = None,
    task: options.Task = None,
    mode: options.Mode = None,
    knob: options.Knobs = None,
    max_tokens: options.MaxTokens = None,
    batch_size: options.BatchSize = "auto",
    no_auto_batch_size: options.NoAutoBatchSize = False,
    fail_on_oom: options.FailOnOom = False,
    objective: options.Objective = "fastest",
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = None,
    tolerance: options.Tolerance = 0.02,
    max_probes: options.MaxProbes = None,
    probe_timeout: options.ProbeTimeout = None,
    multiple_of: options.MultipleOf = 1,
    power_of_two: options.PowerOfTwo = False,
    max_batch_size: options.MaxBatchSize = None,
    no_cache: options.NoCache = False,
    per_rank: options.PerRank = False,
    isolate: options.Isolate = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    optimizer: options.Optimizer = "adamw",
    gradient_checkpointing: options.GradientCheckpointing = False,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Find the fastest batch size that fits, in a handful of probes.

    With -d the search runs on the data's own worst case: its costliest sample, in batches of every size.

    Example: brim find swin3d_t --mode train --knob frames=16 --knob size=224 --dtype bfloat16
    """
    settings = SearchSettings(
        batch_size=options.parse_batch_size(batch_size),
        fixed=no_auto_batch_size,
        fail_on_oom=fail_on_oom,
        objective=objective,  # type: ignore[arg-type]  # checked by SearchSettings
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        margin=margin,
        tolerance=tolerance,
        max_probes=max_probes,
        probe_timeout_seconds=probe_timeout,
        multiple_of=multiple_of,
        power_of_two=power_of_two,
        max_size=max_batch_size if max_batch_size is not None else DEFAULT_MAX_SIZE,
        use_cache=not no_cache,
        per_rank=per_rank,
    )
    knobs = options.collect_knobs(knob, max_tokens)
    from brim.models.build import WorkloadRequest

    request = WorkloadRequest(
        model=model,
        mode=mode,  # type: ignore[arg-type]  # checked when the workload is built
        knobs=knobs,
        device=device,
        dtype=dtype,
        optimizer=optimizer,
        gradient_checkpointing=gradient_checkpointing,
        trust_remote_code=trust_remote_code,
    )
    evaluation = data_request(request, data, split=split, limit=limit, field=field, images=images, task=task)
    if output is not None:
        check_folder(output)
    started_at = datetime.datetime.now(datetime.UTC)
    plan, environment = _search(request, evaluation, settings, isolate=isolate, quiet=json_output)
    _show(plan, json_output=json_output)  # before anything is written: a full disk must not lose the answer
    if output is not None:
        write_run(
            output,
            kind="find",
            request={**request.to_json(), "data": data, "command": "find"},
            environment=environment,
            plan=plan.to_json(),
            summary={"batch_size_used": plan.size, "batch_size_max": plan.batch_size_max},
            started_at=started_at,
        )
        leave_report(output)


def data_request(
    request: WorkloadRequest, data: str | None, *, split: str | None, limit: int | None, field: list[str] | None,
    images: str | None, task: str | None,
) -> EvalRequest | None:  # fmt: skip
    """The same model, to be tried on real data, where -d names some."""
    if data is None:
        if any(value is not None for value in (split, limit, field, images, task)):
            raise RequestError("--split, --limit, --map, --images and --task go with -d DATA")
        return None
    from brim.data.open import parse_mapping
    from brim.evaluation.request import EvalRequest

    if request.mode == "train":
        raise RequestError("--mode train: a search on data runs a task, which does not train; leave -d or --mode out")
    return EvalRequest(
        model=request.model,
        data=data,
        split=split,
        limit=limit,
        mapping=parse_mapping(field or []),
        images=images,
        task=task,
        knobs=request.knobs,
        device=request.device,
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        weights="none",
    )


def _search(
    request: WorkloadRequest, evaluation: EvalRequest | None, settings: SearchSettings, *, isolate: bool, quiet: bool
) -> tuple[Plan, dict[str, Any]]:
    from brim.cli.probe_table import ProbeTable
    from brim.memory.weights import load_failure
    from brim.ranks.world import current_world
    from brim.searching.find import find_with

    console = error_console() if quiet else output_console()
    hidden = current_world().rank > 0 or (quiet and not console.is_terminal)
    table = ProbeTable(console, quiet=hidden)
    prober: Prober | None = None
    try:
        prober = _prober(request, evaluation, settings, isolate=isolate)
        return find_with(prober, settings, listener=table), prober.context.environment
    except (BrimError, KeyboardInterrupt):
        raise
    except Exception as error:
        what = "building the workload" if prober is None else prober.stage
        full = load_failure(error, None, what=f"{request.model}: outside of any batch")
        if full is not None:
            raise full from error
        raise RequestError(f"{request.model}: {what} raised {type(error).__name__}: {error}") from error
    finally:
        table.close()


def _prober(
    request: WorkloadRequest, evaluation: EvalRequest | None, settings: SearchSettings, *, isolate: bool
) -> Prober:
    from brim.models.build import build_workload
    from brim.searching.find import probe_settings
    from brim.searching.isolate import IsolatedProber
    from brim.searching.probe import DeviceProber

    if isolate:
        factory = (
            "brim.models.build:build_from_json" if evaluation is None else "brim.evaluation.workload:build_from_json"
        )
        asked = request if evaluation is None else evaluation
        return IsolatedProber(factory, asked.to_json(), probe_settings(settings))
    if evaluation is not None:
        from brim.evaluation.subject import open_subject
        from brim.evaluation.workload import DataWorkload

        on_data = DataWorkload(open_subject(evaluation), evaluation)
        if request.mode is not None and request.mode != on_data.mode:
            raise RequestError(
                f"--mode {request.mode}: the task {on_data.task.name} is a {on_data.mode}; leave --mode out"
            )
        return DeviceProber(on_data, probe_settings(settings), preserve_state=False)
    workload, _ = build_workload(request)
    return DeviceProber(workload, probe_settings(settings), preserve_state=False)  # nothing outlives the command


def _show(plan: Plan, *, json_output: bool) -> None:
    from brim.cli.probe_table import plan_line
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    if json_output:
        print_document(plan.to_json())
        return
    console = output_console()
    console.print(plan_line(plan), markup=False, highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
