"""`brim profile`: accuracy, speed and memory over the values of a knob."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.evaluation.request import EvalRequest
    from brim.profiling.request import ProfileRequest
    from brim.profiling.run import ProfileResult

__all__ = ["profile", "run_profile"]

SOME_FAILED = 1
_POINTS, _CHOICE = "Points", "Recommendation"


def _flag(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


KnobLists = Annotated[
    list[str] | None,
    _flag("--knob", text="The knob to profile: NAME for its whole range, NAME=2-13 or NAME=8,16; repeatable.",
          panel=_POINTS, metavar="NAME[=VALUES]"),
]  # fmt: skip
Values = Annotated[
    str | None, _flag("--values", text="With one --knob NAME: 2-13, 2-13:3 or 2,4,8.", panel=_POINTS, metavar="LIST")
]
StartFrom = Annotated[str | None, _flag("--start-from", text="Drop smaller values.", panel=_POINTS, metavar="VALUE")]
Order = Annotated[
    str, _flag("--order", text="given, ascending or descending (the costliest first).", panel=_POINTS, metavar="ORDER")
]
Pairing = Annotated[
    str, _flag("--pairing", text="Several knobs: cross (all combinations) or zip (one to one).", panel=_POINTS,
               metavar="cross|zip"),
]  # fmt: skip
Sample = Annotated[
    str | None,
    _flag("--sample", text="Only some combinations: stratified, lhs or boundary.", panel=_POINTS, metavar="HOW"),
]
NumPoints = Annotated[int | None, _flag("--num-points", text="With --sample: how many.", panel=_POINTS, metavar="N")]
BatchSizeFor = Annotated[
    list[str] | None,
    _flag("--batch-size-for", text="One point's size by hand: 13=24, or max_crops=13,max_new_tokens=8=24.",
          panel="Batch size", metavar="POINT=N"),
]  # fmt: skip
InitialScale = Annotated[
    str | None,
    _flag("--initial-scale", text="With -b N: the first guess where nothing is known (4=1,8=0.75,12=0.5,0.4 of N).",
          panel="Batch size", metavar="STEPS"),
]  # fmt: skip
Within = Annotated[
    float, _flag("--within", text="Recommend the cheapest this close to the best accuracy.", panel=_CHOICE,
                 metavar="FRACTION"),
]  # fmt: skip
TargetLatency = Annotated[
    float | None,
    _flag("--target-latency-ms", text="Also the cheapest that answers one sample in this time.", panel=_CHOICE,
          metavar="MS"),
]  # fmt: skip
TargetMemory = Annotated[
    str | None,
    _flag("--target-memory", text="Also the cheapest that stays below this peak.", panel=_CHOICE, metavar="SIZE"),
]
LatencySamples = Annotated[
    int,
    _flag("--latency-samples", text="Samples timed alone at each point; 0 for none, 100 for a P99.", panel=_CHOICE,
          metavar="N"),
]  # fmt: skip
ExplainSpeed = Annotated[
    bool,
    _flag("--explain-speed", text="Instead: switch off each thing that makes it fast in turn, and say what it brings."),
]


def profile(
    model: options.ModelArgument = None,
    model_flag: options.ModelFlag = None,
    data: options.Data = None,
    knob: KnobLists = None,
    values: Values = None,
    start_from: StartFrom = None,
    order: Order = "given",
    pairing: Pairing = "cross",
    sample: Sample = None,
    num_points: NumPoints = None,
    split: options.Split = None,
    limit: options.Limit = None,
    field: options.Fields = None,
    images: options.Images = None,
    skip_bad: options.SkipBad = False,
    task: options.Task = None,
    metrics: options.Metrics = None,
    plugin: options.Plugins = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    stop: options.StopStrings = None,
    chat: options.Chat = None,
    system: options.SystemPrompt = None,
    weights: options.Weights = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    batch_size: options.BatchSize = "auto",
    batch_size_for: BatchSizeFor = None,
    initial_scale: InitialScale = None,
    cost_cap: options.CostCap = None,
    no_auto_batch_size: options.NoAutoBatchSize = False,
    fail_on_oom: options.FailOnOom = False,
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = None,
    no_cache: options.NoCache = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    num_workers: options.NumWorkers = None,
    pin_memory: options.PinMemory = True,
    prefetch_factor: options.PrefetchFactor = 4,
    within: Within = 0.01,
    target_latency_ms: TargetLatency = None,
    target_memory: TargetMemory = None,
    latency_samples: LatencySamples = 20,
    explain_speed: ExplainSpeed = False,
    resume: options.Resume = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Evaluate a model at every value of a knob: accuracy, speed, memory and latency, and which value to take.

    Example: brim profile -m ./my-vlm -d vqa/ --knob max_crops --values 2-13 -b 64 -o runs/crops
    """
    from brim.cli.evaluate import given_data, one_model
    from brim.data.open import parse_mapping
    from brim.evaluation.request import EvalRequest
    from brim.profiling.request import SEED_SCALE, ProfileRequest, parse_axes, parse_scale

    if resume and output is None:
        raise RequestError("--resume: say which run with -o DIR")
    axes = parse_axes(knob or [], values)
    if max_tokens is not None and "max_new_tokens" in axes:
        raise RequestError("--max-tokens and --knob max_new_tokens say the same thing; keep one")
    base = EvalRequest(
        model=one_model(model, model_flag),
        data=given_data(data),
        split=split,
        limit=limit,
        mapping=parse_mapping(field or []),
        images=images,
        skip_bad=skip_bad,
        task=task,
        metrics=tuple(name for name in (metrics or "").split(",") if name.strip()),
        plugins=tuple(plugin or ()),
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        chat=chat,
        system=system,
        weights=weights,
        trust_remote_code=trust_remote_code,
        batch_size=options.parse_batch_size(batch_size),
        cost_cap=cost_cap,
        fixed=no_auto_batch_size,
        fail_on_oom=fail_on_oom,
        memory_limit=memory_limit,
        margin=margin,
        use_cache=not no_cache,
        device=device,
        dtype=dtype,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
    )
    if explain_speed:
        _explain(base, axes, json_output=json_output)
        return
    request = ProfileRequest(
        base=base,
        axes=axes,
        pairing=pairing,  # type: ignore[arg-type]  # checked where points are made
        sample=sample,  # type: ignore[arg-type]
        num_points=num_points,
        start_from=start_from,
        order=order,  # type: ignore[arg-type]  # checked by the request
        initial_scale=SEED_SCALE if initial_scale is None else parse_scale(initial_scale),
        batch_size_for=tuple(parse_size_for(text) for text in batch_size_for or ()),
        latency_samples=latency_samples,
        within=within,
        target_latency_ms=target_latency_ms,
        target_memory=target_memory,
        resume=resume,
    )
    run_profile(request, output, json_output=json_output)


