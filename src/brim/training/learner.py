"""From `model:` in a file to a model that can learn: its weights, its head, and how it reads.

Random weights are drawn from the run's seed. A head made for another number of classes is replaced by a new one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from brim.errors import RequestError
from brim.models import hf_loading, hf_models, python_factory, timm_models, torchvision_models
from brim.models.base import LoadedModel, LoadRequest
from brim.models.build import model_knobs, resolve_model
from brim.models.load import load_model, put_weights, read_weights
from brim.models.names import ModelName
from brim.settings.caller import named_as
from brim.settings.train_settings import TrainSettings
from brim.training.feature_head import make_feature_head
from brim.workloads.knobs import check_knobs

__all__ = ["Learner", "Reads", "build_learner", "model_reads", "smaller_inputs", "smallest_micro_batch"]

Reads = Literal["video", "image", "text", "features", "own", "segmentation", "detection"]

_CPU = torch.device("cpu")
_OWN_MEANS = (
    "the model averages its losses over each micro-batch by itself, so that accumulated micro-batches are only about "
    "equivalent to one big batch"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """A model on the CPU, with what turns samples into its inputs."""

    name: str
    model: nn.Module
    reads: Reads
    transform: Callable[[Any], torch.Tensor] | None = None
    tokenizer: Any = None
    positions: int | None = None  # tokens at most
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def model_reads(settings: TrainSettings) -> Reads:
    """What the model is for, before it is built."""
    if settings.model.type == "mlp":
        return "features"
    name = resolve_model(settings.model.type)
    if name.source == "py":
        return "own"
    if name.source == "hf":
        config = hf_models.load_config(name.name, settings.model.trust_remote_code)
        kind = hf_models.kind_of(name.name, config)
        if kind not in ("sequence", "image", "masked", "encoder", "causal"):
            raise RequestError(
                f"model.type {settings.model.type}: a transformers model of the kind {kind!r} has no classification "
                "head; brim trains text and image classifiers, or write a factory: py:FILE:FACTORY"
            )
        return "image" if kind == "image" else "text"
    return torchvision_models.model_kind(name.name) if name.source == "torchvision" else "image"


def input_shape(settings: TrainSettings) -> dict[str, int]:
    """The knobs `size` and `frames` that the model will have, for data that is made to measure."""
    name = resolve_model(settings.model.type)
    found = check_knobs(_asked_knobs(settings), model_knobs(str(name)), owner=str(name))
    return {knob: int(value) for knob, value in found.items() if knob in ("size", "frames")}


def smaller_inputs(settings: TrainSettings) -> str:
    """Which settings make a sample smaller, for those who run out of memory; nothing where there are none."""
    if settings.model.type == "mlp":
        return "narrower layers (model.params.hidden)"
    name = resolve_model(settings.model.type)
    if name.source in ("torchvision", "timm"):
        known = {knob.name for knob in model_knobs(str(name))}
        ways = {"frames": "fewer frames (hp.frames)", "size": "a smaller picture (hp.size)"}
        return " or ".join(way for knob, way in ways.items() if knob in known)
    return "shorter texts (hp.tokens)" if model_reads(settings) == "text" else ""


def build_learner(settings: TrainSettings, *, outputs: int, rows: torch.Tensor | None = None) -> Learner:
    """The model with so many outputs; `rows` are the features that `mlp` is made for."""
    if settings.model.type == "mlp":
        assert rows is not None
        with _seeded(settings.hp.seed):
            model = make_feature_head(rows, outputs, settings.model.params)
        head = Learner(name="mlp", model=model, reads="features", identity={"params": dict(settings.model.params)})
        return _with_weights(head, settings)
    name = resolve_model(settings.model.type)
    if name.source == "py":
        return _with_weights(_from_factory(name, settings, outputs), settings)
    if settings.model.params:
        first = next(iter(settings.model.params))
        raise RequestError(f"model.params.{first}: {name} takes none; its settings are model.knobs")
    if name.source == "torchvision" and torchvision_models.model_kind(name.name) in ("segmentation", "detection"):
        return _dense(name, settings, outputs)
    learner = _from_hf(name, settings, outputs) if name.source == "hf" else _from_library(name, settings, outputs)
    with _seeded(settings.hp.seed):
        note = _fit_head(learner.model, outputs)
    return dataclasses.replace(learner, notes=(*learner.notes, *([note] if note else [])))


def smallest_micro_batch(model: nn.Module, make_inputs: Callable[[], Any]) -> int:
    """2 where batch normalisation would see a single value per channel, else 1; tried on tensors without memory.

    `make_inputs` gives the inputs of a single sample; it is asked only where there is batch normalisation.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return 1
    inputs = make_inputs()
    detects = isinstance(inputs, tuple) and hasattr(model, "backbone") and hasattr(model, "transform")
    if not isinstance(inputs, torch.Tensor) and not detects:
        return 1
    try:
        twin: Any = copy.deepcopy(model).to("meta").train()
        with torch.no_grad():
            if detects:  # past the backbone, shapes depend on values
                pictures, _ = model.transform(inputs[0])  # type: ignore[operator]
                twin.backbone(torch.empty_like(pictures.tensors, device="meta"))
            else:
                twin(torch.empty_like(inputs, device="meta"))
    except ValueError:
        return 2
    except Exception:  # the model needs real values: it will tell when it runs
        return 1
    return 1


