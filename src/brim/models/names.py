"""What a MODEL argument means. Pure: existing names are passed in, nothing is imported.

1. A prefix decides: `torchvision:NAME`, `timm:NAME`, `hf:FOLDER_OR_ID`, `py:FILE_OR_MODULE:FACTORY`.
2. An existing folder, or GGUF file, is `hf`.
3. A name exactly as torchvision spells it, then as timm spells it, case and punctuation aside (`ResNet-50`).
4. A friendly alias from the table below (`vit_base`).
5. The beginning of exactly one name, up to an underscore: `r3d` is `r3d_18`; torchvision's first, then timm's.

Two candidates or none is a `RequestError` with the candidates or the nearest names.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from brim.errors import RequestError, nearest_names

__all__ = ["ALIASES", "ModelName", "Source", "choose_name", "model_folders_near", "split_prefix"]

Source = Literal["torchvision", "timm", "hf", "py"]

ALIASES = {
    "vit_tiny": "timm:vit_tiny_patch16_224",
    "vit_small": "timm:vit_small_patch16_224",
    "vit_base": "torchvision:vit_b_16",
    "vit_large": "torchvision:vit_l_16",
    "vit_huge": "torchvision:vit_h_14",
    "deit_tiny": "timm:deit_tiny_patch16_224",
    "deit_small": "timm:deit_small_patch16_224",
    "deit_base": "timm:deit_base_patch16_224",
    "swin_tiny": "torchvision:swin_t",
    "swin_small": "torchvision:swin_s",
    "swin_base": "torchvision:swin_b",
    "swin_v2_tiny": "torchvision:swin_v2_t",
    "swin_v2_small": "torchvision:swin_v2_s",
    "swin_v2_base": "torchvision:swin_v2_b",
    "video_swin_tiny": "torchvision:swin3d_t",
    "video_swin_small": "torchvision:swin3d_s",
    "video_swin_base": "torchvision:swin3d_b",
    "mvit_small": "torchvision:mvit_v2_s",
    "mvit_base": "torchvision:mvit_v1_b",
    "maxvit_tiny": "torchvision:maxvit_t",
    "efficientnet_v2_small": "torchvision:efficientnet_v2_s",
    "efficientnet_v2_medium": "torchvision:efficientnet_v2_m",
    "efficientnet_v2_large": "torchvision:efficientnet_v2_l",
    "resnet3d": "torchvision:r3d_18",
    "resnet3d_18": "torchvision:r3d_18",
}

_MOST_CANDIDATES = 8  # in one message


@dataclasses.dataclass(frozen=True)
class ModelName:
    """A model and where it comes from; its text is the name with the prefix."""

    source: Source
    name: str

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


def split_prefix(text: str) -> ModelName | None:
    """The model that a prefix, or an existing folder, names; None when the name must be looked up."""
    if not text.strip():
        raise RequestError("MODEL is empty: give a name such as resnet50, a folder, or py:FILE:FACTORY")
    prefix, colon, name = text.partition(":")
    if colon and prefix in get_args(Source):
        if not name:
            raise RequestError(f"MODEL {text!r}: nothing after the prefix {prefix}:")
        return ModelName(prefix, name)  # type: ignore[arg-type]  # it is one of them
    path = Path(text).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return ModelName("hf", text)
    if path.is_file():
        raise RequestError(
            f"MODEL {text!r}: it is a file; a model is a name, a folder, a .gguf file or a function of a Python file "
            "(py:FILE:FACTORY), data goes to -d"
        )
    if colon and Path(prefix).suffix == ".py":
        raise RequestError(f"MODEL {text!r}: for a factory in a Python file write py:{text}")
    if colon:
        prefixes = [f"{source}:" for source in get_args(Source)]
        near = nearest_names(f"{prefix.lower()}:", prefixes)
        raise RequestError(f"MODEL {text!r}: unknown prefix {prefix}:; the prefixes are {', '.join(prefixes)}{near}")
    if "/" in text:
        near = nearest_names(text, model_folders_near(text))
        raise RequestError(
            f"MODEL {text!r}: there is no such folder; for a model of the Hugging Face hub write hf:{text}{near}"
        )
    return None


def model_folders_near(text: str) -> list[str]:
    """Folders of transformers models and GGUF files beside the path in the text, spelled as the text is."""
    beginning = text[: text.rfind("/") + 1]
    place = Path(beginning or ".").expanduser()
    try:
        entries = sorted(place.iterdir())
    except OSError:  # missing or unreadable: nothing to suggest
        return []
    return [f"{beginning}{one.name}" for one in entries if one.suffix == ".gguf" or (one / "config.json").is_file()]


def choose_name(
    text: str,
    *,
    torchvision: Callable[[], Sequence[str]],
    timm: Callable[[], Sequence[str]],
    families: Callable[[], Sequence[str]] = tuple,
) -> ModelName:
    """The one model that a name without prefix means; timm's names are read only if torchvision's do not match."""
    lists: tuple[tuple[Source, Callable[[], Sequence[str]]], ...] = (("torchvision", torchvision), ("timm", timm))
    for source, names in lists:
        found = _same_name(text, names())
        if found is not None:
            return ModelName(source, found)
    alias = {_plain(key): target for key, target in ALIASES.items()}.get(_plain(text))
    if alias is not None:
        found_name = split_prefix(alias)
        assert found_name is not None
        return found_name
    for source, names in lists:
        candidates = [name for name in names() if _plain(name).startswith(f"{_plain(text)}_")]
        if len(candidates) == 1:
            return ModelName(source, candidates[0])
        if candidates:
            raise RequestError(f"MODEL {text!r} could be {_listed(candidates)}; give one of them in full")
    raise RequestError(
        f"MODEL {text!r}: no such folder, and no torchvision or timm model of that name"
        f"{_missing([source for source, names in lists if not names()])}"
        f"{_nearest(text, [*torchvision(), *timm()])}{_of_a_family(text, families())}"
    )


def _missing(sources: Sequence[str]) -> str:
    """What to install where a library has no names, since it is not there."""
    return f" (not installed here: {', '.join(sources)}; pip install 'brim[vision]')" if sources else ""


def _of_a_family(text: str, families: Sequence[str]) -> str:
    """What to write for a model of transformers, where a name is close to that of a family."""
    near = difflib.get_close_matches(text.lower(), families, n=1, cutoff=0.8)
    return f" For a {near[0]} model of transformers give its folder, or hf:ORG/NAME" if near else ""


def _nearest(text: str, names: Sequence[str]) -> str:
    """The nearest of all ways to write a model: folders here, aliases, names, and beginnings of names."""
    beginnings = ("_".join(name.split("_")[:count]) for name in names for count in range(1, name.count("_") + 1))
    known = [*model_folders_near(text), *(ALIASES if names else ()), *names, *beginnings]
    return nearest_names(text.lower(), dict.fromkeys(known))  # each once


def _same_name(text: str, names: Iterable[str]) -> str | None:
    """The name spelled so, else the only one that differs in case and punctuation alone."""
    names = tuple(names)
    if text in names:
        return text
    squeezed = _plain(text).replace("_", "")
    same = [name for name in names if _plain(name).replace("_", "") == squeezed]
    return same[0] if len(same) == 1 else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _listed(names: Sequence[str]) -> str:
    more = f" or {len(names) - _MOST_CANDIDATES} more" if len(names) > _MOST_CANDIDATES else ""
    return ", ".join(names[:_MOST_CANDIDATES]) + more
