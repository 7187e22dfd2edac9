"""The settings of a training run: every key that a training file may have, its default and its check.

A training file and each experiment of a sweep have the same keys, each declared once: the fields of these classes, with
a `Key` for the file and a `Setting` where `brim train` has a flag for it. `SETTING_KEYS` lists them by dotted key.
Pure: no torch, no files, and whether a model, an optimizer or a data set of some name exists is found out by those who
load it.

A key that is added later is left out of `TrainSettings.to_json` while it has its default: fingerprints are made of
those values, and runs that were started without the key can be resumed. The steps: CONTRIBUTING.md, "A training
setting".

    train_settings({"model": {"type": "r3d_18"}, "hp": {"batch_size": "auto", "epochs": 5}})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from brim.errors import RequestError, nearest_names
from brim.settings import shared
from brim.settings.declare import Key, Setting, SettingKey, flag_names, setting_keys
from brim.settings.nested_keys import flatten, nest
from brim.settings.problems import Problem
from brim.settings.setting_checks import (
    MOST_SEED,
    any_value,
    byte_size,
    choice,
    flag,
    fraction,
    number,
    optional,
    size_or_auto,
    text,
    whole,
)
from brim.settings.shared import BATCH, WHERE

__all__ = [
    "BATCH_KEY", "FLAG_KEYS", "IGNORED_KEYS", "MODEL_KEY", "RATE_KEY", "SEED_KEY", "SETTING_KEYS", "DataSettings",
    "HyperSettings", "ModelSettings", "OptimizerSettings", "SchedulerSettings", "TrainSettings", "TrainingSettings",
    "find_setting_key", "setting_problems", "train_settings",
]  # fmt: skip

Params = Mapping[str, Any]


MODEL_KEY, BATCH_KEY, RATE_KEY, SEED_KEY = "model.type", "hp.batch_size", "hp.learning_rate", "hp.seed"
TASK_NAMES = {
    "classify": "classify",
    "classification": "classify",
    "image_classification": "classify",
    "text_classification": "classify",
    "video_classification": "classify",
    "regress": "regress",
    "regression": "regress",
}
_MOST_CLASSES = 2**31 - 1
_LR_SCALES = ("none", "sqrt", "linear", "auto")
_DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")


def _none() -> Params:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is trained."""

    type: Annotated[
        str, Key(text(), "the model, as -m takes it: r3d_18, timm:NAME, hf:FOLDER, py:FILE:FACTORY; or mlp")
    ]
    weights: Annotated[str, Key(text(), "none (random), auto (the published ones), or a file to start from")] = "none"
    num_classes: Annotated[
        int | None, Key(optional(whole(1, _MOST_CLASSES)), "outputs of the head; by default as many as the data has")
    ] = None
    trust_remote_code: Annotated[bool, Key(flag(), "run code that a transformers folder brings")] = False
    knobs: Annotated[Params, Key(any_value(), "a knob of the model, such as frames or size", each=True)] = (
        dataclasses.field(default_factory=_none)
    )
    params: Annotated[
        Params,
        Key(any_value(), "of mlp: hidden (widths), dropout, standardise; of a py: factory: its arguments", each=True),
    ] = dataclasses.field(default_factory=_none)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it learns from."""

    type: Annotated[
        str,
        Key(text(), "auto, moving_shapes, features, mask_folder, coco, py:FILE:FACTORY, or a format that brim reads"),
    ] = "auto"
    root: Annotated[
        str | None, Key(optional(text()), "file or folder; without it the built-in moving shapes are used")
    ] = None
    train_split: Annotated[str | None, Key(optional(text()), "name of the split to learn from; by default train")] = (
        None
    )
    val_root: Annotated[
        str | None, Key(optional(text()), "file or folder of the validation data, where it lies apart")
    ] = None
    val_split: Annotated[
        str | None, Key(optional(text()), "name of the split to validate on; none for no validation")
    ] = None
    val_fraction: Annotated[
        float, Key(fraction(), "of the training data, held out where there is no validation split")
    ] = 0.1
    percentage: Annotated[
        float, Key(number(above=0, most=100), "of the training data to use, every class in proportion")
    ] = 100.0
    limit: Annotated[
        int | None, Key(optional(whole(1)), "training samples to use at most, every class in proportion")
    ] = None
    num_workers: Annotated[
        int | None,
        Key(optional(whole(0)), "processes that prepare samples; by default chosen by brim"),
        shared.setting_of(shared.NumWorkers),
    ] = None
    map: Annotated[Params, Key(text(), "which column serves as a field, such as label: category", each=True)] = (
        dataclasses.field(default_factory=_none)
    )
    params: Annotated[
        Params,
        Key(any_value(), "of moving_shapes: samples, val_samples, classes, …; of features: label, labels", each=True),
    ] = dataclasses.field(default_factory=_none)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperSettings:
    """What people tune."""

    batch_size: Annotated[
        int | str,
        Key(size_or_auto(), "samples of a micro-batch at most, on each rank; auto: found by brim"),
        Setting(
            help="Samples of a micro-batch on each rank: auto (default), or N as a ceiling.", panel=BATCH,
            flags=("-b", "--batch-size"), metavar="auto|N",
        ),
    ] = "auto"  # fmt: skip
    effective_batch: Annotated[
        int | str | None,
        Key(
            optional(size_or_auto()),
            "samples of an optimizer step over all ranks; by default batch_size × ranks, or 128 (an eighth of the data "
            "at most) where that is auto; auto: grows with the gradient noise scale",
        ),
        Setting(
            help="Samples of an optimizer step over all ranks: N, or auto to let it grow.", panel=BATCH,
            metavar="auto|N",
        ),
    ] = None  # fmt: skip
    base_batch: Annotated[
        int | None, Key(optional(whole(1)), "the batch that learning_rate was chosen for; see lr_scale")
    ] = None
    learning_rate: Annotated[float, Key(number(above=0), "of the optimizer")] = 1e-3
    weight_decay: Annotated[
        float | None, Key(optional(number(least=0)), "of the optimizer; by default the optimizer's own")
    ] = None
    epochs: Annotated[int, Key(whole(1), "times that every training sample is seen")] = 10
    max_steps: Annotated[int | None, Key(optional(whole(1)), "optimizer steps at most, whatever epochs says")] = None
    label_smoothing: Annotated[float, Key(fraction(), "of the cross entropy")] = 0.0
    seed: Annotated[int, Key(whole(0, MOST_SEED), "of weights, order and noise")] = 0
    frames: Annotated[int | None, Key(optional(whole(1)), "the knob of that name: frames in a clip")] = None
    size: Annotated[int | None, Key(optional(whole(1)), "the knob of that name: height and width in pixels")] = None
    tokens: Annotated[int | None, Key(optional(whole(1)), "tokens of a text at most")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """By its name in `torch.optim`, in any case."""

    name: Annotated[
        str,
        Key(text(), "a class of torch.optim: adamw, sgd, adam, adafactor, …"),
        Setting(name="optimizer", help="Any of torch.optim, by name.", panel=WHERE, metavar="NAME"),
    ] = "adamw"
    params: Annotated[
        Params, Key(any_value(), "an argument of that class: betas, momentum, weight_decay, …", each=True)
    ] = dataclasses.field(default_factory=_none)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """By its name in `torch.optim.lr_scheduler`, in any case, with a warm-up before it."""

    name: Annotated[str, Key(text(), "none, or a class of torch.optim.lr_scheduler: cosineannealinglr, steplr, …")] = (
        "none"
    )
    warmup_steps: Annotated[
        int | None, Key(optional(whole(0)), "steps over which the learning rate rises to its value")
    ] = None
    warmup_epochs: Annotated[float | None, Key(optional(number(least=0)), "the same in epochs")] = None
    params: Annotated[Params, Key(any_value(), "an argument of that class: T_max, step_size, gamma, …", each=True)] = (
        dataclasses.field(default_factory=_none)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How the loop runs."""

    device: Annotated[
        str,
        Key(text(), "auto, cpu, cuda, cuda:N or mps"),
        Setting(help="auto, cpu, cuda, cuda:N or mps.", panel=WHERE, metavar="DEVICE"),
    ] = "auto"
    dtype: Annotated[
        str,
        Key(choice(*_DTYPES), "half precision is autocast over float32 weights"),
        Setting(
            help="auto, float32, float16 or bfloat16 (autocast).", flags=("--dtype", "--torch-dtype"), panel=WHERE,
            metavar="DTYPE", python="str | None",
        ),
    ] = "auto"  # fmt: skip
    gradient_clip: Annotated[float | None, Key(optional(number(above=0)), "the largest norm of a step's gradient")] = (
        None
    )
    gradient_checkpointing: Annotated[
        bool,
        Key(flag(), "compute activations twice instead of keeping them"),
        shared.setting_of(shared.GradientCheckpointing),
    ] = False
    early_stopping: Annotated[
        int | None, Key(optional(whole(1)), "epochs without a better figure before the run ends")
    ] = None
    early_stopping_min_delta: Annotated[float, Key(number(least=0), "a change that counts as better")] = 0.0
    monitor: Annotated[
        str, Key(text(), "the figure that best weights and early stopping go by; auto: top1, mean_iou or loss")
    ] = "auto"
    checkpoint_every: Annotated[
        int | None, Key(optional(whole(1)), "steps between checkpoints, beside each epoch's")
    ] = None
    eval_batch_size: Annotated[
        int | str,
        Key(size_or_auto(), "samples of a validation batch; auto: found by brim"),
        Setting(
            help="Samples of a validation batch: auto (default), or N as a ceiling.", panel=BATCH, metavar="auto|N"
        ),
    ] = "auto"
    eval_every: Annotated[int, Key(whole(1), "epochs between validations")] = 1
    lr_scale: Annotated[
        str | None,
        Key(
            optional(choice(*_LR_SCALES)),
            "how the learning rate follows the effective batch: none, sqrt, linear, or auto (sqrt for Adam and its "
            "kin, linear for SGD); by default none, and auto where effective_batch is auto",
        ),
        Setting(
            help="How the learning rate follows the batch: none, sqrt, linear or auto.", panel=BATCH, metavar="RULE",
        ),
    ] = None  # fmt: skip
    scale_betas: Annotated[
        bool,
        Key(flag(), "with lr_scale, adjust Adam's betas and eps as well"),
        Setting(help="With --lr-scale, Adam's betas and eps too.", panel=BATCH),
    ] = False
    max_effective_batch: Annotated[int | None, Key(optional(whole(1)), "where effective_batch: auto stops growing")] = (
        None
    )
    beyond_noise: Annotated[bool, Key(flag(), "let effective_batch: auto grow past what the noise scale justifies")] = (
        False
    )
    memory_limit: Annotated[
        str | None,
        Key(optional(byte_size()), "bytes that the run may use: 24GiB"),
        shared.setting_of(shared.MemoryLimit),
    ] = None
    margin: Annotated[
        float | None, Key(optional(fraction()), "of the memory limit, kept free"), shared.setting_of(shared.Margin)
    ] = None
    fsdp: Annotated[bool, Key(flag(), "shard weights, gradients and optimizer state over the ranks")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A whole training run as asked for."""

    task: Annotated[
        str | None, Key(choice(*TASK_NAMES, null=True), "classify or regress; by default what the data is for")
    ] = None
    model: ModelSettings
    data: DataSettings = DataSettings()
    hp: HyperSettings = HyperSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    training: TrainingSettings = TrainingSettings()

    def to_json(self) -> dict[str, Any]:
        """The settings as nested plain values, which `train_settings` reads back; fingerprints are made of them."""
        return dataclasses.asdict(self)


def _sections() -> dict[str, type[Any]]:
    """The section names of a file and the dataclass of each."""
    hints = get_type_hints(TrainSettings)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


SETTING_KEYS: Mapping[str, SettingKey] = {
    row.key: row
    for row in (
        *setting_keys(TrainSettings),
        *(row for name, kind in _sections().items() for row in setting_keys(kind, f"{name}.")),
    )
}
"""Every key of a training file, by its dotted name."""

FLAG_KEYS: Mapping[str, str] = {
    name: f"{section}.{field}" for section, kind in _sections().items() for field, name in flag_names(kind).items()
}
"""The keys that `brim train` has flags for, by the flag's name."""

IGNORED_KEYS: Mapping[str, str] = {
    "gpu": "brim runs where --device, CUDA_VISIBLE_DEVICES or the launcher say",
    "multi_gpu": "start the run under torchrun for several devices",
    "name": "a name for people",
    "description": "a text for people",
}
"""Sections that other tools' files have and a training run does not need: noted, not refused."""

_SWEEP_KEYS = ("grid_search", "models_to_train")


def train_settings(nested: Mapping[str, Any]) -> TrainSettings:
    """Checked settings of a nested mapping; every problem of it is in the one `RequestError`."""
    values, problems = _checked(nested)
    if problems:
        raise RequestError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))
    return _build(values)


