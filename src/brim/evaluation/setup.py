"""What is evaluated: a model on its device, a data set, the task between them and the metrics; and plugin files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.data.base import BadRecord, SampleSet
from brim.data.open import DataRequest, open_data
from brim.errors import RequestError
from brim.generation.settings import GenerationSettings
from brim.memory.devices import device_uuid
from brim.memory.environment import environment_facts
from brim.metrics.base import Metric
from brim.metrics.registry import add_metrics, import_file, parse_metrics
from brim.models.base import LoadedModel, LoadRequest
from brim.models.build import model_knobs, model_savings, resolve_model
from brim.models.load import load_model
from brim.models.placement import resolve_device, resolve_precision
from brim.records import Mode, Unit
from brim.settings.caller import given, pair
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import combined_fingerprint
from brim.tasks.base import Task, TaskSettings
from brim.tasks.registry import add_tasks, make_task

__all__ = ["EvaluationSetup", "SetupFacts", "evaluation_savings", "load_plugins", "open_setup", "read_data"]

_NOT_THE_MODELS = ("max_new_tokens", "dtype")  # knobs that no model is loaded with


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetupFacts:
    """What is evaluated, in plain values: for listeners, for the record, and for other processes."""

    task: str
    unit: Unit
    data: str
    num_samples: int
    fields: Mapping[str, str]
    bad: tuple[BadRecord, ...]
    device: str
    environment: Mapping[str, Any]
    fingerprint: str
    metric: str | None = None  # the first one: a sample's `score` is its
    device_uuid: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSetup:
    """Everything that decides the answers."""

    model: LoadedModel
    data: SampleSet
    task: Task
    metrics: tuple[Metric, ...]
    costs: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    def fingerprint(self) -> str:
        """What a run must share with another to resume it; neither batch size nor metrics belong to it."""
        parts = {"model": self.identity(), "data": self.data.facts, "settings": self.task.identity()}
        return combined_fingerprint(parts)

    def facts(self) -> SetupFacts:
        """The facts for the record and for listeners."""
        return SetupFacts(
            task=self.task.name,
            unit=self.task.unit,
            data=self.data.name,
            num_samples=len(self.data.samples),
            fields=dict(self.data.fields),
            bad=self.data.bad,
            device=str(self.device),
            environment=environment_facts(self.device),
            fingerprint=self.fingerprint(),
            metric=next((metric.name for metric in self.metrics), None),
            device_uuid=device_uuid(self.device),
        )

    def identity(self) -> dict[str, Any]:
        """The model and its precision."""
        return {"model": self.model.name, "files": dict(self.model.identity), "dtype": str(self.model.dtype)}


def open_setup(
    request: EvalRequest, *, data: SampleSet | None = None, load: Callable[[LoadRequest], LoadedModel] = load_model
) -> EvaluationSetup:
    """Read the data, load the model, set the task up. Mistakes that are quick to find are found first.

    Whoever opens several alike gives the data, once it is read, and a `load` that keeps the model.
    """
    settings = _task_settings(request)
    load_plugins(request.plugins)
    metrics = tuple(parse_metrics(request.metrics)) if request.metrics else ()
    if data is None:
        data = read_data(request)
    model = load(
        LoadRequest(
            model=request.model,
            device=resolve_device(request.device),
            dtype=resolve_precision(request.knobs.get("dtype", request.dtype), "forward").weights,
            knobs=_model_knobs(request),
            weights=request.weights,
            trust_remote_code=request.trust_remote_code,
        )
    )
    settings = dataclasses.replace(settings, processor_options=model.processor_options)
    task = make_task(request.task, model, data, settings)
    task.setup()
    costs = tuple(max(task.cost(item), 1) for item in range(len(data.samples)))
    return EvaluationSetup(
        model=model,
        data=data,
        task=task,
        metrics=metrics or tuple(parse_metrics(task.default_metrics)),
        costs=costs,
    )


def evaluation_savings(request: EvalRequest, *, mode: Mode) -> tuple[str, ...]:
    """What would take less memory, by the settings of `brim eval` that the model supports."""
    knobs = model_knobs(request.model, trust_remote_code=request.trust_remote_code)
    own = [knob for knob in knobs if knob.name != "tokens"]  # the data says how long a prompt is
    dtype = str(request.knobs.get("dtype", request.dtype))
    return model_savings(resolve_model(request.model), own, mode=mode, dtype=dtype)


def read_data(request: EvalRequest) -> SampleSet:
    """The data that was asked for; none at all is a `RequestError`."""
    data = open_data(
        DataRequest(
            path=request.data,
            split=request.split,
            limit=request.limit,
            mapping=request.mapping,
            skip_bad=request.skip_bad,
            images=request.images,
            task=request.task if request.task in ("generate", "vqa", "choice", "classify") else None,
        )
    )
    if not data.samples:
        raise RequestError(f"{given('data', request.data)}: it holds no samples")
    return data


def _task_settings(request: EvalRequest) -> TaskSettings:
    new_tokens = request.max_new_tokens or request.knobs.get("max_new_tokens")
    if new_tokens is not None and (not str(new_tokens).isdecimal() or int(new_tokens) < 1):
        raise RequestError(f"{pair('knob', 'max_new_tokens', new_tokens)}: it must be a whole number from 1")
    generation = GenerationSettings(
        max_new_tokens=1,  # the task puts its own number here
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_strings=request.stop,
        graphs=request.graphs,
        own_loop=request.decode_loop,
        pool=request.pool,
        batch_invariant=request.batch_invariant,
    )
    return TaskSettings(
        generation=generation,
        max_new_tokens=None if new_tokens is None else int(new_tokens),
        chat=request.chat,
        system=request.system,
        non_blocking=request.non_blocking,
    )


def _model_knobs(request: EvalRequest) -> dict[str, Any]:
    """The knobs that are the model's own or its processor's; the model that is loaded knows which."""
    return {name: value for name, value in request.knobs.items() if name not in _NOT_THE_MODELS}


def load_plugins(paths: Sequence[str]) -> list[str]:
    """Import the files and add what they define; a file that defines neither task nor metric is a `RequestError`."""
    added: list[str] = []
    for path in paths:
        try:
            module = import_file(path)
            found = [*add_metrics(module), *add_tasks(module)]
        except RequestError as error:
            raise RequestError(f"{given('plugin', path)}: {error}") from error
        if not found:
            raise RequestError(
                f"{given('plugin', path)}: it defines neither a metric nor a task; derive a class from "
                "brim.metrics.base.Metric or brim.tasks.base.Task"
            )
        added += found
    return added
