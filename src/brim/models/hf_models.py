"""Models of transformers, from a folder or by id. transformers is imported on use.

A configuration falls into one of a few kinds, and the kind decides the class, the batches and the knobs.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from brim.errors import BrimError, RequestError, first_line, nearest_names
from brim.memory.failures import FailureKind, classify
from brim.models.base import ModelParts, PartsRequest
from brim.models.batches import (
    plain_token_range,
    random_floats,
    random_integers,
    special_token_ids,
    token_batch,
    token_knobs,
)
from brim.models.hf_knobs import KnobParts, apply_knobs, list_knobs
from brim.models.names import model_folders_near
from brim.records import Mode
from brim.settings.caller import named, pair, written
from brim.workloads.knobs import Knob

__all__ = [
    "Kind", "build_parts", "family_names", "files_identity", "kind_of", "load_config", "load_weights", "model_knobs",
    "natural_mode", "own_dtype", "position_limit", "transformers_library", "unreadable", "where",
]  # fmt: skip

Kind = Literal["causal", "seq2seq", "masked", "sequence", "token", "encoder", "image", "vision_language"]

_AUTO_CLASSES: dict[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "encoder": "AutoModel",
    "image": "AutoModelForImageClassification",
    "vision_language": "AutoModelForImageTextToText",
}
_ARCHITECTURE_ENDINGS: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForImageClassification": "image",
}
_OFFSET_POSITIONS = (
    "roberta",
    "camembert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "longformer",
    "mpnet",
    "xmod",
    "data2vec-text",
)


_AT_LEAST_ONE = ("hidden_size", "num_attention_heads", "vocab_size")


def natural_mode(name: str, *, trust_remote_code: bool = False) -> Mode:
    """Generation for a model that generates, else a forward."""
    return "generate" if _generates(_batched_kind(name, load_config(name, trust_remote_code))) else "forward"


def model_knobs(name: str, *, trust_remote_code: bool = False) -> tuple[Knob, ...]:
    """`tokens`, `max_new_tokens` and those that change the model itself; `size` for an image classifier."""
    config = load_config(name, trust_remote_code)
    kind = _batched_kind(name, config)
    if kind != "image":
        lengths = token_knobs(position_limit(config), generates=_generates(kind), shared=kind == "causal")
        others = list_knobs(KnobParts(config=config, kind=kind))
        return (*lengths, *(knob for knob in others if knob.name not in {length.name for length in lengths}))
    size = getattr(config, "image_size", None)
    if isinstance(size, int):  # position embeddings fix the size
        return (Knob(name="size", default=size, help="fixed by config.json", minimum=size, maximum=size),)
    return (Knob(name="size", default=224, help="height and width of the input in pixels", minimum=1),)


def build_parts(request: PartsRequest) -> ModelParts:
    """The model with its weights, or random ones for a folder that has none, and worst-case batches."""
    config = load_config(request.name, request.trust_remote_code)
    kind = _batched_kind(request.name, config)
    if request.mode == "generate" and not _generates(kind):
        raise RequestError(
            f"{written('mode', 'generate')}: hf:{request.name} does not generate; use {written('mode', 'forward')} or "
            "train"
        )
    if kind == "causal" and request.mode == "generate":
        _check_total_length(request, position_limit(config))
    dtype = request.dtype or own_dtype(config)
    model, notes = load_weights(request.name, config, kind, dtype, trust_remote_code=request.trust_remote_code)
    apply_knobs(request.knobs, KnobParts(config=config, kind=kind, module=model))
    if request.mode != "generate":
        _turn_cache_off(model)
        if kind == "causal":
            notes = (*notes, *_unused_knob(request, config))
    make_inputs, make_train_batch = _batch_makers(request, config, kind)
    return ModelParts(
        model=model,
        dtype=dtype,
        make_inputs=make_inputs,
        make_train_batch=make_train_batch,
        loss=_hidden_state_loss if kind == "encoder" else _own_loss,
        max_new_tokens=request.knobs["max_new_tokens"] if _generates(kind) else None,
        identity=files_identity(request.name, config),
        notes=notes,
    )


def _turn_cache_off(model: nn.Module) -> None:
    """A single forward needs no key-value cache; encoder and decoder may have separate configurations."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            vars(config)["use_cache"] = False


def _unused_knob(request: PartsRequest, config: Any) -> tuple[str, ...]:
    *_, new_tokens = token_knobs(position_limit(config), generates=True)
    if request.knobs["max_new_tokens"] == new_tokens.default:
        return ()
    return (f"max_new_tokens={request.knobs['max_new_tokens']} has no effect in mode {request.mode}",)


def _encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _generates(kind: Kind) -> bool:
    return kind in ("causal", "seq2seq")


