"""`brim forecast` and `brim.forecast`: peak memory and batch size for named cards, before any GPU is touched."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from brim.errors import BrimError, RequestError
from brim.evaluation.setup import open_setup
from brim.evaluation.workload import DataWorkload
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.forecasting.gpus import Gpu, find_gpu, gpu_of_memory
from brim.forecasting.shape_tensor import without_initialisation
from brim.forecasting.table import BatchTable, batch_size_table
from brim.models.build import build_workload, resolve_model
from brim.planning.find import own_workload
from brim.records import FORECAST_SCHEMA, Forecast, Mode
from brim.settings.caller import named
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import ForecastSettings, WorkloadRequest
from brim.workloads.base import Workload

__all__ = ["CardForecast", "ForecastResult", "forecast", "gpu_document", "language_model_table"]

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_PER_SIZE = ("batch_size", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "breakdown", "fits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardForecast:
    """What a card has room for: one forecast for each size that was asked for or tried."""

    gpu: Gpu
    forecasts: tuple[Forecast, ...]
    batch_size_max: int  # 0: nothing fits
    margin: float
    document: Mapping[str, Any]  # as `--json` prints it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastResult:
    """A forecast for every card, in the order asked for."""

    cards: tuple[CardForecast, ...]
    notes: tuple[str, ...] = ()

    @property
    def batch_size_max(self) -> int:
        """The largest batch size that fits the first card."""
        return self.cards[0].batch_size_max

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """The forecasts for the first card."""
        return self.cards[0].forecasts

    @property
    def document(self) -> dict[str, Any]:
        """As `brim forecast --json` prints it."""
        documents = [dict(card.document) for card in self.cards]
        return documents[0] if len(documents) == 1 else {"schema": FORECAST_SCHEMA, "forecasts": documents}


def forecast(settings: ForecastSettings, *, note: Callable[[str], None] | None = None) -> ForecastResult:
    """A forecast for each card; `note` is called at once with the card that is assumed where none is named."""
    request = settings.workload
    evaluation = None if request is None else settings.on_data.request(request)
    cards = [find_gpu(name) for name in dict.fromkeys(settings.gpu)]  # before anything is loaded
    cards += [gpu_of_memory(settings.memory)] if settings.memory is not None else []
    notes: tuple[str, ...] = ()
    if not cards:
        cards = [choose_gpu(None, None)]
        notes = (f"no {named('gpu')} given; this is for {cards[0].name}",)
        if note is not None:
            note(notes[0])
    subject = "the step" if request is None else request.model
    try:
        workload = _workload(settings, evaluation)
        traced = TracedWorkload(workload)
        forecasters = [
            Forecaster(traced, card, margin=settings.margin, largest=settings.max_batch_size) for card in cards
        ]
        found = tuple(_card_forecast(settings, workload, forecaster) for forecaster in forecasters)
    except (BrimError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RequestError(f"{subject}: the step raised {type(error).__name__}: {error}") from error
    if all(card.batch_size_max == 0 for card in found):
        raise forecasters[0].does_not_fit()
    return ForecastResult(cards=found, notes=notes)


def language_model_table(progress: Callable[[str], None] | None = None) -> BatchTable:
    """Compute a table of batch sizes by card memory and language model size."""
    return (
        batch_size_table(_language_model) if progress is None else batch_size_table(_language_model, progress=progress)
    )


def _workload(settings: ForecastSettings, evaluation: EvalRequest | None) -> Workload:
    if settings.own is not None:
        return own_workload(settings.own)
    assert settings.workload is not None
    return _build(settings.workload) if evaluation is None else _build_on_data(evaluation)


def _build(request: WorkloadRequest) -> Workload:
    """The workload, of whose weights only the shapes are real; traced, never run: nothing is put on a GPU."""
    request = dataclasses.replace(request, device="cpu")
    with tempfile.TemporaryDirectory() as folder, without_initialisation():
        try:
            workload, notes = build_workload(_without_weights(request, Path(folder)))
        except RequestError as error:
            named = request.model.removeprefix("hf:")
            raise RequestError(str(error).replace(folder, named)) from error  # not by the folder that stands in for it
    workload.notes = tuple(note for note in notes if not note.startswith("random weights"))
    return workload


def _build_on_data(evaluation: EvalRequest) -> Workload:
    """A task on the data's costliest sample, as `brim find -d` searches on it."""
    evaluation = dataclasses.replace(evaluation, device="cpu")
    with without_initialisation():
        return DataWorkload(open_setup(evaluation), evaluation)


def _without_weights(request: WorkloadRequest, folder: Path) -> WorkloadRequest:
    """The same request; a transformers folder that holds weights is read without them, so none are loaded."""
    name = resolve_model(request.model)
    place = Path(name.name).expanduser()
    if name.source != "hf" or not (place / "config.json").is_file():
        return request
    for file in place.iterdir():
        if file.suffix not in WEIGHT_SUFFIXES:
            (folder / file.name).symlink_to(file.resolve())
    return dataclasses.replace(request, model=f"hf:{folder}")


def _card_forecast(settings: ForecastSettings, workload: Workload, forecaster: Forecaster) -> CardForecast:
    size = settings.batch_size
    if size is not None:
        forecaster.model(size)  # traces this very size
    largest = forecaster.largest(power_of_two=settings.power_of_two, multiple_of=settings.multiple_of)
    sizes = forecaster.sizes(largest) if size is None else [size]
    forecasts = tuple(forecaster.at(each, largest=largest) for each in sizes)
    return CardForecast(
        gpu=forecaster.gpu,
        forecasts=forecasts,
        batch_size_max=largest,
        margin=forecaster.margin,
        document=_document(settings, workload, forecaster, forecasts),
    )


def _document(
    settings: ForecastSettings, workload: Workload, forecaster: Forecaster, forecasts: tuple[Forecast, ...]
) -> dict[str, Any]:
    request = settings.workload
    subject = {
        "model": None if request is None else request.model,
        "mode": workload.mode,
        "knobs": {} if request is None else dict(request.knobs),
        "max_batch_size": forecaster.largest_allowed,
    }
    card = gpu_document(forecaster.gpu)
    shared = forecasts[-1].to_json()
    if settings.batch_size is not None:
        return {"schema": shared.pop("schema"), **subject, **shared, "gpu": card, "margin": forecaster.margin}
    return {
        "schema": shared["schema"],
        **subject,
        **{key: value for key, value in shared.items() if key not in ("schema", *_PER_SIZE)},
        "gpu": card,
        "margin": forecaster.margin,
        "sizes": [{key: value for key, value in one.to_json().items() if key in _PER_SIZE} for one in forecasts],
    }


def gpu_document(card: Gpu) -> dict[str, Any]:
    """A card as plain JSON values."""
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


def _language_model(config: Mapping[str, Any], mode: Mode, knobs: Mapping[str, int]) -> Workload:
    """A language model of this shape in half precision; its weights are never filled."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        return _build(WorkloadRequest(model=f"hf:{folder}", mode=mode, knobs=knobs, device="cpu", dtype="bfloat16"))
