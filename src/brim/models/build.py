"""From a request, of the command line or of a parent process, to a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import nn

from brim.errors import RequestError, nearest_names
from brim.memory.failures import HALF_PRECISION, memory_savings
from brim.models import hf_loading, hf_models, python_factory, timm_models, torchvision_models
from brim.models.base import ModelParts, PartsRequest, Setup, assemble
from brim.models.names import ModelName, choose_name, split_prefix
from brim.models.placement import DTYPES, resolve_device, resolve_precision
from brim.records import Mode
from brim.settings.caller import given, named, written
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload
from brim.workloads.checkpointing import can_checkpoint
from brim.workloads.knobs import Knob, check_knobs
from brim.workloads.optimizers import optimizer_class

__all__ = [
    "build_from_json",
    "build_workload",
    "model_knobs",
    "model_savings",
    "parse_knobs",
    "resolve_model",
]

_DEFAULT_OPTIMIZER = "adamw"
_HALVES = ("float16", "bfloat16")


def build_workload(request: WorkloadRequest) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a request, on its device, and notes for the user."""
    _check_request(request)
    name = resolve_model(request.model)
    if name.source == "py":
        return _build_from_factory(name, request), ()
    mode = request.mode or _natural_mode(name, request)
    if mode == "generate" and name.source != "hf":
        raise RequestError(
            f"{written('mode', 'generate')}: {name} is an image or video model; use {written('mode', 'forward')} or "
            "train"
        )
    if mode != "train" and request.gradient_checkpointing:
        raise RequestError(
            f"{named('gradient_checkpointing')} has no effect in mode {mode}; add {written('mode', 'train')} or leave "
            "it out"
        )
    device = resolve_device(request.device)
    knobs = check_knobs(request.knobs, _knobs(name, request.trust_remote_code), owner=str(name))
    precision = resolve_precision(request.dtype, mode)
    parts = _parts(
        name.source,
        PartsRequest(
            name=name.name,
            knobs=knobs,
            mode=mode,
            dtype=precision.weights,
            trust_remote_code=request.trust_remote_code,
        ),
    )
    setup = Setup(
        mode=mode,
        device=device,
        precision=precision,
        optimizer=request.optimizer,
        gradient_checkpointing=request.gradient_checkpointing,
    )
    workload, notes = assemble(parts, setup, {"model": str(name), "knobs": knobs})
    workload.notes = notes
    module = None if request.gradient_checkpointing else parts.model
    known = _knobs(name, request.trust_remote_code)
    workload.savings = model_savings(name, known, mode=mode, dtype=request.dtype, module=module)
    return workload, notes


def build_from_json(data: Mapping[str, Any]) -> Workload:
    """The workload of a request's JSON: the factory a child process imports as `brim.models.build:build_from_json`."""
    return build_workload(WorkloadRequest.from_json(data))[0]


def model_knobs(model: str, *, trust_remote_code: bool = False) -> tuple[Knob, ...]:
    """The knobs of a model, without building it."""
    name = resolve_model(model)
    if name.source == "hf":  # also of a vision-language model, from which no workload is built without data
        return hf_loading.model_knobs(name.name, trust_remote_code=trust_remote_code)
    return _knobs(name, trust_remote_code)


def parse_knobs(
    model: str, asked: Sequence[Mapping[str, Any]], *, trust_remote_code: bool = False
) -> list[dict[str, Any]]:
    """Several settings of a model's knobs, checked and parsed as an evaluation would; nothing is built."""
    name = resolve_model(model)
    if name.source == "hf":
        return hf_loading.parse_knobs(name.name, asked, trust_remote_code=trust_remote_code)
    known = _knobs(name, trust_remote_code)
    return [{knob: check_knobs(one, known, owner=str(name))[knob] for knob in one} for one in asked]


def model_savings(
    name: ModelName, knobs: Sequence[Knob], *, mode: Mode, dtype: str, module: nn.Module | None = None
) -> tuple[str, ...]:
    """Settings of `brim find` that reduce memory and that the model supports.

    `module` is the model, if gradient checkpointing may be proposed; for a factory its parameters decide.
    """
    own = name.source == "py"
    counts = [knob.name for knob in knobs if isinstance(knob.default, int) and not isinstance(knob.default, bool)]
    sized = ", ".join(knob for knob in counts if knob != "max_new_tokens")
    smaller = [
        *([f"fewer new tokens ({named('max_tokens')})"] if mode == "generate" else []),
        *([f"a smaller {named('knob')} ({sized})"] if sized else []),
    ]
    if own:
        checkpoints = module is not None and python_factory.takes_argument(name.name, "gradient_checkpointing")
    else:
        checkpoints = module is not None and can_checkpoint(module)
    takes_dtype = not own or python_factory.takes_argument(name.name, "dtype")
    found = memory_savings(
        half_precision=written("dtype", "bfloat16") if takes_dtype and dtype not in _HALVES else "",
        smaller=" or ".join(smaller),
        checkpointing=named("gradient_checkpointing") if mode == "train" and checkpoints else "",
    )
    return found if takes_dtype else (HALF_PRECISION, *found)