def _batch_makers(request: PartsRequest, config: Any, kind: Kind) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inputs for forward and generate, and the same with labels for training."""
    knobs = request.knobs
    labels = getattr(config, "num_labels", 2)
    id_range = (0, 0) if kind == "image" else _id_range(config)

    def make_inputs(size: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if kind == "image":
            shape = (size, getattr(config, "num_channels", 3), knobs["size"], knobs["size"])
            return {"pixel_values": random_floats(shape, device=device, dtype=dtype)}
        batch = token_batch(size, knobs["tokens"], id_range, device)
        if kind == "seq2seq" and request.mode == "forward":
            batch["decoder_input_ids"] = random_integers(*id_range, (size, knobs["max_new_tokens"]), device=device)
        return batch

    def make_train_batch(size: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        batch = make_inputs(size, device, dtype)
        if kind in ("causal", "masked"):
            batch["labels"] = batch["input_ids"]
        elif kind == "seq2seq":
            batch["labels"] = random_integers(*id_range, (size, knobs["max_new_tokens"]), device=device)
        elif kind == "token":
            batch["labels"] = random_integers(0, labels, (size, knobs["tokens"]), device=device)
        elif kind != "encoder" and labels == 1:  # regression
            batch["labels"] = random_floats((size,), device=device)
        elif kind != "encoder":
            batch["labels"] = random_integers(0, labels, (size,), device=device)
        return batch

    return make_inputs, make_train_batch


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _hidden_state_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """An encoder without a head has no loss; the backward from any scalar of its output costs the same."""
    hidden: torch.Tensor = model(**batch).last_hidden_state
    return hidden.float().square().mean()


def where(name: str) -> tuple[str, dict[str, str]]:
    """The folder or id that transformers loads from, and the options that name a single GGUF file in it."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if not path.is_dir():
        return name, {}
    if (path / "config.json").is_file():
        return str(path), {}
    single = sorted(path.glob("*.gguf"))
    if len(single) == 1:
        return str(path), {"gguf_file": single[0].name}
    other = f"; for the model of that name write torchvision:{name} or timm:{name}" if path.name == name else ""
    raise RequestError(f"MODEL {name}: the folder has no config.json, so it is not a transformers model{other}")


