"""How many tokens pictures come to, by the count that transformers' processors keep for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from brim.models.hf_knobs import effective_option

__all__ = ["count_crops", "count_image_tokens"]


def count_image_tokens(processor: Any, sizes: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> int | None:
    """The tokens of pictures of these (height, width) under these options of the call; None if it cannot say."""
    counter = getattr(processor, "_get_num_multimodal_tokens", None)
    if counter is None:
        return None
    try:
        with _defaults_kept(processor):
            tokens = int(sum(counter(image_sizes=list(sizes), **options)["num_image_tokens"]))
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        return None
    return tokens + sum(_pan_and_scan_crops(processor, size, options) for size in sizes) * _tokens_of_crop(processor)


def count_crops(prepared: Mapping[str, Any], images: int) -> int | None:
    """Into how many crops so many pictures of one sample were cut, not counting the overview beside them.

    Processors hand crops out in one of three ways: with a count (Molmo2), as rows, or as rows under each picture. None
    where pictures are no crops but a row of patches (Qwen2-VL).
    """
    counts, pixels = prepared.get("image_num_crops"), prepared.get("pixel_values")
    if isinstance(counts, torch.Tensor):
        crops = int(counts.sum())
    elif isinstance(pixels, torch.Tensor) and pixels.dim() in (4, 5):  # […, channels, height, width]
        crops = int(pixels.shape[:-3].numel())
    else:
        return None
    return crops - images if crops > images else crops


@contextmanager
def _defaults_kept(processor: Any) -> Iterator[None]:
    """Several counters write the options that they are given into their class's defaults, for every later call."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None)
    kept = copy.deepcopy(defaults)
    try:
        yield
    finally:
        if defaults is not None:
            defaults.clear()
            defaults.update(kept)


def _pan_and_scan_crops(processor: Any, size: tuple[int, int], options: Mapping[str, Any]) -> int:
    """Gemma3's crops, which its own count leaves out."""
    cut = getattr(processor.image_processor, "pan_and_scan_batched", None)
    if cut is None or not options.get("do_pan_and_scan", effective_option(processor, "do_pan_and_scan")):
        return 0
    names = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    how = {name: options.get(name, effective_option(processor, name)) for name in names}
    return len(cut(torch.empty(1, 3, *size, device="meta"), **how))  # nothing is computed


def _tokens_of_crop(processor: Any) -> int:
    return int(getattr(processor, "image_seq_length", 0))