def _from_library(name: ModelName, settings: TrainSettings, outputs: int) -> Learner:
    """torchvision and timm."""
    known = model_knobs(str(name))
    checked = check_knobs(_asked_knobs(settings), known, owner=str(name))
    asked = {knob: checked[knob] for knob in _asked_knobs(settings)}
    request = LoadRequest(
        model=str(name), device=_CPU, dtype=torch.float32, knobs=asked, weights=settings.model.weights
    )
    if settings.model.weights == "none":
        load = {"torchvision": torchvision_models.load, "timm": timm_models.load}[name.source]
        with _seeded(settings.hp.seed):
            loaded = load(name.name, dataclasses.replace(request, classes=outputs))
    else:
        with named_as(weights="model.weights"):
            loaded = load_model(request)
    reads: Reads = "video" if loaded.kind == "video_classifier" else "image"
    return _learner(loaded, reads, {"knobs": checked})


def _dense(name: ModelName, settings: TrainSettings, outputs: int) -> Learner:
    """A segmentation or detection model, whose heads are made for the classes of the data: no published weights fit."""
    if settings.model.weights == "auto":
        raise RequestError(
            f"model.weights auto: the published weights of {name} have heads for other classes; use none, or a file of "
            "weights with the classes of the data"
        )
    checked = check_knobs(_asked_knobs(settings), model_knobs(str(name)), owner=str(name))
    with _seeded(settings.hp.seed):
        model = torchvision_models.untrained(name.name, checked["size"], outputs)
    kind = torchvision_models.model_kind(name.name)
    learner = Learner(
        name=str(name),
        model=model,
        reads=kind,
        identity={"knobs": checked},
        notes=(_OWN_MEANS,) if kind == "detection" else (),
    )
    return _with_weights(learner, settings)


def _from_hf(name: ModelName, settings: TrainSettings, outputs: int) -> Learner:
    """A classifier's folder, or a language model's with a new head on it."""
    if settings.model.weights not in ("none", "auto"):
        raise RequestError(f"model.weights {settings.model.weights}: {name} brings its own weights; leave it out")
    config = hf_models.load_config(name.name, settings.model.trust_remote_code)
    request = LoadRequest(
        model=str(name),
        device=_CPU,
        dtype=torch.float32,
        knobs=settings.model.knobs,
        trust_remote_code=settings.model.trust_remote_code,
    )
    kind = hf_models.kind_of(name.name, config)
    with _seeded(settings.hp.seed):
        if kind in ("sequence", "image"):
            loaded = hf_loading.load(name.name, request)
            return _learner(loaded, "image" if kind == "image" else "text", {})
        config.num_labels = outputs
        tokenizer = _tokenizer(name, request)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        model, notes = hf_models.load_weights(
            name.name, config, "sequence", torch.float32, trust_remote_code=request.trust_remote_code
        )
    return Learner(
        name=str(name),
        model=model,
        reads="text",
        tokenizer=tokenizer,
        positions=hf_models.position_limit(config),
        identity=hf_models.files_identity(name.name, config),
        notes=(*notes, f"{name} is no classifier: it has a new head for {outputs} outputs"),
    )


