"""`brim forecast`: peak memory and batch size for a named card, before any GPU is touched."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.find import data_request
from brim.errors import BrimError, RequestError
from brim.settings.search_settings import DEFAULT_MAX_SIZE

if TYPE_CHECKING:
    from brim.evaluation.request import EvalRequest
    from brim.forecasting.forecast import Forecaster
    from brim.forecasting.gpus import Gpu
    from brim.models.build import WorkloadRequest
    from brim.records import Mode
    from brim.workloads.base import Workload

__all__ = ["forecast"]

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def forecast(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As in brim find; left out with --table.", show_default=False),
    ] = None,
    data: options.Data = None,
    split: options.Split = None,
    limit: options.Limit = None,
    field: options.Fields = None,
    images: options.Images = None,
    task: options.Task = None,
    mode: options.Mode = None,
    knob: options.Knobs = None,
    max_tokens: options.MaxTokens = None,
    gpu: options.GpuNames = None,
    memory: options.CardMemory = None,
    batch_size: Annotated[
        str,
        typer.Option("-b", "--batch-size", help="auto: sizes up to the largest that fits; or one size N.",
                     rich_help_panel="Batch size", metavar="auto|N"),
    ] = "auto",
    margin: Annotated[
        float | None,
        typer.Option("--margin", help="Keep this fraction of the card free (0.05).", rich_help_panel="Batch size",
                     metavar="FRACTION"),
    ] = None,
    multiple_of: options.MultipleOf = 1,
    power_of_two: options.PowerOfTwo = False,
    max_batch_size: options.MaxBatchSize = None,
    dtype: options.Dtype = "auto",
    optimizer: options.Optimizer = "adamw",
    gradient_checkpointing: options.GradientCheckpointing = False,
    trust_remote_code: options.TrustRemoteCode = False,
    table: Annotated[
        bool, typer.Option("--table", help="Batch sizes by card memory and size of language model, computed.")
    ] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the cards that are known, and stop.")] = False,
    plot: options.PlotFile = None,
    json_output: options.JsonOutput = False,
) -> None:  # fmt: skip
    """Forecast peak memory and the largest batch size for a card, without a GPU.

    Example: brim forecast swin3d_t --mode train --knob frames=16 --dtype bfloat16 --gpu a100-80gb
    """
    if gpus:
        _list_gpus(json_output=json_output)
        return
    if table:
        if model is not None:
            raise RequestError(f"--table computes its own models; leave {model} out, or leave --table out")
        _show_batch_table(json_output=json_output)
        return
    if model is None:
        raise RequestError("MODEL is missing: give a model, as to brim find (or --table, or --gpus)")
    size = options.parse_batch_size(batch_size)
    if max_batch_size is not None and max_batch_size < 1:
        raise RequestError(f"--max-batch-size {max_batch_size}: give a whole number from 1")
    _check_plot(plot)
    knobs = options.collect_knobs(knob, max_tokens)
    from brim.models.build import WorkloadRequest

    request = WorkloadRequest(
        model=model,
        mode=mode,  # type: ignore[arg-type]  # checked when the workload is built
        knobs=knobs,
        device="cpu",  # traced, never run: nothing is put on a GPU
        dtype=dtype,
        optimizer=optimizer,
        gradient_checkpointing=gradient_checkpointing,
        trust_remote_code=trust_remote_code,
    )
    evaluation = data_request(request, data, split=split, limit=limit, field=field, images=images, task=task)
    limits = {"margin": margin, "largest": max_batch_size or DEFAULT_MAX_SIZE}
    grid = {"power_of_two": power_of_two, "multiple_of": multiple_of}
    documents = _forecast(request, evaluation, _cards(gpu, memory), size, limits, grid)
    _show(documents, json_output=json_output)
    if plot is not None:
        _draw(documents, plot)


def _check_plot(plot: Path | None) -> None:
    """Before anything is traced."""
    if plot is not None and not plot.absolute().parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
    if plot is not None and plot.is_dir():
        raise RequestError(f"--plot {plot}: it is a folder; give a file, such as {plot / 'forecast.html'}")


def _cards(names: list[str] | None, memory: str | None) -> list[Gpu]:
    """The cards asked for, checked before anything is loaded; none: to be chosen later."""
    from brim.forecasting.gpus import find_gpu, gpu_of_memory

    cards = [find_gpu(name) for name in dict.fromkeys(names or [])]
    return [*cards, gpu_of_memory(memory)] if memory is not None else cards


def _forecast(
    request: WorkloadRequest,
    evaluation: EvalRequest | None,
    cards: list[Gpu],
    size: int | None,
    limits: dict[str, Any],
    grid: dict[str, Any],
) -> list[dict[str, Any]]:
    """A document for each card."""
    from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu

    if not cards:
        cards = [choose_gpu(None, None)]
        error_console().print(f"note: no --gpu given; this is for {cards[0].name}", markup=False, highlight=False)
    try:
        workload = _build(request) if evaluation is None else _build_on_data(evaluation)
        traced = TracedWorkload(workload)
        forecasters = [Forecaster(traced, card, **limits) for card in cards]
        documents = [_document(request, workload, forecaster, size, grid) for forecaster in forecasters]
    except (BrimError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RequestError(f"{request.model}: the step raised {type(error).__name__}: {error}") from error
    if all(document["batch_size_max"] == 0 for document in documents):
        raise forecasters[0].does_not_fit()
    return documents


def _build(request: WorkloadRequest) -> Workload:
    """The workload, of whose weights only the shapes are real."""
    from brim.forecasting.skeleton import without_initialisation
    from brim.models.build import build_workload

    with tempfile.TemporaryDirectory() as folder, without_initialisation():
        try:
            workload, notes = build_workload(_without_weights(request, Path(folder)))
        except RequestError as error:
            named = request.model.removeprefix("hf:")
            raise RequestError(str(error).replace(folder, named)) from error  # not by the folder that stands in for it
    workload.notes = tuple(note for note in notes if not note.startswith("random weights"))
    return workload


def _build_on_data(evaluation: EvalRequest) -> Workload:
    """A task on the data's dearest sample, as `brim find -d` searches on it."""
    from brim.evaluation.subject import open_subject
    from brim.evaluation.workload import DataWorkload
    from brim.forecasting.skeleton import without_initialisation

    with without_initialisation():
        return DataWorkload(open_subject(evaluation), evaluation)


