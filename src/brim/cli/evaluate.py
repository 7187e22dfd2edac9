"""`brim eval`: every sample once, as fast as the card allows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import BrimError, RequestError

if TYPE_CHECKING:
    from brim.evaluation.request import EvalRequest
    from brim.evaluation.run import EvalResult

__all__ = ["evaluate", "given_data", "one_model"]

SOME_FAILED = 1


def evaluate(
    model: options.ModelArgument = None,
    model_flag: options.ModelFlag = None,
    data: options.Data = None,
    split: options.Split = None,
    limit: options.Limit = None,
    field: options.Fields = None,
    images: options.Images = None,
    skip_bad: options.SkipBad = False,
    task: options.Task = None,
    metrics: options.Metrics = None,
    plugin: options.Plugins = None,
    knob: options.Knobs = None,
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
    cost_cap: options.CostCap = None,
    no_auto_batch_size: options.NoAutoBatchSize = False,
    fail_on_oom: options.FailOnOom = False,
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = None,
    offload: options.Offload = None,
    compare_batch: options.CompareBatch = None,
    no_cache: options.NoCache = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    num_workers: options.NumWorkers = None,
    pin_memory: options.PinMemory = True,
    prefetch_factor: options.PrefetchFactor = 4,
    on: options.Launcher = None,
    workers: options.Workers = None,
    gpus_per_worker: options.GpusPerWorker = None,
    fail_fast: options.FailFast = False,
    resume: options.Resume = False,
    retry_failed: options.RetryFailed = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
    save_predictions: options.SavePredictions = False,
    verbose: options.Verbose = False,
) -> None:
    """Evaluate a model on a data set: every sample once, at the batch size the card takes.

    Example: brim eval -m ./my-model -d questions.jsonl --metrics exact_match,rouge -o runs/first
    """
    del save_predictions
    from brim.data.open import parse_mapping
    from brim.evaluation.request import EvalRequest

    if resume and output is None:
        raise RequestError("--resume: say which run with -o DIR")
    request = EvalRequest(
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
        knobs=options.collect_knobs(knob, max_tokens),
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
        offload=offload,
        use_cache=not no_cache,
        device=device,
        dtype=dtype,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        fail_fast=fail_fast,
        resume=resume,
        retry_failed=retry_failed,
    )
    on_cluster = _cluster_settings(on, workers, gpus_per_worker)
    if compare_batch is not None:
        if on_cluster is not None:
            raise RequestError("--compare-batch: sizes are compared on one device; leave --on out")
        _compare(request, compare_batch, json_output=json_output)
        return
    result = _run(request, output, on_cluster=on_cluster, quiet=json_output)
    _show(result, json_output=json_output, verbose=verbose)
    if result.summary.get("num_failed"):
        raise typer.Exit(SOME_FAILED)


def one_model(argument: str | None, flag: str | None) -> str:
    """The model, given alone or with -m, and once."""
    if argument is not None and flag is not None:
        raise RequestError(f"-m {flag} and {argument} both name a model; keep one")
    model = argument if argument is not None else flag
    if model is None:
        raise RequestError("-m/--model is missing: give the model to evaluate, such as -m ./my-model")
    return model


def given_data(data: str | None) -> str:
    """The data, which has no default."""
    if data is None:
        raise RequestError("-d/--data is missing: give the data to evaluate on, such as -d questions.jsonl")
    return data


def _cluster_settings(on: str | None, workers: int | None, gpus_per_worker: float | None) -> dict[str, Any] | None:
    """What `--on ray` takes beside the request; None: this process, or torchrun's, do the work themselves."""
    if on is not None and on != "ray":
        raise RequestError(f"--on {on}: only ray can be asked for; for ranks on this machine use torchrun")
    for flag, value in (("--workers", workers), ("--gpus-per-worker", gpus_per_worker)):
        if value is not None and on is None:
            raise RequestError(f"{flag} {value}: it goes with --on ray; for ranks use torchrun --nproc-per-node")
    return None if on is None else {"workers": workers, "gpus_per_worker": gpus_per_worker}


def _run(request: EvalRequest, output: Any, *, on_cluster: dict[str, Any] | None, quiet: bool) -> EvalResult:
    from brim.cli.evaluate_progress import EvalProgress
    from brim.evaluation.run import evaluate as run_evaluation
    from brim.ranks.world import current_world

    with EvalProgress(error_console(), quiet=current_world().rank > 0, lines=not quiet) as progress:
        try:
            if on_cluster is not None:
                from brim.evaluation.on_ray import evaluate_on_ray

                return evaluate_on_ray(request, output=output, listener=progress, **on_cluster)
            return run_evaluation(request, output=output, listener=progress)
        except (BrimError, KeyboardInterrupt):
            raise
        except Exception as error:
            if request.fail_fast:
                raise RequestError(f"--fail-fast: a sample failed with {type(error).__name__}: {error}") from error
            raise


def _compare(request: EvalRequest, sizes: str, *, json_output: bool) -> None:
    from brim.cli.evaluate_progress import comparison_table
    from brim.evaluation.compare import compare_batch_sizes, parse_sizes
    from brim.ranks.world import current_world

    if current_world().size > 1:
        raise RequestError("--compare-batch: sizes are compared on one device; start it without torchrun")
    rows = compare_batch_sizes(request, parse_sizes(sizes))
    if json_output:
        print_document({"schema": "brim.compare/1", "rows": rows})
        return
    output_console().print(comparison_table(rows))


def _show(result: EvalResult, *, json_output: bool, verbose: bool) -> None:
    from brim.cli.evaluate_progress import print_result
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if json_output:
        document = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
        print_document(document)
        return
    print_result(output_console(), result, examples=3 if verbose else 0)
