"""`brim forecast` and `brim.forecast`: peak memory and batch size for named cards, before any GPU is touched.

Of one workload, or of those in a file; kept, compared with what was kept, and recorded, where that is asked for.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import BrimError, DoesNotFitError, RequestError, first_line
from brim.evaluation.setup import open_setup
from brim.evaluation.workload import DataWorkload
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.forecasting.gpus import Gpu, find_gpu, gpu_of_memory
from brim.forecasting.shape_tensor import without_initialisation
from brim.forecasting.table import BatchTable, batch_size_table
from brim.models.build import build_workload, resolve_model
from brim.planning.find import own_workload
from brim.planning.forecast_base import WorkloadDocument, base_document, base_of, read_base, save_base, versions
from brim.planning.forecast_check import ForecastCheck, compare, judge
from brim.planning.forecast_markdown import markdown_text
from brim.records import FORECAST_SCHEMA, Forecast, Mode
from brim.settings.caller import given, named
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import WorkloadRequest
from brim.settings.forecast_file import NamedForecast, read_forecast_file
from brim.settings.forecast_settings import Allowance, ForecastSettings, read_allowance
from brim.storage.files import write_atomic
from brim.storage.run_folder import check_folder, check_no_other_run, write_run
from brim.workloads.base import Workload

__all__ = ["CardForecast", "ForecastResult", "WorkloadForecast", "forecast", "gpu_document", "language_model_table"]

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_PER_SIZE = (
    "batch_size", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "breakdown", "fits", "by_module",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardForecast:
    """What a card has room for: one forecast for each size that was asked for or tried."""

    gpu: Gpu
    forecasts: tuple[Forecast, ...]
    batch_size_max: int  # 0: nothing fits
    margin: float
    document: Mapping[str, Any]  # as `--json` prints it


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadForecast:
    """One workload and its cards; none, and the error, where it could not be forecast."""

    name: str
    cards: tuple[CardForecast, ...] = ()
    error: str | None = None
    allow: Allowance | None = None  # its own, of a file

    def as_document(self, *, named: bool) -> WorkloadDocument:
        """As plain JSON values."""
        forecasts = [dict(card.document) for card in self.cards]
        return WorkloadDocument(name=self.name, forecasts=forecasts, error=self.error, allow=self.allow, named=named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastResult:
    """A forecast for every card, in the order asked for; of a file, for every workload of it."""

    workloads: tuple[WorkloadForecast, ...]
    notes: tuple[str, ...] = ()
    check: ForecastCheck | None = None  # with a file, or a base to compare with
    of_file: bool = False

    @property
    def cards(self) -> tuple[CardForecast, ...]:
        """The forecasts of all workloads, one for each card."""
        return tuple(card for workload in self.workloads for card in workload.cards)

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
        check = {} if self.check is None else {"check": self.check.document}
        if self.of_file:
            return {**base_document(self._documents()), **check}
        documents = [dict(card.document) for card in self.cards]
        one = documents[0] if len(documents) == 1 else {"schema": FORECAST_SCHEMA, "forecasts": documents}
        return {**one, **check}

    def compare(
        self, base: str | os.PathLike[str] | ForecastResult | Mapping[str, Any], *, allow: str | int = 0
    ) -> ForecastCheck:
        """Hold this forecast against another one.

        Args:
            base: A file of `save`, another result, or a document as `--json` prints it.
            allow: How much a peak may grow: `"3%"`, `"200MiB"`, or bytes.

        Returns:
            `ok`, and `lines` with a verdict for each workload, its sizes and the modules that changed.

        Raises:
            RequestError: The base is no forecast, or has nothing in common with this one.
        """
        try:
            allowed = read_allowance(allow)
        except ValueError as error:
            raise RequestError(f"{given('allow', allow)}: {error}") from None
        if isinstance(base, ForecastResult):
            found = base_of(base_document(base._documents()), "the other forecast")
        elif isinstance(base, Mapping):
            found = base_of(base, "the document")
        else:
            found = read_base(Path(base))
        return compare(found, self._documents(), allowed)

    def _documents(self) -> list[WorkloadDocument]:
        return [workload.as_document(named=self.of_file) for workload in self.workloads]


def forecast(settings: ForecastSettings, *, note: Callable[[str], None] | None = None) -> ForecastResult:
    """A forecast for each card; `note` is called at once with the card that is assumed where none is named."""
    started_at = datetime.datetime.now(datetime.UTC)
    if settings.output is not None:
        check_folder(settings.output)
        check_no_other_run(settings.output, "forecast")
    base = None if settings.against is None else read_base(settings.against)  # before anything is traced
    result = _of_file(settings, note) if settings.file is not None else _of_one(settings, note)
    documents = result._documents()
    if base is not None:
        result = dataclasses.replace(result, check=compare(base, documents, settings.allow))
    elif result.of_file:
        result = dataclasses.replace(result, check=judge(documents))
    if settings.markdown is not None:
        write_atomic(settings.markdown, markdown_text(documents, result.check))
    if settings.output is not None:
        _record(settings, result, started_at)
    if settings.save is not None:
        result = _saved(result, settings.save, note)
    return result


def _saved(result: ForecastResult, file: Path, note: Callable[[str], None] | None) -> ForecastResult:
    """The forecast is kept if there is one of every workload: a base without some would no longer check them."""
    failed = [workload.name for workload in result.workloads if workload.error is not None]
    if not failed:
        save_base(file, result._documents())
        return result
    notes = (f"{file} is not written, since there is no forecast of {', '.join(failed)}",)
    _tell(notes, note)
    return dataclasses.replace(result, notes=(*result.notes, *notes))


def _of_one(settings: ForecastSettings, note: Callable[[str], None] | None) -> ForecastResult:
    cards, notes = _cards(settings)
    _tell(notes, note)
    name = "step" if settings.workload is None else settings.workload.model
    workload = WorkloadForecast(name=name, cards=_forecast(settings, cards, settings.depth))
    return ForecastResult(workloads=(workload,), notes=notes)


def _of_file(settings: ForecastSettings, note: Callable[[str], None] | None) -> ForecastResult:
    """Every workload of the file; one that cannot be forecast does not stop the others."""
    assert settings.file is not None
    asked = []
    for workload in read_forecast_file(settings.file):
        with workload.named():
            asked.append((workload, *_cards(workload.settings)))  # before anything is loaded
    notes = tuple(f"{workload.name}: {line}" for workload, _, lines in asked for line in lines)
    _tell(notes, note)
    found = [_of_workload(workload, cards, settings.depth) for workload, cards, _ in asked]
    return ForecastResult(workloads=tuple(found), notes=notes, of_file=True)


def _of_workload(workload: NamedForecast, cards: Sequence[Gpu], depth: int | None) -> WorkloadForecast:
    found: tuple[CardForecast, ...] = ()
    problem: str | None = None
    try:
        with workload.named():
            found = _forecast(workload.settings, cards, depth)
    except DoesNotFitError as error:
        problem = first_line(error)
    except RequestError as error:
        problem = str(error)
    return WorkloadForecast(name=workload.name, cards=found, error=problem, allow=workload.allow)


def _tell(notes: Sequence[str], note: Callable[[str], None] | None) -> None:
    for line in notes:
        if note is not None:
            note(line)


def _cards(settings: ForecastSettings) -> tuple[list[Gpu], tuple[str, ...]]:
    """The cards that are meant, and a note where none is named."""
    cards = [find_gpu(name) for name in dict.fromkeys(settings.gpu)]
    cards += [gpu_of_memory(settings.memory)] if settings.memory is not None else []
    if cards:
        return cards, ()
    assumed = choose_gpu(None, None)
    notes = (f"no {named('gpu')} given; this is for {assumed.name}",)
    return [assumed], notes


def _forecast(settings: ForecastSettings, cards: Sequence[Gpu], depth: int | None) -> tuple[CardForecast, ...]:
    request = settings.workload
    evaluation = None if request is None else settings.on_data.request(request)
    subject = "the step" if request is None else request.model
    try:
        workload = _workload(settings, evaluation)
        traced = TracedWorkload(workload)
        forecasters = [
            Forecaster(
                traced,
                card,
                margin=settings.margin,
                largest=settings.max_batch_size,
                memory_limit_bytes=settings.memory_limit_bytes,
            )
            for card in cards
        ]
        found = tuple(_card_forecast(settings, workload, forecaster, depth) for forecaster in forecasters)
    except (BrimError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RequestError(f"{subject}: the step raised {type(error).__name__}: {error}") from error
    if all(card.batch_size_max == 0 for card in found):
        raise forecasters[0].does_not_fit()
    return found


def _record(settings: ForecastSettings, result: ForecastResult, started_at: datetime.datetime) -> None:
    """`run.json`, of which `brim report` makes a page."""
    assert settings.output is not None
    request = {} if settings.workload is None else settings.workload.to_json()
    source = {"file": None if settings.file is None else str(settings.file)}
    write_run(
        settings.output,
        kind="forecast",
        request={**request, **source, "data": settings.on_data.data, "command": "forecast"},
        environment=versions(),
        plan=None,
        summary={
            "workloads": [one.to_json() for one in result._documents()],
            "check": None if result.check is None else result.check.document,
            "notes": list(result.notes),
        },
        started_at=started_at,
    )


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


def _card_forecast(
    settings: ForecastSettings, workload: Workload, forecaster: Forecaster, depth: int | None
) -> CardForecast:
    size = settings.batch_size
    if size is not None:
        forecaster.model(size)  # traces this very size
    largest = forecaster.largest(power_of_two=settings.power_of_two, multiple_of=settings.multiple_of)
    sizes = forecaster.sizes(largest) if size is None else [size]
    forecasts = tuple(forecaster.at(each, largest=largest, depth=depth) for each in sizes)
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