def _without_weights(request: WorkloadRequest, folder: Path) -> WorkloadRequest:
    """The same request; a transformers folder that holds weights is looked at without them, so none are loaded."""
    from brim.models.build import resolve_model

    name = resolve_model(request.model)
    place = Path(name.name).expanduser()
    if name.source != "hf" or not (place / "config.json").is_file():
        return request
    for file in place.iterdir():
        if file.suffix not in WEIGHT_SUFFIXES:
            (folder / file.name).symlink_to(file.resolve())
    return dataclasses.replace(request, model=f"hf:{folder}")


def _document(
    request: WorkloadRequest, workload: Workload, forecaster: Forecaster, size: int | None, grid: dict[str, Any]
) -> dict[str, Any]:
    if size is not None:
        forecaster.model(size)  # traces this very size
    largest = forecaster.largest(**grid)
    subject = {
        "model": request.model,
        "mode": workload.mode,
        "knobs": dict(request.knobs),
        "max_batch_size": forecaster.largest_allowed,
    }
    card = _card_document(forecaster.gpu)
    if size is not None:
        document = {**forecaster.at(size, largest=largest).to_json(), "gpu": card}
        return {"schema": document.pop("schema"), **subject, **document, "margin": forecaster.margin}
    forecasts = [forecaster.at(each, largest=largest) for each in forecaster.sizes(largest)]
    shared = forecasts[-1].to_json()
    per_size = ("batch_size", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "breakdown", "fits")
    return {
        "schema": shared["schema"],
        **subject,
        **{key: value for key, value in shared.items() if key not in ("schema", *per_size)},
        "gpu": card,
        "margin": forecaster.margin,
        "sizes": [{key: value for key, value in one.to_json().items() if key in per_size} for one in forecasts],
    }


def _card_document(card: Gpu) -> dict[str, Any]:
    return {
        "key": card.key,
        "name": card.name,
        "kind": card.kind,
        "memory_bytes": card.memory_bytes,
        "context_bytes": card.context_bytes,
        "compute_capability": list(card.compute_capability),
        "memory_source": card.memory_source,
        "context_source": card.context_source,
    }


def _show(documents: list[dict[str, Any]], *, json_output: bool) -> None:
    if json_output:
        from brim.records import FORECAST_SCHEMA

        whole = documents[0] if len(documents) == 1 else {"schema": FORECAST_SCHEMA, "forecasts": documents}
        print_document(whole)
        return
    from brim.cli.forecast_table import print_forecasts

    print_forecasts(output_console(), documents)


def _draw(documents: list[dict[str, Any]], path: Path) -> None:
    from brim.cli.forecast_page import forecast_page
    from brim.reporting.page import render
    from brim.storage.files import write_atomic

    write_atomic(path, render(forecast_page(documents)))
    error_console().print(f"drawn in {path}", markup=False, highlight=False)


def _list_gpus(*, json_output: bool) -> None:
    from brim.cli.forecast_table import print_gpus
    from brim.forecasting.gpus import catalogue

    if json_output:
        document = {"schema": "brim.gpus/1", "gpus": [_card_document(card) for card in catalogue()]}
        print_document(document)
        return
    print_gpus(output_console(), catalogue())


def _show_batch_table(*, json_output: bool) -> None:
    from brim.cli.forecast_table import print_batch_table
    from brim.forecasting.table import batch_size_table

    console = error_console()
    if console.is_terminal:
        with console.status("tracing") as status:
            result = batch_size_table(_language_model, told=lambda what: status.update(f"tracing {what}"))
    else:
        result = batch_size_table(_language_model)
    if json_output:
        print_document(result.to_json())
        return
    print_batch_table(output_console(), result)


def _language_model(config: Mapping[str, Any], mode: Mode, knobs: Mapping[str, int]) -> Workload:
    """A language model of this shape in half precision; its weights are never filled."""
    from brim.models.build import WorkloadRequest

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        return _build(WorkloadRequest(model=f"hf:{folder}", mode=mode, knobs=knobs, device="cpu", dtype="bfloat16"))
