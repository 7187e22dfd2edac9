"""The memory forecast for a sweep's experiments, once for each distinct workload, and the problems that it shows.

Another process does the work (`forecast_process.py`): this one stays without torch, takes no memory on a card, and
survives a model that cannot be built. A workload that cannot be forecast has a reason instead of figures.

Forecasts are kept on disk where they depend on nothing but the settings, the card and the versions: library models on
built-in clips, or on data whose folder has not changed. Python factories and the host's memory are forecast every time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from brim.settings.config_files import SweepFile
from brim.settings.grid import Experiment
from brim.settings.nested_keys import flatten
from brim.settings.problems import Problem
from brim.settings.sizes import format_bytes
from brim.settings.train_settings import BATCH_KEY, MODEL_KEY
from brim.storage.files import cache_folder, read_json, write_json
from brim.storage.fingerprint import fingerprint

__all__ = [
    "CachedForecasts", "SizeForecast", "bytes_needed", "forecast_experiments", "foreseen", "foreseen_data",
    "workload_key",
]  # fmt: skip

SAFETY = 1.1  # of the forecast, when it is reserved: allocators differ, validation comes on top
APPROXIMATE_SAFETY = 1.25  # of one that says itself that it is less sure

# What does not change how much memory a step takes.
_NO_MEMORY = (
    "hp.learning_rate", "hp.epochs", "hp.max_steps", "hp.seed", "hp.label_smoothing", "hp.weight_decay",
    "hp.base_batch", "optimizer.params.weight_decay", "optimizer.params.betas", "optimizer.params.eps",
    "scheduler.", "data.num_workers", "training.early_stopping", "training.monitor", "training.checkpoint_every",
    "training.eval_", "training.lr_scale", "training.scale_betas", "training.gradient_clip", "training.margin",
    "training.memory_limit", "model.weights", BATCH_KEY,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeForecast:
    """The forecast of one experiment; without figures, the reason why."""

    batch_size: int | None = None  # samples of a micro-batch: what was asked, or for auto what is planned
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None  # with the CUDA context
    context_bytes: int = 0
    limit_bytes: int | None = None
    fits: bool | None = None
    batch_size_max: int | None = None
    effective_batch: int | None = None
    device: str = ""
    approximate: str | None = None
    reason: str | None = None  # why there are no figures
    trace_seconds: float = 0.0
    made_for: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the settings that its bytes depend on

    def to_json(self) -> dict[str, Any]:
        """The forecast as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SizeForecast:
        """Read one back."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


Ask = Callable[[Mapping[str, Any], Sequence[int | str]], Mapping[str, Any]]
"""Given the settings of one workload and the batch sizes asked for: a forecast for each size, by its text."""


def workload_key(settings: Mapping[str, Any]) -> str:
    """The same for experiments whose steps take the same memory at the same batch size."""
    flat = flatten(settings)
    kept = {key: value for key, value in flat.items() if not key.startswith(_NO_MEMORY)}
    return json.dumps(kept, sort_keys=True, default=str)


def forecast_experiments(
    experiments: Sequence[Experiment], ask: Ask, *, progress: Callable[[str], None] | None = None
) -> dict[str, SizeForecast]:
    """By id: a forecast for every experiment. `ask` is called once for each distinct workload under the same limits."""
    workloads: dict[tuple[Any, ...], list[Experiment]] = {}
    for experiment in experiments:
        limits = (str(experiment.flat.get(key)) for key in ("training.memory_limit", "training.margin"))
        workloads.setdefault((workload_key(experiment.settings), *limits), []).append(experiment)
    found: dict[str, SizeForecast] = {}
    for place, members in enumerate(workloads.values(), start=1):
        if progress is not None:
            progress(f"[{place}/{len(workloads)}] {members[0].flat.get(MODEL_KEY)}")
        sizes = list(dict.fromkeys(_asked(member) for member in members))
        answers = ask(members[0].settings, sizes)
        for member in members:
            answer = answers.get(str(_asked(member)))
            reason = str(answers.get("reason") or "no forecast")
            found[member.id] = SizeForecast(reason=reason) if answer is None else SizeForecast.from_json(answer)
    return found


def foreseen(
    sweep: SweepFile, experiments: Sequence[Experiment], forecasts: Mapping[str, SizeForecast], *, retry: bool = True
) -> list[Problem]:
    """A problem for every distinct pair that is forecast not to fit: the bytes, and the size that would."""
    found: dict[tuple[str, str], Problem] = {}
    for experiment in experiments:
        forecast = forecasts.get(experiment.id)
        if forecast is None or forecast.fits is not False:
            continue
        model = str(experiment.flat.get(MODEL_KEY))
        fix = _fix(forecast, retry=retry)
        needs, has = format_bytes(forecast.device_bytes), format_bytes(forecast.limit_bytes)
        message = (
            f"{model} at {forecast.batch_size} samples is forecast to take {needs} of the {has} that "
            f"{forecast.device} has for it"
        )
        key = BATCH_KEY if BATCH_KEY in experiment.flat else MODEL_KEY
        problem = sweep.problem(experiment, key, message, fix=fix, severity="warning")
        found.setdefault((message, str(problem.line)), problem)
    return list(found.values())


def foreseen_data(sweep: SweepFile, experiments: Sequence[Experiment]) -> list[Problem]:
    """A note where the file names no data: the built-in sets are learnt then."""
    for experiment in experiments:
        flat = experiment.flat
        if flat.get("data.root") is None and flat.get("data.type", "auto") == "auto":
            message = "no data is named: image and video models learn from built-in moving shapes"
            return [sweep.problem(experiment, "data", message, severity="note")]
    return []


def bytes_needed(forecast: SizeForecast | None) -> int | None:
    """What an experiment reserves on its device; None where that is not known."""
    if forecast is None or forecast.device_bytes is None:
        return None
    needed = forecast.device_bytes
    if forecast.fits is False and forecast.limit_bytes is not None:
        needed = forecast.limit_bytes  # it runs at a smaller size, and may take all there is
    safety = SAFETY if forecast.approximate is None else APPROXIMATE_SAFETY
    return round((needed - forecast.context_bytes) * safety) + forecast.context_bytes


def _asked(experiment: Experiment) -> int | str:
    asked: int | str = experiment.flat.get(BATCH_KEY, "auto")
    return asked


def _fix(forecast: SizeForecast, *, retry: bool) -> str:
    if not forecast.batch_size_max:
        return "not even one sample fits: take half precision, gradient checkpointing or a smaller hp.size"
    if retry:
        return f"{forecast.batch_size_max} would fit: the run starts in micro-batches of at most that; or write auto"
    return f"write {forecast.batch_size_max}, or auto"


_FORMAT = 2  # of what is kept: 2 since samples are prepared outside of the trace
_PACKAGES = ("brim", "torch", "torchvision", "timm", "transformers")


class CachedForecasts:
    """The answers of the function it is given, read from disk where they are known; `card` is what they are for."""

    def __init__(self, ask: Ask, *, card: Mapping[str, Any], folder: Path | None = None) -> None:
        self._ask = ask
        self._card = dict(card)
        self._folder = folder or cache_folder() / "sweep-forecasts"

    def __call__(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> Mapping[str, Any]:
        """By the text of each size, its forecast."""
        key = self._key(settings)
        if key is None:
            return self._ask(settings, sizes)
        path = self._folder / f"{key}.json"
        stored: Any = read_json(path)
        known: dict[str, Any] = stored if isinstance(stored, dict) else {}
        missing = [size for size in sizes if str(size) not in known]
        if not missing:
            return known
        answer = self._ask(settings, missing)
        fresh = {str(size): answer[str(size)] for size in missing if str(size) in answer}
        if not fresh:
            return answer
        write_json(path, {**known, **fresh})
        return {**known, **answer}

    def _key(self, settings: Mapping[str, Any]) -> str | None:
        """The name of the entry; None for what is not kept."""
        flat = flatten(settings)
        root = flat.get("data.root")
        own = any(str(flat.get(key) or "").startswith("py:") for key in ("model.type", "data.type"))
        if own or not self._card or flat.get("training.device") == "cpu":
            return None
        limits = {key: flat.get(key) for key in ("training.memory_limit", "training.margin", "hp.effective_batch")}
        return fingerprint(
            {
                "format": _FORMAT,
                "workload": workload_key(settings),
                "limits": limits,
                "data": None if root is None else _state(Path(str(root))),
                "card": self._card,
                "allocator": [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
                "versions": {name: _version(name) for name in _PACKAGES},
            }
        )


def _state(path: Path) -> list[Any]:
    """Where data lies and when it last changed, by its own entry in the file system."""
    try:
        found = path.stat()
    except OSError:
        return [str(path)]
    return [str(path.absolute()), found.st_mtime_ns, found.st_size]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
