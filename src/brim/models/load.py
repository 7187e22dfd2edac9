"""From a MODEL argument to a model that can be evaluated."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError
from brim.models import hf_loading, python_factory, timm_models, torchvision_models
from brim.models.build import model_knobs, resolve_model
from brim.models.loaded import LoadedModel, LoadRequest
from brim.models.names import ModelName
from brim.workloads.knobs import check_knobs

__all__ = ["load_model"]


def load_model(request: LoadRequest) -> LoadedModel:
    """The model asked for, with its weights, on its device and in evaluation mode."""
    name = resolve_model(request.model)
    if name.source in ("py", "hf") and request.weights not in ("auto", "none"):
        raise RequestError(f"--weights {request.weights}: {name} brings its own weights; leave it out")
    if name.source == "py":
        return _function(name, request)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # weights that are random are the same ones in every run: it can be resumed
        return hf_loading.load(name.name, request) if name.source == "hf" else _classifier(name, request)


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
    asked = {knob: knobs[knob] for knob in request.knobs}  # what is not asked for is as the weights were trained
    loaders = {"torchvision": torchvision_models.load, "timm": timm_models.load}
    loaded = loaders[name.source](name.name, dataclasses.replace(request, knobs=asked))
    loaded = dataclasses.replace(loaded, identity={**loaded.identity, "knobs": asked})
    if request.weights not in ("auto", "none"):
        digest = _load_file(loaded.module, request.weights)
        loaded = dataclasses.replace(loaded, identity={**loaded.identity, "weights": digest}, notes=())
    module = loaded.module.to(device=request.device, dtype=loaded.dtype).eval()
    return dataclasses.replace(loaded, module=module)


def _load_file(module: torch.nn.Module, path: str) -> str:
    """Weights from a safetensors file, or a torch file read without running code; returns the file's digest."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise RequestError(f"--weights {path}: there is no such file; give auto, none or a file of weights")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state) if isinstance(state, dict) else state
        module.load_state_dict(state)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__  # the first line of load_state_dict's says nothing
        raise RequestError(f"--weights {path}: it does not fit this model ({reason[:300]})") from error
    return hashlib.sha256(file.read_bytes()).hexdigest()
