"""A process that imports torch, asked by one that does not: devices, names of models, forecasts. Both ends are here.

    with ForecastProcess() as forecaster:
        forecaster.check_model("r3d_18")
        forecaster.forecast(settings, [16, "auto"])

The first question starts it and the end of the block ends it, so that its memory is free when experiments start. Only
the functions that run in the child import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from brim.errors import BrimError, first_line
from brim.running.child_main import Send
from brim.running.child_process import ChildLostError, ChildProcess, child_command
from brim.sweeps.job import with_changes

if TYPE_CHECKING:
    from brim.forecasting.forecast import Forecaster
    from brim.training.setup import TrainingSetup

__all__ = ["ANSWER_SECONDS", "ForecastProcess", "answer", "forecast_workload", "serve_forecasts"]

COMMAND = child_command("brim.sweeps.forecast_process:serve_forecasts")
ANSWER_SECONDS = 180.0  # importing torch, building a large model and tracing it on a busy machine


class ForecastProcess:
    """Asks. `card` is what experiments are forecast for.

    {"gpu": name}, {"memory": size}, {"here": true}: this machine's first, or {}: the machine's own memory.
    """

    def __init__(
        self,
        *,
        card: Mapping[str, Any] | None = None,
        timeout_seconds: float = ANSWER_SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.card = dict(card or {})
        self._timeout_seconds = timeout_seconds
        self._command = tuple(command)
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def devices(self) -> list[dict[str, Any]]:
        """The cards that torch sees."""
        found: list[dict[str, Any]] = self._ask({"ask": "devices"})["devices"]
        return found

    def check_model(self, model: str) -> None:
        """A `RequestError` for a model that does not exist."""
        self._ask({"ask": "model", "model": model})

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        """By the text of each size, its forecast; where there is none, `reason`. Never raises for a model's sake."""
        question = {"ask": "forecast", "settings": settings, "sizes": list(sizes), "card": self.card}
        try:
            return self._ask(question)
        except BrimError as error:
            return {"reason": first_line(error)}

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._child = child = self._child or ChildProcess(self._command, name="the forecasting process")
        try:
            return child.ask(question, seconds=self._timeout_seconds)
        except ChildLostError:
            self._stop()  # the next question starts another
            raise

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


OWN_MODELS = ("mlp",)  # those that `model.type` names and no library has


def serve_forecasts(requests: Iterator[dict[str, Any]], send: Send) -> None:
    """In the child: answer every question; what goes wrong with one is its answer."""
    for question in requests:
        try:
            send(answer(question))
        except Exception as error:
            send(error)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one question of `ForecastProcess`."""
    if question["ask"] == "devices":
        return {"devices": devices()}
    if question["ask"] == "model":
        return {"model": check_model(question["model"])}
    return forecast_workload(question["settings"], question["sizes"], card=question.get("card") or {})


def devices() -> list[dict[str, Any]]:
    """The cards that torch sees, in its order, with what a process may take of each; none: an empty list."""
    import torch

    if not torch.cuda.is_available():
        return [{"name": "mps"}] if torch.backends.mps.is_available() else []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "card": properties.name,
                "memory_bytes": properties.total_memory,
                "context_bytes": _context_bytes(properties.name, properties.total_memory),
                "used_bytes": _used_bytes(str(getattr(properties, "uuid", "")) or None, index),
            }
        )
    return found


def check_model(model: str) -> str:
    """The model's full name; a `RequestError` with the nearest names where there is none."""
    from brim.models.build import resolve_model

    return model if model in OWN_MODELS else str(resolve_model(model))