def family_names() -> tuple[str, ...]:
    """The families of models that transformers knows, such as `llama`; none where it is not installed."""
    try:
        return tuple(transformers_library().models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    except RequestError:
        return ()


def load_config(name: str, trust_remote_code: bool) -> Any:
    """The configuration of a folder or id; what cannot be read is a `RequestError`."""
    place, options = where(name)
    try:
        auto = transformers_library().AutoConfig
        config = auto.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    except BrimError:
        raise
    except Exception as error:  # a file that is cut short, values of another type, the configuration's own code
        if not Path(place).exists():  # neither a folder nor on the hub
            near = nearest_names(name, model_folders_near(name))
            raise RequestError(f"{unreadable(name, error)}{near}") from error
        raise unreadable(name, error, what=options.get("gguf_file", "config.json")) from error
    _check_config(name, config)
    return config


def _check_config(name: str, config: Any) -> None:
    """Refuse values of config.json that transformers accepts and no model can have."""
    architectures = getattr(config, "architectures", None) or []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise RequestError(
            f"MODEL hf:{name}: config.json: architectures is {architectures!r}, not a list of class names"
        )
    for field in _AT_LEAST_ONE:
        value = getattr(config.get_text_config(), field, None)
        if isinstance(value, int) and value < 1:
            raise RequestError(f"MODEL hf:{name}: config.json: {field} is {value}; it must be at least 1")


def load_weights(
    name: str, config: Any, kind: Kind, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """The model with its weights, or random ones for a folder that holds none, and notes for the user."""
    transformers = transformers_library()
    auto_class = getattr(transformers, _AUTO_CLASSES[kind])
    place, options_of_file = where(name)
    folder = Path(place)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options[_dtype_argument()] = dtype
    if kind == "sequence" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # without one, a decoder with a classification head takes single samples only
    try:
        with _quiet_progress(transformers):
            if options_of_file:
                return auto_class.from_pretrained(place, **options_of_file, **options), ()
            if folder.is_dir() and not _weight_files(folder):
                model = auto_class.from_config(config, **options)
                return model, (f"random weights: {name} holds no weights beside config.json",)
            if folder.is_dir() and any(file.suffix == ".safetensors" for file in _weight_files(folder)):
                options["use_safetensors"] = True
            return auto_class.from_pretrained(place, config=config, **options), ()
    except Exception as error:  # a file that was cut short, weights of other shapes, the model's own code
        if classify(error).kind is FailureKind.OUT_OF_MEMORY:
            raise
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception, *, what: str | None = None) -> RequestError:
    """A model that cannot be loaded, or one file of it, and the reason in one line."""
    reason = first_line(error)
    below = " ".join(str(error).strip().splitlines()[1:]).strip()
    if reason.endswith(":") and below:  # a validator of transformers, with the field on the lines below
        reason = below
    elif not isinstance(error, (OSError, ValueError)) and reason != type(error).__name__:
        reason = f"{type(error).__name__}: {reason}"  # `integer modulo by zero` alone explains little
    if "trust_remote_code" in str(error):
        reason += f" (its code is run only with {named('trust_remote_code')})"
    return RequestError(f"MODEL hf:{name} cannot be loaded{f' ({what})' if what else ''}: {reason}")


def kind_of(name: str, config: Any) -> Kind:
    """What a configuration is for."""
    from transformers.models.auto import modeling_auto as auto

    architecture = (getattr(config, "architectures", None) or [""])[0]
    model_type = config.model_type
    by_ending = next((kind for end, kind in _ARCHITECTURE_ENDINGS.items() if architecture.endswith(end)), None)
    if by_ending is None and (
        hasattr(config, "vision_config") or model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    ):
        return "vision_language"
    remote = getattr(config, "auto_map", None) or {}
    if _encoder_decoder(config) and model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    if by_ending is not None:
        return by_ending
    if _encoder_decoder(config):  # speech, documents, time series
        raise _unknown_batches(name, architecture or model_type)
    has_vocabulary = getattr(config.get_text_config(), "vocab_size", None) is not None
    if has_vocabulary and architecture.endswith("Model"):
        return "encoder"
    if (
        has_vocabulary
        and model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not getattr(config, "is_decoder", False)
    ):
        return "masked"
    if model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in remote:
        return "causal"
    if model_type in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image"
    raise _unknown_batches(name, architecture or model_type)


def _batched_kind(name: str, config: Any) -> Kind:
    """The kind of a model whose worst-case batches can be made from its configuration alone."""
    kind = kind_of(name, config)
    if kind == "vision_language":
        raise RequestError(
            f"MODEL hf:{name}: {config.model_type} is a vision-language model, whose batches depend on its processor; "
            "give data with -d, or its batches with py:FILE:FACTORY"
        )
    if kind != "image" and getattr(config.get_text_config(), "vocab_size", None) is None:  # characters, sounds
        raise _unknown_batches(name, config.model_type)
    return kind


def _unknown_batches(name: str, what: str) -> RequestError:
    return RequestError(
        f"MODEL hf:{name}: brim knows no batches for {what} (it knows language models, text encoders and image "
        "classifiers); write a factory for it: py:FILE:FACTORY"
    )


def position_limit(config: Any) -> int | None:
    """How many tokens the model has positions for, or None if unknown."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    if config.model_type in _OFFSET_POSITIONS:  # positions are counted from the padding id on
        limit -= (getattr(config, "pad_token_id", None) or 0) + 1
    return limit


def _check_total_length(request: PartsRequest, limit: int | None) -> None:
    tokens, new_tokens = request.knobs["tokens"], request.knobs["max_new_tokens"]
    if limit is not None and tokens + new_tokens > limit:
        raise RequestError(
            f"{pair('knob', 'tokens', tokens)} {pair('knob', 'max_new_tokens', new_tokens)}: together "
            f"{tokens + new_tokens}, but hf:{request.name} has {limit} positions; use at most "
            f"tokens={max(limit - new_tokens, 1)}"
        )


def _id_range(config: Any) -> tuple[int, int]:
    vocabulary = config.get_text_config().vocab_size
    return plain_token_range(vocabulary, special_token_ids(config.to_dict()))


def own_dtype(config: Any) -> torch.dtype:
    """The dtype that config.json names, else float32."""
    attribute = _dtype_argument()
    for holder in (config, config.get_text_config()):
        named = getattr(holder, attribute, None)
        dtype = getattr(torch, named, None) if isinstance(named, str) else named
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return torch.float32


def _dtype_argument() -> str:
    """What transformers calls the dtype: its name changed with version 5."""
    return "dtype" if int(transformers_library().__version__.split(".")[0]) >= 5 else "torch_dtype"


def _weight_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"), *folder.glob("*.gguf")])


def files_identity(name: str, config: Any) -> dict[str, Any]:
    """An identity of the weights without reading them: names, sizes and times of their files."""
    folder = Path(where(name)[0])
    if not folder.is_dir():
        return {"commit": getattr(config, "_commit_hash", None)}
    files = [(file.name, file.stat()) for file in _weight_files(folder)]
    described = folder / "config.json"
    return {
        "folder": str(folder.resolve()),
        "config": hashlib.sha256(described.read_bytes()).hexdigest() if described.is_file() else None,
        "weights": [[file, stat.st_size, stat.st_mtime_ns] for file, stat in files],
    }


@contextmanager
def _quiet_progress(transformers: Any) -> Iterator[None]:
    """Progress bars only on a terminal."""
    logging = transformers.utils.logging
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def transformers_library() -> Any:
    """transformers, or how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise RequestError(f"hf models need transformers ({error}): pip install 'brim[hf]'") from error
    return transformers
