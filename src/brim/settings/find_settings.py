"""What `brim find`, `brim knobs` and `brim cache` take.

A model by name, or functions; the data to try it on; and what is asked of the search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from brim.errors import RequestError, nearest_names
from brim.records import Objective, Unit
from brim.settings import shared
from brim.settings.caller import given, named, written
from brim.settings.declare import Setting, check_fields
from brim.settings.eval_settings import EvalRequest
from brim.settings.setting_checks import choice, fraction, number, path, whole
from brim.settings.shared import BATCH, OUTPUT, WHERE

__all__ = [
    "DEFAULT_MAX_SIZE", "ClearSettings", "DataSelection", "FindSettings", "KnobsSettings", "ListSettings", "OwnStep",
    "SearchSettings", "WorkloadRequest", "with_own_step",
]  # fmt: skip

DEFAULT_MAX_SIZE = 65536
_MODEL = f"{shared.MODEL_HELP}; a prefix (torchvision:, timm:, hf:, py:) selects the source."
_OBJECTS = ("scaler", "scheduler", "batch_length", "unit", "key")  # what goes with a step of the caller's own
_BY_NAME = ("data", "split", "limit", "map", "images", "task", "mode", "knob", "max_tokens", "dtype", "isolate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """What was asked for, in plain values, so that another process can build the same workload from its JSON."""

    model: Annotated[
        str,
        Setting(
            help=_MODEL, argument=True, metavar="MODEL", missing="give a model, such as resnet50",
            python="str | nn.Module | Sequence[nn.Module] | None", python_default=None,
            python_help=f"{_MODEL} With step: what it changes.",
        ),
    ]  # fmt: skip
    mode: Annotated[
        Literal["forward", "generate", "train"] | None,  # None: generate for a generative language model, else forward
        Setting(
            help="forward, generate or train; by default what the model is for.", metavar="MODE",
            check=choice("forward", "generate", "train"),
        ),
    ] = None  # fmt: skip
    knobs: shared.Knobs = dataclasses.field(default_factory=dict)
    device: Annotated[str, shared.setting_of(shared.Device, python="str | torch.device")] = "auto"
    dtype: shared.Dtype = "auto"
    optimizer: Annotated[
        str,
        Setting(
            help="Any of torch.optim, by name.", panel=WHERE, metavar="NAME",
            python="str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None",
            python_help="Any of torch.optim, by name. With step: the optimizers that it uses.",
        ),
    ] = "adamw"  # fmt: skip
    gradient_checkpointing: shared.GradientCheckpointing = False
    trust_remote_code: shared.TrustRemoteCode = False

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**dataclasses.asdict(self), "knobs": dict(self.knobs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkloadRequest:
        """Read a request back; an unknown field is a `RequestError`, since ignoring it would change the workload."""
        fields = {field.name for field in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise RequestError(f"workload request: unknown field {key!r}{nearest_names(key, fields)}")
        if "model" not in data:
            raise RequestError("workload request: the field model is missing")
        return cls(**data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSelection:
    """Data on whose costliest sample a model is tried; none, where `data` is not given."""

    data: Annotated[str | None, shared.setting_of(shared.Data, positional=False, missing="")] = None
    split: shared.Split = None
    limit: shared.Limit = None
    mapping: shared.Columns = dataclasses.field(default_factory=dict)
    images: shared.Images = None
    task: shared.Task = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("split", "limit", "mapping", "images", "task"):
            if self.data is None and getattr(self, name):
                setting = "map" if name == "mapping" else name
                raise RequestError(f"{named(setting)}: it goes with {written('data', 'DATA')}")

    def request(self, workload: WorkloadRequest) -> EvalRequest | None:
        """The same model, to be tried on the data."""
        if self.data is None:
            return None
        if workload.mode == "train":
            raise RequestError(
                f"{given('mode', 'train')}: a search on data runs a task, which does not train; leave {named('data')} "
                f"or {named('mode')} out"
            )
        return EvalRequest(
            model=workload.model, knobs=workload.knobs, device=workload.device, dtype=workload.dtype,
            trust_remote_code=workload.trust_remote_code, weights="none",
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        )  # fmt: skip


def _python(text: str, kind: str, default: Any = None) -> Setting:
    return Setting(help=text, python=kind, only="python", default=default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnStep:
    """A step of the caller's own, instead of a model by name."""

    step: Annotated[
        Callable[[Any], Any] | None,
        _python("A function that runs once on a batch, instead of a model by name.", "Callable[[Any], object] | None"),
    ] = None
    make_batch: Annotated[
        Callable[[int], Any] | None,
        _python("With step: returns the worst-case batch of n items on the device.", "Callable[[int], Any] | None"),
    ] = None
    scaler: Annotated[Any, _python("With step: the gradient scaler that it uses.", "object")] = None
    scheduler: Annotated[Any, _python("With step: the scheduler that it uses.", "object")] = None
    batch_length: Annotated[
        Callable[[Any], int] | None, _python("With step: how many items a batch has.", "Callable[[Any], int] | None")
    ] = None
    unit: Annotated[Unit, _python("With step: what the size counts.", 'Literal["samples", "tokens"]', "samples")] = (
        "samples"
    )
    key: Annotated[str | None, _python("With step: a name under which the plan is cached.", "str | None")] = None
    model: Any = None
    optimizer: Any = None
    device: Any = None