def setting_problems(nested: Mapping[str, Any]) -> list[Problem]:
    """Everything that `train_settings` would refuse, each with its dotted key."""
    return _checked(nested)[1]


def find_setting_key(dotted: str) -> SettingKey | None:
    """The key of that name; `optimizer.params.betas` is found under `optimizer.params.*`."""
    if dotted in SETTING_KEYS:
        return SETTING_KEYS[dotted]
    for key, row in SETTING_KEYS.items():
        prefix = key.removesuffix("*")
        if prefix != key and dotted.startswith(prefix) and len(dotted) > len(prefix):
            return row
    return None


def _is_open(key: str) -> bool:
    return f"{key}.*" in SETTING_KEYS


def _checked(nested: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The values by dotted key, checked, and the problems."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, section in nested.items():
        if name in IGNORED_KEYS:
            continue
        if name in _SWEEP_KEYS:
            problems.append(_problem(name, "this is a sweep's file: run it with brim sweep"))
            continue
        if name in _sections() and (section is None or section == {}):
            continue  # `data:` with nothing under it
        if name in _sections() and not isinstance(section, Mapping):
            problems.append(_problem(str(name), f"it is a section of keys, not {section!r}"))
            continue
        for key, value in flatten({name: section}).items():
            problem = _take(key, value, values)
            problems += [problem] if problem is not None else []
    reported = any(problem.key.startswith(("model", "grid_search")) for problem in problems)
    if "model.type" not in values and not reported:
        problems.append(_problem("model.type", "it is missing; name a model, such as r3d_18 or mlp"))
    return values, [*problems, *_conflicts(values)]


def _problem(key: str, message: str) -> Problem:
    return Problem(severity="error", key=key, message=message)


def _take(key: str, value: Any, values: dict[str, Any]) -> Problem | None:
    """Put one checked value in its place, or return what is wrong with it."""
    if _is_open(key) and not value:
        return None  # `params:` with nothing under it
    row = find_setting_key(key)
    if row is None:
        known = [other.removesuffix(".*") for other in SETTING_KEYS]
        return _problem(key, f"there is no such key{_near(key, known)}")
    try:
        values[key] = row.check(value)
    except ValueError as error:
        return _problem(key, f"{value!r}: {error}")
    return None


def _near(key: str, known: list[str]) -> str:
    """Names like it: first those of the same last word (batch_size for hp.batch_size), then those spelled alike."""
    last = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == last]
    if same:
        return nearest_names(key, same) or f"; did you mean {', '.join(same)}?"
    near = nearest_names(key, known)
    return near or nearest_names(last, [other.rpartition(".")[2] for other in known])


