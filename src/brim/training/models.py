"""From `model:` in the settings to a model to train: its weights, its head, and what turns samples into its inputs.

Random weights are drawn from the run's seed. A head with another number of classes is replaced by a new one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from brim.training.heads import make_feature_head, replace_head
from brim.workloads.knobs import Knob, check_knobs

__all__ = [
    "InputKind", "ModelBundle", "build_model", "input_kind", "input_shape", "smaller_inputs", "smallest_micro_batch",
]  # fmt: skip

InputKind = Literal["video", "image", "text", "features", "own", "segmentation", "detection"]

_CPU = torch.device("cpu")
_OWN_MEANS = (
    "the model averages its losses over each micro-batch, so that accumulated micro-batches are only approximately "
    "equivalent to one big batch"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """A model on the CPU, with its transform or tokenizer."""

    name: str
    model: nn.Module
    input_kind: InputKind
    transform: Callable[[Any], torch.Tensor] | None = None
    tokenizer: Any = None
    positions: int | None = None  # the longest text in tokens
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def input_kind(settings: TrainSettings) -> InputKind:
    """What the model takes as input; known before it is built."""
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
    """The knobs `size` and `frames` of the model, for data that is made for it."""
    name = resolve_model(settings.model.type)
    knobs = _checked_knobs(settings, name, model_knobs(str(name)))
    return {knob: int(value) for knob, value in knobs.items() if knob in ("size", "frames")}


def smaller_inputs(settings: TrainSettings) -> str:
    """The settings that make a sample smaller, for out-of-memory messages; empty where there are none."""
    if settings.model.type == "mlp":
        return "narrower layers (model.params.hidden)"
    name = resolve_model(settings.model.type)
    if name.source in ("torchvision", "timm"):
        known = {knob.name for knob in model_knobs(str(name))}
        ways = {"frames": "fewer frames (hp.frames)", "size": "a smaller picture (hp.size)"}
        return " or ".join(way for knob, way in ways.items() if knob in known)
    return "shorter texts (hp.tokens)" if input_kind(settings) == "text" else ""


def build_model(settings: TrainSettings, *, outputs: int, rows: torch.Tensor | None = None) -> ModelBundle:
    """The model with this number of outputs; `rows` are the training features of `mlp`."""
    if settings.model.type == "mlp":
        assert rows is not None
        with _seeded(settings.hp.seed):
            model = make_feature_head(rows, outputs, settings.model.params)
        bundle = ModelBundle(
            name="mlp", model=model, input_kind="features", identity={"params": dict(settings.model.params)}
        )
        return _with_weights(bundle, settings)
    name = resolve_model(settings.model.type)
    if name.source == "py":
        return _with_weights(_from_factory(name, settings, outputs), settings)
    if settings.model.params:
        first = next(iter(settings.model.params))
        raise RequestError(f"model.params.{first}: {name} takes none; its settings are model.knobs")
    if name.source == "torchvision" and torchvision_models.model_kind(name.name) in ("segmentation", "detection"):
        return _dense(name, settings, outputs)
    bundle = _from_hf(name, settings, outputs) if name.source == "hf" else _from_library(name, settings, outputs)
    with _seeded(settings.hp.seed):
        note = replace_head(bundle.model, outputs)
    return dataclasses.replace(bundle, notes=(*bundle.notes, *([note] if note else [])))


def smallest_micro_batch(model: nn.Module, make_inputs: Callable[[], Any]) -> int:
    """2 where batch normalisation of one sample would see a single value per channel, else 1; tried on meta tensors.

    `make_inputs` gives the inputs of one sample; it is called only for models with batch normalisation.
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
            if detects:  # only the backbone: after it, shapes depend on values
                pictures, _ = model.transform(inputs[0])  # type: ignore[operator]
                twin.backbone(torch.empty_like(pictures.tensors, device="meta"))
            else:
                twin(torch.empty_like(inputs, device="meta"))
    except ValueError:
        return 2
    except Exception:  # it needs real values: an error will show when it runs
        return 1
    return 1


def _from_library(name: ModelName, settings: TrainSettings, outputs: int) -> ModelBundle:
    """A classifier of torchvision or timm."""
    checked = _checked_knobs(settings, name, model_knobs(str(name)))
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
    kind: InputKind = "video" if loaded.kind == "video_classifier" else "image"
    return _bundle(loaded, kind, {"knobs": checked})


