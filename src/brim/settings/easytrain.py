"""Keys of EasyTrain's files that brim spells otherwise, does without, or cannot honour.

Files of that system work unchanged: a key that has another name here is renamed, one that brim does not need is noted,
one that would change what is learned and that brim does not do is warned of. Nothing is dropped in silence.

Schedulers: there, a grid lists the parameters of all its schedulers, and each takes what it knows; `warmup_cosine` is a
scheduler, and the smallest rate is a factor of the learning rate. Here a scheduler takes exactly its own parameters, a
warm-up goes before any of them, and the smallest rate is a rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brim.settings.problems import Severity
from brim.settings.train_settings import SETTING_KEYS

__all__ = [
    "FOREIGN_SECTIONS", "NAME_KEY", "TranslatedKey", "convert_schedule", "foreign_keys", "is_foreign_schedule",
    "read_foreign",
]  # fmt: skip

_RENAMED: Mapping[str, str] = {
    "task.tag": "task",
    "model.name": "model.type",
    "model_name": "model.type",
    "model_type": "model.type",
    "batch_size": "hp.batch_size",
    "learning_rate": "hp.learning_rate",
    "weight_decay": "hp.weight_decay",
    "epochs": "hp.epochs",
    "dropout": "hp.dropout",
    "frames_per_clip": "hp.frames",
    "data.frames_per_clip": "hp.frames",
    "data.params.clip_len": "hp.frames",
    "data.image_size": "hp.size",
    "optimizer.type": "optimizer.name",
    "optimizer_type": "optimizer.name",
    "optimizer.momentum": "optimizer.params.momentum",
    "scheduler.type": "scheduler.name",
    "scheduler_type": "scheduler.name",
    "scheduler.step_size": "scheduler.params.step_size",
    "scheduler.gamma": "scheduler.params.gamma",
    "loss": "loss.name",
    "loss.type": "loss.name",
    "loss.params.label_smoothing": "hp.label_smoothing",
    "training.early_stopping.patience": "training.early_stopping",
    "training.early_stopping.min_delta": "training.early_stopping_min_delta",
    "environment.seed": "hp.seed",
}


def _percent(value: Any) -> Any:
    return value * 100 if _is_share(value) else value


def _held_out(value: Any) -> Any:
    return round(1 - value, 9) if _is_share(value) else value


def _weights(value: Any) -> Any:
    return {True: "auto", False: "none"}.get(value, value) if isinstance(value, bool) else value


_CONVERTED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    # their key: brim's, and how a value is turned
    "hp.data_percentage": ("data.percentage", _percent),
    "model.params.pretrained": ("model.weights", _weights),
    "data.train_split": ("data.val_fraction", _held_out),
    "data.params.train_ratio": ("data.val_fraction", _held_out),
}

_NOT_NEEDED: Mapping[str, str] = {
    # a key or a section: why brim does without
    "task.description": "it is a text for people",
    "training.exp_name": "a run's folder is named by -o",
    "training.experiment_name": "a run's folder is named by -o",
    "training.experiment_name_prefix": "a run's folder is named by -o",
    "training.save_model": "weights are always saved",
    "training.model_save_path": "weights are saved in the run's folder",
    "training.log_interval": "every epoch is recorded",
    "training.save_interval": "see training.checkpoint_every",
    "model.params.num_classes": "the head has as many outputs as the data has classes",
    "data.download": "brim downloads no data",
    "data.pin_memory": "brim decides it",
    "data.params.sampling_mode": "brim chooses the frames of a clip",
    "data.params.target_fps": "brim chooses the frames of a clip",
    "data.params.original_fps": "brim chooses the frames of a clip",
    "data.step_between_clips": "brim chooses the frames of a clip",
    "data.params.stratified_split": "see data.val_fraction",
    "multi_gpu": "a sweep uses all the GPUs it is given, one training under torchrun",
    "gpu.auto_select": "a sweep uses all the GPUs it is given",
    "gpu.use_multi_gpu": "a sweep uses all the GPUs it is given",
    "gpu.mixed_precision": "see training.dtype",
    "swanlab": "brim keeps its own records",
    "output": "a run writes its own folder",
    "results": "a run writes its own folder",
    "logging": "every epoch is recorded",
    "metrics": "the task decides its metrics",
    "environment": "see training",
    "experiment": "see training and --max-experiments",
    "base_config": "write the shared settings into this file",
    "continue_on_error": "a failed experiment never stops the others",
    "parallel_jobs": "see --jobs-per-gpu",
    "save_results": "results are always saved",
}

_NOT_DONE: Mapping[str, str] = {
    # keys that would change what is learned
    "hp.dropout": "models keep the dropout they are made with",
    "data.augment": "brim does not augment",
    "data.data_dir": "give data.root",
    "data.csv_file": "give data.root",
    "data.fold": "give data.train_split and data.val_split",
    "data.annotation_path": "lists beside the data are found by themselves",
    "data.params.labels_file": "brim reads the labels from the data itself",
    "data.params.top_n_classes": "every class of the data is learned",
    "data.params.min_samples_per_class": "every class of the data is learned",
    "data.params.use_weighted_sampling": "every sample is seen once in an epoch",
    "data.params.weighted_sampling_mode": "every sample is seen once in an epoch",
    "model.params.freeze_backbone": "every weight is trained",
    "loss.params": "the loss follows from the task",
    "sampling": "see data.percentage",
}

_LOSSES = ("crossentropy", "cross_entropy", "ce", "mse")  # what a task has anyway

FOREIGN_SECTIONS = frozenset(
    key.partition(".")[0] for table in (_RENAMED, _CONVERTED, _NOT_NEEDED, _NOT_DONE) for key in table
) | {"hyperparameters"}


def foreign_keys() -> list[str]:
    """Every key that is read, dotted; some are sections."""
    found = [key for table in (_RENAMED, _CONVERTED, _NOT_NEEDED, _NOT_DONE) for key in table]
    return [*dict.fromkeys(found), "loss.name", "hyperparameters"]


@dataclasses.dataclass(frozen=True)
class TranslatedKey:
    """What brim makes of a key: the key it uses (None: it is left out), its values, and what to report."""

    key: str | None
    values: tuple[Any, ...]
    severity: Severity | None = None
    message: str = ""


def read_foreign(key: str, values: Sequence[Any], *, own_factory: bool = False) -> TranslatedKey:
    """Read one key of a file. `own_factory`: a model comes from the user's own code, which gets `model.params` as is.

    Their `data.train_split` is a share of the data; where it is a text, it is the name of a split, as here.
    """
    written = key
    if key.startswith("hyperparameters."):
        key = f"hp.{key.removeprefix('hyperparameters.')}"
    if own_factory and key.startswith("model.params."):
        return TranslatedKey(key, tuple(values))
    key = _RENAMED.get(key, key)
    values = tuple(values)
    if key == "loss.name":
        return _read_loss(values)
    if key in _CONVERTED and not (key == "data.train_split" and any(isinstance(value, str) for value in values)):
        key, convert = _CONVERTED[key]
        values = tuple(convert(value) for value in values)
    reason = _under(key, _NOT_DONE)
    if reason is not None:
        idle = all(value in (None, False, 0) for value in values if not isinstance(value, (list, Mapping)))
        return TranslatedKey(None, values, "note" if idle else "warning", f"brim does not use it: {reason}")
    reason = _under(key, _NOT_NEEDED)
    if reason is not None:
        return TranslatedKey(None, values, "note", f"brim does not need it: {reason}")
    if key != written:
        return TranslatedKey(key, values, "note", f"read as {key}")
    return TranslatedKey(key, values)


def _read_loss(values: tuple[Any, ...]) -> TranslatedKey:
    other = [value for value in values if str(value).lower() not in _LOSSES and value is not None]
    if other:
        return TranslatedKey(None, values, "error", f"{other[0]!r}: brim has no such loss, only the task's own")
    return TranslatedKey(None, values, "note", "brim does not need it: the loss follows from the task")


def _under(key: str, table: Mapping[str, str]) -> str | None:
    """The entry of the key, or of a section that it stands in."""
    while key:
        if key in table:
            return table[key]
        key = key.rpartition(".")[0]
    return None


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


NAME_KEY = "scheduler.name"
_PARAMS = "scheduler.params."
_WARMUP_COSINE = "warmup_cosine"
_ONLY_THEIRS = ("warmup_epochs", "warmup_start_factor", "eta_min_factor")
_TAKEN_BY = {  # of the parameters that their files list for all schedulers
    "step": ("step_size", "gamma"),
    "multistep": ("gamma", "milestones"),
    "exponential": ("gamma",),
    "plateau": ("factor", "patience", "mode"),
    "linear": ("start_factor", "end_factor"),
}
_LISTED = {name for names in _TAKEN_BY.values() for name in names}


def is_foreign_schedule(keys: Iterable[str], names: Iterable[Any]) -> bool:
    """Whether a file describes its schedulers so: by these keys, with these names of schedulers."""
    theirs = {f"{_PARAMS}{name}" for name in _ONLY_THEIRS}
    return bool(theirs & set(keys)) or _WARMUP_COSINE in names


def convert_schedule(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one experiment with its scheduler as brim has it; other settings stay as they are."""
    converted = dict(flat)
    params = {name: converted.pop(f"{_PARAMS}{name}", None) for name in (*_ONLY_THEIRS, *_LISTED)}
    name = str(flat.get(NAME_KEY, "none")).lower()
    for taken in _TAKEN_BY.get(name, ()):
        if params[taken] is not None:
            converted[f"{_PARAMS}{taken}"] = params[taken]
    if name not in ("cosine", _WARMUP_COSINE):
        return converted
    factor = params["eta_min_factor"]
    if name == _WARMUP_COSINE:
        converted[NAME_KEY] = "cosine"
        epochs = flat.get("hp.epochs", SETTING_KEYS["hp.epochs"].default)
        warmup = max(1, epochs // 10) if params["warmup_epochs"] is None else params["warmup_epochs"]
        if "scheduler.warmup_steps" not in flat:
            converted.setdefault("scheduler.warmup_epochs", min(warmup, max(epochs - 1, 0)))
        factor = 0.01 if factor is None else factor
    if factor is not None:
        rate = flat.get("hp.learning_rate", SETTING_KEYS["hp.learning_rate"].default)
        converted.setdefault(f"{_PARAMS}eta_min", float(f"{rate * factor:.12g}"))
    return converted
