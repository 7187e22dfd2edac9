"""transformers models with their weights, tokenizer and processor, ready to evaluate."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, first_line
from brim.memory.weights import place_weights
from brim.models import hf_knobs, hf_models
from brim.models.base import LoadedModel, LoadRequest, ModelKind
from brim.models.hf_knobs import KnobParts
from brim.models.hf_models import Kind
from brim.workloads.knobs import Knob

__all__ = ["load", "load_tokenizer", "model_knobs", "parse_knobs", "with_knobs"]

_KINDS: dict[Kind, ModelKind] = {
    "causal": "language",
    "seq2seq": "seq2seq",
    "vision_language": "vision_language",
    "sequence": "text_classifier",
    "image": "image_classifier",
}


def load(name: str, request: LoadRequest) -> LoadedModel:
    """A folder or id as a model that can be evaluated."""
    config = hf_models.load_config(name, request.trust_remote_code)
    kind = hf_models.kind_of(name, config)
    if kind not in _KINDS:
        raise RequestError(
            f"MODEL hf:{name}: {config.model_type} is a model of the kind {kind!r}, which no task evaluates; brim "
            "evaluates language, vision-language and sequence-to-sequence models and classifiers"
        )
    dtype = request.dtype or hf_models.own_dtype(config)
    tokenizer = processor = None
    if kind == "vision_language":
        processor = _load_part("AutoProcessor", name, request.trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", None)
    positions = hf_models.position_limit(config)
    parts = KnobParts(config=config, kind=kind, positions=positions, processor=processor)
    chosen = hf_knobs.choose_knobs(request.knobs, parts, owner=f"hf:{name}")
    if kind == "image":
        processor = _load_part("AutoImageProcessor", name, request.trust_remote_code)
    elif kind != "vision_language":
        tokenizer = _load_part("AutoTokenizer", name, request.trust_remote_code)
    if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if kind == "sequence" and getattr(config, "pad_token_id", None) is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_token_id
    model, notes = hf_models.load_weights(name, config, kind, dtype, trust_remote_code=request.trust_remote_code)
    if kind in ("causal", "vision_language") and tokenizer is not None:
        _pad_with_a_known_token(model, tokenizer)
    hf_knobs.apply_knobs(chosen.values, dataclasses.replace(parts, module=model))
    identity = hf_models.files_identity(name, config)
    return LoadedModel(
        name=f"hf:{name}",
        kind=_KINDS[kind],
        module=place_weights(model, request.device, name=f"hf:{name}").eval(),
        device=request.device,
        dtype=dtype,
        tokenizer=tokenizer,
        processor=processor,
        transform=_ImageTransform(processor) if kind == "image" else None,
        class_names=_class_names(config) if kind in ("sequence", "image") else (),
        positions=positions,
        processor_options=chosen.processor_options,
        identity={**identity, "knobs": dict(chosen.values)} if chosen.values else identity,
        notes=notes,
    )


def _pad_with_a_known_token(model: Any, tokenizer: Any) -> None:
    """A padding token that was added to the tokenizer alone has no embedding: on a GPU, looking it up ends the process.

    Which token takes its place changes no answer.
    """
    known, end = getattr(model.config.get_text_config(decoder=True), "vocab_size", sys.maxsize), tokenizer.eos_token_id
    if (tokenizer.pad_token_id or 0) >= known:
        tokenizer.pad_token_id = end if end is not None and end < known else 0
    generation: Any = getattr(model, "generation_config", None)
    if (getattr(generation, "pad_token_id", None) or 0) >= known:
        generation.pad_token_id = tokenizer.pad_token_id


def with_knobs(loaded: LoadedModel, knobs: Mapping[str, Any]) -> LoadedModel | None:
    """A loaded model with other knobs; None if it must be loaded again, because removed layers cannot come back."""
    if not hf_knobs.can_change_to(loaded.identity.get("knobs", {}), knobs):
        return None  # checked first: the ranges below are those of the model without what was removed
    kind = next(kind for kind, named in _KINDS.items() if named == loaded.kind)
    parts = KnobParts(
        config=loaded.module.config,
        kind=kind,
        positions=loaded.positions,
        processor=loaded.processor if kind == "vision_language" else None,
        module=loaded.module,
    )
    chosen = hf_knobs.choose_knobs(knobs, parts, owner=loaded.name)
    hf_knobs.apply_knobs(chosen.values, parts)
    identity = {name: value for name, value in loaded.identity.items() if name != "knobs"}
    return dataclasses.replace(
        loaded,
        processor_options=chosen.processor_options,
        identity={**identity, "knobs": dict(chosen.values)} if chosen.values else identity,
    )


def parse_knobs(name: str, asked: Sequence[Mapping[str, Any]], *, trust_remote_code: bool) -> list[dict[str, Any]]:
    """Several settings of knobs, checked and parsed, without reading the model's weights."""
    config = hf_models.load_config(name, trust_remote_code)
    kind = hf_models.kind_of(name, config)
    processor = _load_part("AutoProcessor", name, trust_remote_code) if kind == "vision_language" else None
    parts = KnobParts(config=config, kind=kind, positions=hf_models.position_limit(config), processor=processor)
    chosen = [hf_knobs.choose_knobs(one, parts, owner=f"hf:{name}") for one in asked]
    return [
        {knob: one.values.get(knob, one.processor_options.get(knob)) for knob in given}
        for given, one in zip(asked, chosen, strict=True)
    ]


def model_knobs(name: str, *, trust_remote_code: bool = False) -> tuple[Knob, ...]:
    """The knobs of a folder or id; those of a vision-language model from its processor, without weights."""
    config = hf_models.load_config(name, trust_remote_code)
    if hf_models.kind_of(name, config) != "vision_language":
        return hf_models.model_knobs(name, trust_remote_code=trust_remote_code)
    processor = _load_part("AutoProcessor", name, trust_remote_code)
    positions = hf_models.position_limit(config)
    return hf_knobs.list_knobs(
        KnobParts(config=config, kind="vision_language", positions=positions, processor=processor)
    )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or id, without the model's weights."""
    return _load_part("AutoTokenizer", name, trust_remote_code)


def _load_part(auto_class: str, name: str, trust_remote_code: bool) -> Any:
    place, options = hf_models.where(name)
    what = {"AutoTokenizer": "tokenizer", "AutoProcessor": "processor", "AutoImageProcessor": "image processor"}
    transformers = hf_models.transformers_library()
    try:
        part = getattr(transformers, auto_class).from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # missing or broken files, a missing library, the part's own code
        reason = first_line(error)
        held = ""
        if Path(place).is_dir():
            held = f"; the folder holds {', '.join(sorted(file.name for file in Path(place).iterdir())[:12])}"
        raise RequestError(
            f"MODEL hf:{name}: its {what[auto_class]} cannot be loaded ({reason}){held}. Save it into the folder with "
            f"save_pretrained, next to config.json"
        ) from error
    return part


class _ImageTransform:
    """An image as the model's image processor prepares it, [channels, height, width]; picklable for workers."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Any) -> torch.Tensor:
        pixels: torch.Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def _class_names(config: Any) -> tuple[str, ...]:
    labels = getattr(config, "id2label", None)
    if not isinstance(labels, Mapping):
        return ()
    return tuple(str(labels[index]) for index in sorted(labels, key=int))