def _tokenizer(name: ModelName, request: LoadRequest) -> Any:
    place, options = hf_models.where(name.name)
    auto = hf_models.transformers_library().AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(place, trust_remote_code=request.trust_remote_code, **options)
    except Exception as error:
        raise hf_models.unreadable(name.name, error) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _from_factory(name: ModelName, settings: TrainSettings, outputs: int) -> Learner:
    """A module that a Python function makes; one with a method `training_loss` has its own loss."""
    knobs = python_factory.factory_knobs(name.name)
    asked = {**_asked_knobs(settings), **settings.model.params}
    if outputs and "num_classes" in {knob.name for knob in knobs}:
        asked.setdefault("num_classes", outputs)
    checked = check_knobs(asked, knobs, owner=str(name))
    with _seeded(settings.hp.seed):
        made: Any = python_factory.load_function(name.name, knobs=checked, device=_CPU, dtype=None)
    if not isinstance(made, nn.Module):
        raise RequestError(
            f"model.type {settings.model.type}: the factory returned {type(made).__name__}; for training it must "
            "return an nn.Module"
        )
    return Learner(
        name=str(name),
        model=made,
        reads="own",
        transform=getattr(made, "transform", None),
        identity={"source": python_factory.factory_source_digest(name.name), "knobs": checked},
    )


def _with_weights(learner: Learner, settings: TrainSettings) -> Learner:
    """The model with the weights of `model.weights`, where that names a file; such a model has no published ones."""
    weights = settings.model.weights
    if weights == "none":
        return learner
    if weights == "auto":
        raise RequestError(f"model.weights auto: {learner.name} has no published weights; give none or a file")
    with named_as(weights="model.weights"):
        state, digest = read_weights(weights)
        put_weights(learner.model, state, weights)
    return dataclasses.replace(learner, identity={**learner.identity, "weights": digest})


def _learner(loaded: LoadedModel, reads: Reads, more: Mapping[str, Any]) -> Learner:
    module: nn.Module = loaded.module
    return Learner(
        name=loaded.name,
        model=module,
        reads=reads,
        transform=loaded.transform,
        tokenizer=loaded.tokenizer,
        positions=loaded.positions,
        identity={**loaded.identity, **more},
        notes=loaded.notes,
    )


def _asked_knobs(settings: TrainSettings) -> dict[str, Any]:
    """Knobs of `model.knobs`, and of `hp` by their short names."""
    short = {"frames": settings.hp.frames, "size": settings.hp.size}
    return {**settings.model.knobs, **{name: value for name, value in short.items() if value is not None}}


def _fit_head(model: nn.Module, outputs: int) -> str | None:
    """Replace the last layer where it has another number of outputs; says so, or nothing."""
    heads = [(path, module) for path, module in model.named_modules() if _head_outputs(module) is not None]
    if not heads:
        raise RequestError(
            f"{type(model).__name__} has no linear layer at its end to make a head of; use py:FILE:FACTORY"
        )
    before = _head_outputs(heads[-1][1])
    if before == outputs:
        return None
    if hasattr(model, "reset_classifier"):  # timm's own way
        model.reset_classifier(outputs)  # type: ignore[operator]
    else:
        for path, module in heads:
            if (
                _head_outputs(module) == before
                and type(module) is type(heads[-1][1])
                and _ends_model(path, heads[-1][0])
            ):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, _resized(module, outputs))
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "num_labels"):
        config.num_labels = outputs
        if hasattr(model, "num_labels"):
            vars(model)["num_labels"] = outputs
    return f"the head had {before} outputs and was replaced by one with {outputs}"


def _ends_model(path: str, last: str) -> bool:
    """The last layer, and the last layers of side branches (`AuxLogits.fc` beside `fc`)."""
    return path == last or path.rpartition(".")[2] == last.rpartition(".")[2]


_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)  # heads of SqueezeNet and S3D


def _head_outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, _CONVOLUTIONS) else None


def _resized(module: nn.Module, outputs: int) -> nn.Module:
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features, outputs, bias=module.bias is not None)
    assert isinstance(module, _CONVOLUTIONS)
    options = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation")}
    return type(module)(module.in_channels, outputs, bias=module.bias is not None, **options)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of this seed inside, those from before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
