"""transformers models with their weights, tokenizer and processor, ready to evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError
from brim.models import hf_models
from brim.models.hf_models import Kind
from brim.models.loaded import LoadedModel, LoadRequest, ModelKind
from brim.workloads.knobs import Knob, check_knobs

__all__ = ["load"]

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
    if kind != "vision_language":  # a processor has options of its own, and says itself which
        writes = kind in ("causal", "seq2seq")
        check_knobs(request.knobs, (Knob(name="max_new_tokens", default=0),) if writes else (), owner=f"hf:{name}")
    dtype = request.dtype or hf_models.own_dtype(config)
    tokenizer = processor = None
    if kind == "vision_language":
        processor = _load_part("AutoProcessor", name, request)
        tokenizer = getattr(processor, "tokenizer", None)
    elif kind == "image":
        processor = _load_part("AutoImageProcessor", name, request)
    else:
        tokenizer = _load_part("AutoTokenizer", name, request)
    if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if kind == "sequence" and getattr(config, "pad_token_id", None) is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_token_id
    model, notes = hf_models.load_weights(name, config, kind, dtype, trust_remote_code=request.trust_remote_code)
    return LoadedModel(
        name=f"hf:{name}",
        kind=_KINDS[kind],
        module=model.to(request.device).eval(),
        device=request.device,
        dtype=dtype,
        tokenizer=tokenizer,
        processor=processor,
        transform=_image_transform(processor) if kind == "image" else None,
        class_names=_class_names(config) if kind in ("sequence", "image") else (),
        positions=hf_models.position_limit(config),
        identity=hf_models.files_identity(name, config),
        notes=notes,
    )


def _load_part(auto_class: str, name: str, request: LoadRequest) -> Any:
    place, options = hf_models.where(name)
    what = {"AutoTokenizer": "tokenizer", "AutoProcessor": "processor", "AutoImageProcessor": "image processor"}
    transformers = hf_models.transformers_library()
    try:
        part = getattr(transformers, auto_class).from_pretrained(
            place, trust_remote_code=request.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        held = ""
        if Path(place).is_dir():
            held = f"; the folder holds {', '.join(sorted(file.name for file in Path(place).iterdir())[:12])}"
        raise RequestError(
            f"MODEL hf:{name}: its {what[auto_class]} cannot be loaded ({reason}){held}. Save it into the folder with "
            f"save_pretrained, next to config.json"
        ) from error
    return part


class _ImageTransform:
    """A picture as the model's image processor sees it, [channels, height, width]; picklable, for worker processes."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Any) -> torch.Tensor:
        pixels: torch.Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def _image_transform(processor: Any) -> _ImageTransform:
    return _ImageTransform(processor)


def _class_names(config: Any) -> tuple[str, ...]:
    labels = getattr(config, "id2label", None)
    if not isinstance(labels, Mapping):
        return ()
    return tuple(str(labels[index]) for index in sorted(labels, key=int))
