"""From a MODEL argument to a model that can be evaluated."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, first_line
from brim.memory.weights import place_weights
from brim.models import hf_loading, python_factory, timm_models, torchvision_models
from brim.models.base import LoadedModel, LoadRequest
from brim.models.build import model_knobs, resolve_model
from brim.models.names import ModelName
from brim.settings.caller import given
from brim.workloads.knobs import check_knobs

__all__ = ["KeptModel", "load_model", "put_weights", "read_weights"]

_MOST_NAMED = 5  # entries of a file in one message


def load_model(request: LoadRequest) -> LoadedModel:
    """The requested model with its weights, on its device and in evaluation mode."""
    name = resolve_model(request.model)
    if name.source in ("py", "hf") and request.weights not in ("auto", "none"):
        raise RequestError(f"{given('weights', request.weights)}: {name} brings its own weights; leave it out")
    if name.source == "py":
        return _function(name, request)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random weights are the same in every run, so that it can be resumed
        return hf_loading.load(name.name, request) if name.source == "hf" else _classifier(name, request)


class KeptModel:
    """As `load_model`, but if only knobs differ from the last request, the model is changed in place if possible."""

    def __init__(self) -> None:
        self._request: LoadRequest | None = None
        self._loaded: LoadedModel | None = None

    def __call__(self, request: LoadRequest) -> LoadedModel:
        changed = self._changed(request)
        if changed is None:
            self._loaded = None  # before the next one needs the memory
            changed = load_model(request)
        self._request, self._loaded = request, changed
        return changed

    def _changed(self, request: LoadRequest) -> LoadedModel | None:
        """The loaded model with the knobs of this request; None if it is another model or cannot be changed to them."""
        if self._loaded is None or self._request is None:
            return None
        same = self._request == dataclasses.replace(request, knobs=self._request.knobs)
        if not same or resolve_model(request.model).source != "hf":
            return None
        return hf_loading.with_knobs(self._loaded, request.knobs)


def _function(name: ModelName, request: LoadRequest) -> LoadedModel:
    knobs = check_knobs(request.knobs, python_factory.factory_knobs(name.name), owner=str(name))
    function = python_factory.load_function(name.name, knobs=knobs, device=request.device, dtype=request.dtype)
    return LoadedModel(
        name=str(name),
        kind="function",
        module=function,
        device=request.device,
        dtype=request.dtype or torch.float32,
        identity={"source": python_factory.factory_source_digest(name.name), "knobs": knobs},
    )


def _classifier(name: ModelName, request: LoadRequest) -> LoadedModel:
    knobs = check_knobs(request.knobs, model_knobs(str(name)), owner=str(name))
    asked = {knob: knobs[knob] for knob in request.knobs}  # others stay as the weights were trained
    loaders = {"torchvision": torchvision_models.load, "timm": timm_models.load}
    loaded = loaders[name.source](name.name, dataclasses.replace(request, knobs=asked))
    loaded = dataclasses.replace(loaded, identity={**loaded.identity, "knobs": asked})
    if request.weights not in ("auto", "none"):
        state, digest = read_weights(request.weights)
        classes = _other_classes(state, loaded.module)
        if classes is not None:
            loaded = loaders[name.source](name.name, dataclasses.replace(request, knobs=asked, classes=classes))
        put_weights(loaded.module, state, request.weights)
        identity = {**loaded.identity, "knobs": asked, "weights": digest}
        loaded = dataclasses.replace(loaded, identity=identity, notes=())
    module = place_weights(loaded.module, request.device, name=str(name), dtype=loaded.dtype)
    return dataclasses.replace(loaded, module=module.eval())


def read_weights(path: str) -> tuple[dict[str, Any], str]:
    """Weights from a safetensors file, or a torch file read without running code, and the file's digest."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise RequestError(f"{given('weights', path)}: there is no such file; give auto, none or a file of weights")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state) if isinstance(state, dict) else state
    except Exception as error:
        raise RequestError(
            f"{given('weights', path)}: it cannot be read as weights ({first_line(error)[:300]}); give a .safetensors "
            "file, or a state_dict that torch.save wrote"
        ) from error
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise RequestError(f"{given('weights', path)}: it holds no tensors by name; save the model's state_dict()")
    return state, hashlib.sha256(file.read_bytes()).hexdigest()


def put_weights(module: torch.nn.Module, state: Mapping[str, Any], path: str) -> None:
    """Load a state dict whole: a `RequestError` names the entries that are missing, unknown or of another shape."""
    try:
        module.load_state_dict(state)
    except Exception as error:
        reason = _differences(module.state_dict(), state) or first_line(error)[:300]
        raise RequestError(
            f"{given('weights', path)}: it does not fit this model ({reason}); give weights of this model"
        ) from error


def _differences(own: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """How the entries of a file differ from those of a model, in one line."""
    tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    shapes = [
        f"{name} {tuple(state[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in tensors
        if isinstance(own.get(name), torch.Tensor) and own[name].shape != state[name].shape
    ]
    parts = [
        _listed("missing", [name for name in own if name not in state]),
        _listed("unexpected", [name for name in state if name not in own]),
        _listed("of another shape", shapes),
    ]
    return "; ".join(part for part in parts if part)


def _listed(what: str, names: Sequence[str]) -> str:
    """`2 missing: a, b`, at most five names; nothing for none."""
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:_MOST_NAMED])}{more}"


def _other_classes(state: Mapping[str, Any], module: torch.nn.Module) -> int | None:
    """The number of classes of a file's head, if the file differs from the model in nothing else."""
    own = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name in own}
    other = {name: value for name, value in tensors.items() if own[name].shape != value.shape}
    counts = {int(value.shape[0]) for value in other.values() if value.dim() > 0}
    heads_only = all(value.shape[1:] == own[name].shape[1:] for name, value in other.items())
    return counts.pop() if len(counts) == 1 and heads_only else None