def resolve_model(model: str) -> ModelName:
    """The one model that a MODEL argument names."""
    return split_prefix(model) or choose_name(
        model,
        torchvision=torchvision_models.model_names,
        timm=timm_models.model_names,
        families=hf_models.family_names,
    )


def _knobs(name: ModelName, trust_remote_code: bool) -> tuple[Knob, ...]:
    if name.source == "torchvision":
        return torchvision_models.model_knobs(name.name)
    if name.source == "timm":
        return timm_models.model_knobs(name.name)
    if name.source == "hf":
        return hf_models.model_knobs(name.name, trust_remote_code=trust_remote_code)
    return python_factory.factory_knobs(name.name)


def _natural_mode(name: ModelName, request: WorkloadRequest) -> Mode:
    if name.source == "hf":
        return hf_models.natural_mode(name.name, trust_remote_code=request.trust_remote_code)
    return "forward"


def _parts(source: str, request: PartsRequest) -> ModelParts:
    build = {
        "torchvision": torchvision_models.build_parts,
        "timm": timm_models.build_parts,
        "hf": hf_models.build_parts,
    }[source]
    return build(request)


def _check_request(request: WorkloadRequest) -> None:
    """Refuse what is wrong before anything is imported or loaded."""
    if request.mode is not None and request.mode not in get_args(Mode):
        raise RequestError(
            f"{given('mode', request.mode)}: it must be one of {', '.join(get_args(Mode))}"
            f"{nearest_names(request.mode, get_args(Mode))}"
        )
    resolve_precision(request.dtype, "forward")
    optimizer_class(request.optimizer)


def _build_from_factory(name: ModelName, request: WorkloadRequest) -> Workload:
    _check_factory_takes(name, request)
    device = resolve_device(request.device)
    knobs = check_knobs(request.knobs, python_factory.factory_knobs(name.name), owner=str(name))
    arguments: dict[str, Any] = {
        "device": device,
        "dtype": DTYPES.get(request.dtype),
        "optimizer": request.optimizer,
        "gradient_checkpointing": request.gradient_checkpointing,
    }
    if request.mode is not None or python_factory.lacks_default(name.name, "mode"):
        arguments["mode"] = request.mode or "forward"
    asked_device = None if request.device == "auto" else device
    workload = python_factory.call_factory(name.name, knobs=knobs, arguments=arguments, device=asked_device)
    if request.mode is not None and workload.mode != request.mode:
        raise RequestError(
            f"{given('mode', request.mode)}: {name} made a {workload.mode} workload; leave {named('mode')} out, or "
            "let the factory take a parameter `mode` and follow it"
        )
    if request.device != "auto" and workload.device.type != device.type:
        raise RequestError(
            f"{given('device', request.device)}: {name} made a workload on {workload.device}; let the factory take a "
            "parameter `device` and put everything there"
        )
    known = python_factory.factory_knobs(name.name)
    module = None if request.gradient_checkpointing else next(iter(workload.modules()), None)
    workload.savings = model_savings(name, known, mode=workload.mode, dtype=request.dtype, module=module)
    if workload.identity() is None:
        identity = {
            "model": _factory_text(name),
            "source": python_factory.factory_source_digest(name.name),
            "mode": workload.mode,
            "knobs": knobs,
            "dtype": request.dtype,
            "optimizer": request.optimizer,
            "gradient_checkpointing": request.gradient_checkpointing,
            "parameters": sum(p.numel() for module in workload.modules() for p in module.parameters()),
        }
        workload.identity = lambda: identity  # type: ignore[method-assign]  # see python_factory
    return workload


def _check_factory_takes(name: ModelName, request: WorkloadRequest) -> None:
    """Refuse a setting that the factory has no parameter for: it would be ignored silently."""
    asked = {
        "dtype": (request.dtype, request.dtype != "auto"),
        "optimizer": (request.optimizer, request.optimizer != _DEFAULT_OPTIMIZER),
        "gradient_checkpointing": (request.gradient_checkpointing, request.gradient_checkpointing),
    }
    for argument, (value, is_given) in asked.items():
        if is_given and not python_factory.takes_argument(name.name, argument):
            raise RequestError(
                f"{given(argument, value)}: {name} has no parameter {argument!r} to receive it; leave "
                f"{named(argument)} out or add the parameter to the factory"
            )


def _factory_text(name: ModelName) -> str:
    where, _, attribute = name.name.rpartition(":")
    path = Path(where).expanduser()
    return f"py:{path.resolve()}:{attribute}" if where.endswith(".py") else str(name)