def run_profile(request: ProfileRequest, output: Path | None, *, json_output: bool) -> ProfileResult:
    """Profile with a progress display, write the report, print the table; some points failed: exit code 1."""
    from brim.cli.profile_progress import ProfileProgress, print_profile
    from brim.profiling.run import profile as run
    from brim.ranks.world import current_world

    rank = current_world().rank
    with ProfileProgress(error_console(), quiet=rank > 0, lines=not json_output) as progress:
        result = run(request, output=output, listener=progress)
    if rank > 0:
        return result
    report = leave_report(result.folder)
    if json_output:
        print_document(result.document)
    else:
        print_profile(output_console(), result, report)
    if any(entry["state"] == "failed" or entry["num_failed"] for entry in result.entries):
        raise typer.Exit(SOME_FAILED)
    return result


def parse_size_for(text: str) -> tuple[dict[str, str], int]:
    """`13=24`, or `max_crops=13,max_new_tokens=8=24`, as the values of a point and its size."""
    named, _, size = text.rpartition("=")
    if not named or not size.isdecimal() or int(size) < 1:
        raise RequestError(f"--batch-size-for {text}: write VALUE=N, such as 13=24")
    point: dict[str, str] = {}
    for part in named.split(","):
        name, equals, value = part.rpartition("=")
        point[name.strip() if equals else ""] = value.strip()
    return point, int(size)


def _explain(base: EvalRequest, axes: dict[str, tuple[str, ...] | None], *, json_output: bool) -> None:
    import dataclasses

    from brim.cli.profile_progress import ProfileProgress, speed_table
    from brim.profiling.explain_speed import explain_speed

    for name, values in axes.items():
        if values is None or len(values) != 1:
            raise RequestError(f"--explain-speed: give one value of {name}, such as --knob {name}=12")
    knobs = {name: values[0] for name, values in axes.items() if values is not None}
    with ProfileProgress(error_console(), lines=not json_output) as progress:
        rows = explain_speed(dataclasses.replace(base, knobs=knobs), listener=progress)
    if json_output:
        print_document({"schema": "brim.explain-speed/1", "rows": [row.to_json() for row in rows]})
        return
    output_console().print(speed_table(rows))