def with_own_step(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parts of a call with a step of the caller's own, or the values as they are with `--max-tokens` a knob."""
    if values.get("step") is None:
        for name in ("make_batch", *_OBJECTS):
            if name in values:
                raise RequestError(f"{named(name)}: it goes with {written('step', '…')}, a function of your own")
        if not isinstance(values.get("model", ""), str) or not isinstance(values.get("optimizer", ""), str):
            raise RequestError("model=: with a module, give the functions step= and make_batch= as well")
        device = {"device": str(values["device"])} if "device" in values else {}
        return {**_tokens_as_knob(values), **device, "own": None}
    if values.get("make_batch") is None:
        raise RequestError(f"{named('make_batch')} is missing: give a function that makes a batch of n items")
    if isinstance(values.get("model"), str) or isinstance(values.get("optimizer"), str):
        raise RequestError("step=: model= and optimizer= are then the objects that it uses, not names")
    for name in _BY_NAME:
        if name in values:
            raise RequestError(f"{named(name)}: it goes with a model by name, not with {written('step', '…')}")
    objects = ("step", "make_batch", "model", "optimizer", "device", *_OBJECTS)
    return {**values, "own": OwnStep(**{name: values[name] for name in objects if name in values}), "workload": None}


def _tokens_as_knob(values: Mapping[str, Any]) -> Mapping[str, Any]:
    tokens, knobs = values.get("max_tokens"), values.get("knob", {})
    shared.check_new_tokens(tokens, knobs)
    return values if tokens is None else {**values, "knob": {**knobs, "max_new_tokens": str(tokens)}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What the user asked of a search; the batch-size flags of docs/interface.md, one field each."""

    batch_size: shared.BatchSize = None  # None is auto; a number is a ceiling, or fixed
    fixed: shared.NoAutoBatchSize = False  # exactly `batch_size`
    fail_on_oom: shared.FailOnOom = False  # a fixed size that does not fit is an error, not split
    objective: Annotated[
        Objective,
        Setting(help="fastest or largest.", panel=BATCH, metavar="fastest|largest", check=choice("fastest", "largest")),
    ] = "fastest"
    memory_limit_bytes: shared.ByteLimit = None
    margin: shared.Margin = None
    tolerance: Annotated[
        float,
        Setting(help="How close to the best rate is fast enough.", panel=BATCH, metavar="FRACTION", check=fraction()),
    ] = 0.02
    max_probes: Annotated[
        int | None,
        Setting(help="Stop after N probes with the best size seen.", panel=BATCH, metavar="N", check=whole(1)),
    ] = None
    probe_timeout_seconds: Annotated[
        float | None,
        Setting(
            name="probe_timeout", help="A probe that takes longer does not fit; a hang needs --isolate.", panel=BATCH,
            metavar="SECONDS", check=number(above=0),
            python_help="Seconds; a probe that takes longer does not fit, and a hang needs isolate.",
        ),
    ] = None  # fmt: skip
    multiple_of: shared.MultipleOf = 1
    power_of_two: shared.PowerOfTwo = False
    max_size: shared.MaxBatchSize = DEFAULT_MAX_SIZE
    use_cache: shared.NoCache = True
    per_rank: shared.PerRank = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fixed and self.batch_size is None:
            raise RequestError(f"{named('no_auto_batch_size')} needs {written('batch_size', 'N')}")
        shared.check_fail_on_oom(self.fail_on_oom, fixed=self.fixed)
        if self.power_of_two and self.multiple_of & (self.multiple_of - 1):
            raise RequestError(
                f"{given('multiple_of', self.multiple_of)}: with {named('power_of_two')} it must be a power of two "
                "itself"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindSettings:
    """A search for a batch size."""

    workload: WorkloadRequest | None  # None: `own`
    own: OwnStep | None = None
    on_data: DataSelection = dataclasses.field(default_factory=DataSelection)
    max_tokens: shared.MaxTokens = None
    search: SearchSettings = dataclasses.field(default_factory=SearchSettings)
    isolate: Annotated[
        bool, Setting(help="Probe in a child process: a crash, a kill or a hang becomes a verdict.", panel=BATCH)
    ] = False
    output: Annotated[
        Path | None,
        Setting(
            help="Also write run.json into this folder.", flags=("-o", "--output"), panel=OUTPUT, metavar="DIR",
            check=path(),
        ),
    ] = None  # fmt: skip
    json_output: shared.JsonOutput = False

    arranged = staticmethod(with_own_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnobsSettings:
    """A model whose knobs are listed."""

    model: Annotated[str, Setting(help=_MODEL, argument=True, metavar="MODEL")]
    trust_remote_code: shared.TrustRemoteCode = False
    json_output: shared.JsonOutput = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListSettings:
    """How the cached plans are shown."""

    json_output: Annotated[bool, Setting(name="json", help="One JSON document on standard output.", only="flags")] = (
        False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClearSettings:
    """Nothing: every cached plan goes."""