def _dense(name: ModelName, settings: TrainSettings, outputs: int) -> ModelBundle:
    """A segmentation or detection model; its heads have the classes of the data, which no published weights have."""
    if settings.model.weights == "auto":
        raise RequestError(
            f"model.weights auto: the published weights of {name} have heads for other classes; use none, or a file of "
            "weights with the classes of the data"
        )
    checked = _checked_knobs(settings, name, model_knobs(str(name)))
    with _seeded(settings.hp.seed):
        model = torchvision_models.untrained(name.name, checked["size"], outputs)
    kind = torchvision_models.model_kind(name.name)
    bundle = ModelBundle(
        name=str(name),
        model=model,
        input_kind=kind,
        identity={"knobs": checked},
        notes=(_OWN_MEANS,) if kind == "detection" else (),
    )
    return _with_weights(bundle, settings)


def _from_hf(name: ModelName, settings: TrainSettings, outputs: int) -> ModelBundle:
    """A transformers classifier, or a language model with a new classification head."""
    if settings.model.weights not in ("none", "auto"):
        raise RequestError(f"model.weights {settings.model.weights}: {name} has its own weights; leave it out")
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
            return _bundle(loaded, "image" if kind == "image" else "text", {})
        config.num_labels = outputs
        tokenizer = _tokenizer(name, request)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        model, notes = hf_models.load_weights(
            name.name, config, "sequence", torch.float32, trust_remote_code=request.trust_remote_code
        )
    return ModelBundle(
        name=str(name),
        model=model,
        input_kind="text",
        tokenizer=tokenizer,
        positions=hf_models.position_limit(config),
        identity=hf_models.files_identity(name.name, config),
        notes=(*notes, f"{name} is not a classifier: it has a new head for {outputs} outputs"),
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


def _from_factory(name: ModelName, settings: TrainSettings, outputs: int) -> ModelBundle:
    """A module that a Python function of the user returns; a method `training_loss` computes its own loss."""
    knobs = python_factory.factory_knobs(name.name)
    asked = {**_asked_knobs(settings), **settings.model.params}
    if outputs and "num_classes" in {knob.name for knob in knobs}:
        asked.setdefault("num_classes", outputs)
    with named_as(knob="model.params"):
        checked = check_knobs(asked, knobs, owner=str(name))
    with _seeded(settings.hp.seed):
        made: Any = python_factory.load_function(name.name, knobs=checked, device=_CPU, dtype=None)
    if not isinstance(made, nn.Module):
        raise RequestError(
            f"model.type {settings.model.type}: the factory returned {type(made).__name__}; for training it must "
            "return an nn.Module"
        )
    return ModelBundle(
        name=str(name),
        model=made,
        input_kind="own",
        transform=getattr(made, "transform", None),
        identity={"source": python_factory.factory_source_digest(name.name), "knobs": checked},
    )


def _with_weights(bundle: ModelBundle, settings: TrainSettings) -> ModelBundle:
    """Load the file of `model.weights`, if it names one; these models have no published weights."""
    weights = settings.model.weights
    if weights == "none":
        return bundle
    if weights == "auto":
        raise RequestError(f"model.weights auto: {bundle.name} has no published weights; give none or a file")
    with named_as(weights="model.weights"):
        state, digest = read_weights(weights)
        put_weights(bundle.model, state, weights)
    return dataclasses.replace(bundle, identity={**bundle.identity, "weights": digest})


def _bundle(loaded: LoadedModel, kind: InputKind, identity: Mapping[str, Any]) -> ModelBundle:
    module: nn.Module = loaded.module
    return ModelBundle(
        name=loaded.name,
        model=module,
        input_kind=kind,
        transform=loaded.transform,
        tokenizer=loaded.tokenizer,
        positions=loaded.positions,
        identity={**loaded.identity, **identity},
        notes=loaded.notes,
    )


def _checked_knobs(settings: TrainSettings, name: ModelName, known: Sequence[Knob]) -> dict[str, Any]:
    """Every knob of the model with the value asked for or its default."""
    with named_as(knob="model.knobs"):
        return check_knobs(_asked_knobs(settings), known, owner=str(name))


def _asked_knobs(settings: TrainSettings) -> dict[str, Any]:
    """The knobs of `model.knobs`, and `hp.frames` and `hp.size`, which are short for two of them."""
    short = {"frames": settings.hp.frames, "size": settings.hp.size}
    return {**settings.model.knobs, **{name: value for name, value in short.items() if value is not None}}


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside; afterwards the generator of the CPU is as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