def forecast_workload(
    settings: Mapping[str, Any], sizes: Sequence[int | str], *, card: Mapping[str, Any]
) -> dict[str, Any]:
    """By the text of each size: the forecast of a micro-batch of it. `auto` is the largest useful one that fits."""
    from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
    from brim.forecasting.shape_tensor import without_initialisation
    from brim.settings.nested_keys import flatten
    from brim.settings.sizes import parse_bytes
    from brim.settings.train_settings import train_settings
    from brim.training.memory_forecast import size_to_trace, training_workload
    from brim.training.setup import open_setup

    flat = flatten(settings)
    margin = flat.get("training.margin")
    named = flat.get("training.memory_limit")
    limit = None if named is None else parse_bytes(named)
    on_cpu = not card or str(flat.get("training.device", "auto")) == "cpu"
    shapes_only = with_changes(settings, {"training.device": "cpu", "model.weights": "none"})
    gpu = choose_gpu(None, None) if on_cpu else choose_gpu(card.get("gpu"), card.get("memory"))
    with without_initialisation():
        setup = open_setup(train_settings(shapes_only))
    workload = training_workload(setup)
    traced = TracedWorkload(workload)

    def forecast(size: int | str) -> dict[str, Any]:
        """As `brim forecast` makes it: the very size that is asked for is traced."""
        effective = _effective(setup, size)
        asked = max(min(size, effective), workload.smallest_size()) if isinstance(size, int) else None
        forecaster = Forecaster(
            traced, gpu, margin=margin, memory_limit_bytes=None if on_cpu else limit, workspaces=not on_cpu
        )
        forecaster.model(None if asked is None else size_to_trace(workload, asked))
        place = _HostMemory(forecaster, limit=limit, margin=margin) if on_cpu else _Card(forecaster)
        largest = place.largest()
        chosen = max(min(effective, largest), workload.smallest_size()) if asked is None else asked
        return {**place.at(chosen), "batch_size_max": largest, "effective_batch": effective}

    return {str(size): forecast(size) for size in sizes}


def _effective(setup: TrainingSetup, size: int | str) -> int:
    """Samples of an optimizer step: no micro-batch is larger."""
    import dataclasses

    from brim.training.effective_batch import choose_effective_batch

    hyper = dataclasses.replace(setup.settings.hp, batch_size=size)
    settings = dataclasses.replace(setup.settings, hp=hyper)
    return choose_effective_batch(settings, samples=len(setup.data.train), ranks=1).batch


class _Card:
    """What one workload needs and may have on a card, at any size."""

    def __init__(self, forecaster: Forecaster) -> None:
        self._forecaster = forecaster

    def largest(self) -> int:
        """The largest size within the limit, 0 where none is."""
        return self._forecaster.largest()

    def at(self, size: int) -> dict[str, Any]:
        """The forecast of a size, as `SizeForecast` takes it."""
        forecast = self._forecaster.at(size).to_json()
        return {**forecast, "context_bytes": self._forecaster.gpu.context_bytes}


class _HostMemory:
    """The same for training on the CPU: there is no context of a GPU, and nothing is cached."""

    def __init__(self, forecaster: Forecaster, *, limit: int | None, margin: float | None) -> None:
        from brim.memory.devices import DEFAULT_MARGIN
        from brim.monitor.host import available_host_bytes

        self._forecaster = forecaster
        here = int(available_host_bytes() * (1 - (DEFAULT_MARGIN if margin is None else margin)))
        self._limit = here if limit is None else min(here, limit)

    def largest(self) -> int:
        """The largest size within the limit, 0 where none is; bytes grow with the size."""
        low, high = 0, self._forecaster.smallest
        most = self._forecaster.largest_allowed
        while high <= most and self._fits(high):
            low, high = high, high * 2
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            fits = middle >= self._forecaster.smallest and self._fits(middle)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def at(self, size: int) -> dict[str, Any]:
        """The forecast of a size, as `SizeForecast` takes it."""
        forecast = self._forecaster.at(size)
        figures = dict.fromkeys(("peak_reserved_bytes", "device_bytes"), forecast.peak_allocated_bytes)
        place = {"device": "cpu", "limit_bytes": self._limit, "fits": self._fits(size)}
        return {**forecast.to_json(), **figures, **place}

    def _fits(self, size: int) -> bool:
        return self._forecaster.at(size).peak_allocated_bytes <= self._limit


def _context_bytes(name: str, memory_bytes: int) -> int:
    from brim.forecasting.gpus import find_gpu, gpu_of_memory

    try:
        return find_gpu(name).context_bytes
    except BrimError:
        return gpu_of_memory(memory_bytes).context_bytes


def _used_bytes(uuid: str | None, index: int) -> int:
    """What other processes hold of a card when the sweep begins; they are taken to stay."""
    from brim.monitor.nvml import device_memory

    memory = device_memory(uuid, index)
    return 0 if memory is None else memory.used_by_others_bytes