def _conflicts(values: Mapping[str, Any]) -> list[Problem]:
    """Keys that are each right, and wrong together."""
    found = []

    def both(first: str, second: str, fix: str) -> None:
        if values.get(first) is not None and values.get(second) is not None:
            found.append(_problem(first, f"{second} is given as well; {fix}"))

    both("hp.weight_decay", "optimizer.params.weight_decay", "keep one of them")
    both("scheduler.warmup_steps", "scheduler.warmup_epochs", "keep one of them")
    for knob in ("frames", "size"):
        both(f"hp.{knob}", f"model.knobs.{knob}", "keep one of them")
    if values.get("data.percentage", 100.0) != 100.0:
        both("data.percentage", "data.limit", "keep one of them")
    if "optimizer.params.lr" in values:
        found.append(_problem("optimizer.params.lr", "give it as hp.learning_rate"))
    model = values.get("model.type", "")
    if values.get("model.weights") == "auto" and (model == "mlp" or model.startswith("py:")):
        found.append(_problem("model.weights", f"auto: {model} has no published weights; give none or a file"))
    return found


def _build(values: Mapping[str, Any]) -> TrainSettings:
    """The dataclasses of checked values."""
    nested = nest(values)
    if "task" in nested:
        nested["task"] = TASK_NAMES.get(nested["task"])
    made = {name: kind(**nested.pop(name, {})) for name, kind in _sections().items()}
    return TrainSettings(**nested, **made)
