"""Images and text as a vision-language model reads them: each sample processed alone, then joined into batches.

A processor can make a whole batch itself, but a batch that is split after an out-of-memory error would then have to be
processed again from the image files. So samples are processed one at a time, in worker processes, and joined here:
tensors as long as the text are padded on the left, all others are concatenated. This is not right for every processor.
The first batch of each composition (some samples without images, images of several sizes) is therefore compared with
what the processor makes of a few of its samples together; where the two differ, the processor makes whole batches.

Pixels are most of a sample's bytes, so they are copied as little as possible: converted to the model's dtype in the
worker process, and concatenated on the device. Also counts how many tokens and crops images become.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from brim.data.base import SampleSet
from brim.data.images import image_size, load_image
from brim.memory.transfer import end_to_end
from brim.models.base import LoadedModel
from brim.models.hf_knobs import effective_option
from brim.tasks.base import TaskSettings
from brim.tasks.prompts import PromptWriter

__all__ = ["MultimodalInputs", "count_crops", "count_image_tokens", "joined"]

_PATCH_AREA = 28 * 28  # pixels per token, where the processor has no count of its own
_PIXELS = "pixel_values"  # prefix of the names of pixel tensors, of images and of videos
ROUNDING = 0.05  # of the largest pixel: two of 256 levels are 0.016
_COMPARED = 3  # samples of a batch that are compared with what the processor makes of them together
_PATCH_NUMBERS = "image_token_pooling"  # Molmo2's: which patches become one token, counted over the whole batch


class MultimodalInputs:
    """Turns samples with images into batches of one model's inputs."""

    def __init__(self, model: LoadedModel, data: SampleSet, writer: PromptWriter, settings: TaskSettings) -> None:
        self._processor = model.processor
        self._samples = data.samples
        self._writer = writer
        self._options = dict(settings.processor_options)
        self._pad = model.tokenizer.pad_token_id or 0
        self._narrow = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else None
        self._checked: set[frozenset[str]] = set()  # the compositions of batches that were compared
        self._whole = False  # the processor makes whole batches
        self.notes: list[str] = []
        self._tokens_by_size: dict[tuple[tuple[int, int], ...], int] = {}  # counting takes a processor milliseconds
        tokenizer = model.tokenizer
        if tokenizer is not None:
            tokenizer.padding_side = "left"

    def lengths(self) -> list[int]:
        """How many tokens each sample has, those of its images included."""
        texts = self._writer.token_ids([self._writer.text(sample.prompt or "") for sample in self._samples])
        return [len(ids) + self._image_tokens(item) for item, ids in enumerate(texts)]

    def prepare(self, item: int) -> dict[str, Any]:
        """One sample as the processor makes it; every tensor has a leading dimension."""
        return self._process([item])

    def seen(self, item: int, prepared: Mapping[str, Any]) -> dict[str, int]:
        """How many tokens a sample's images became, and how many crops where the model crops images."""
        kinds = prepared.get("mm_token_type_ids")
        tokens = int((kinds > 0).sum()) if isinstance(kinds, torch.Tensor) else self._image_tokens(item)
        crops = count_crops(prepared, len(self._samples[item].images))
        return {"vision_tokens": tokens} | ({} if crops is None else {"crops": crops})

    def batch(
        self,
        items: Sequence[int],
        prepared: Sequence[Mapping[str, Any]],
        *,
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Samples as one batch, their pixels concatenated on the device if one is given."""
        if len(items) > 1 and not self._whole:
            self._compare(items, prepared)
        if self._whole:
            return self._process(items)
        return joined(prepared, pad=self._pad, device=device)

    def _compare(self, items: Sequence[int], prepared: Sequence[Mapping[str, Any]]) -> None:
        """At the first batch of a composition: compare a few different samples with the processor's."""
        uneven = _uneven(prepared)
        if uneven in self._checked:
            return
        self._checked.add(uneven)
        places = _typical(prepared, uneven)
        ours = joined([prepared[place] for place in places], pad=self._pad)
        if not _same(ours, self._process([items[place] for place in places])):
            self._whole = True
            self.notes.append(
                f"{type(self._processor).__name__} makes different inputs of a batch than of its samples one by one: "
                "it makes whole batches, in this process, which is slower"
            )

    def _process(self, items: Sequence[int]) -> dict[str, Any]:
        samples = [self._samples[item] for item in items]
        texts = [self._writer.text(sample.prompt or "", images=len(sample.images)) for sample in samples]
        images = [[load_image(image) for image in sample.images] for sample in samples]
        arguments: dict[str, Any] = {"text": texts, "return_tensors": "pt", "padding": True, **self._options}
        if any(images):
            arguments["images"] = images
        if self._writer.chat:
            arguments["add_special_tokens"] = False
        return {name: self._narrowed(name, value) for name, value in self._processor(**arguments).items()}

    def _narrowed(self, name: str, value: Any) -> Any:
        """Pixels in the model's dtype, converted while they are still in the worker process."""
        if self._narrow is None or not name.startswith(_PIXELS) or not isinstance(value, torch.Tensor):
            return value
        return value.to(self._narrow) if value.is_floating_point() else value

    def _image_tokens(self, item: int) -> int:
        sizes = []
        for image in self._samples[item].images:
            try:
                width, height = image_size(image)
            except Exception:  # the sample fails when its image is loaded
                continue
            sizes.append((height, width))
        if not sizes:
            return 0
        key = tuple(sizes)
        if key not in self._tokens_by_size:
            self._tokens_by_size[key] = self._count_tokens(sizes)
        return self._tokens_by_size[key]

    def _count_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """The tokens of images of these heights and widths, by the processor's own count where it has one."""
        counted = count_image_tokens(self._processor, sizes, self._options)
        if counted is not None:
            return counted
        return sum(height * width for height, width in sizes) // _PATCH_AREA + len(sizes)


def joined(prepared: Sequence[Mapping[str, Any]], *, pad: int, device: torch.device | None = None) -> dict[str, Any]:
    """Inputs of single samples as one batch: text padded on the left, images concatenated, on a device if given."""
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in prepared for name in one):  # some samples may have no images
        holders = [one for one in prepared if name in one]
        parts = [one[name] for one in holders]
        if name == _PATCH_NUMBERS:
            parts = _renumbered(holders)
        if not isinstance(parts[0], torch.Tensor):
            batch[name] = [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
        elif all(one[name].shape == one["input_ids"].shape for one in holders):
            batch[name] = _left_padded(parts, pad if name == "input_ids" else 0)
        else:
            batch[name] = end_to_end(parts, device if parts[0].is_floating_point() else None)
    return batch


def _renumbered(holders: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Each sample's patch numbers, continued from those of the sample before; below 0 stands for no patch."""
    numbers, start = [], 0
    for one in holders:
        own = one[_PATCH_NUMBERS]
        numbers.append(torch.where(own >= 0, own + start, own))
        start += one["pixel_values"].shape[0] * one["pixel_values"].shape[1]  # [crops, patches, pixels]
    return numbers


def _uneven(prepared: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The inputs that some samples lack, or have in other shapes than the rest."""
    names = {name for one in prepared for name in one}
    return frozenset(name for name in names if len({_shape(one.get(name)) for one in prepared}) > 1)


def _typical(prepared: Sequence[Mapping[str, Any]], uneven: frozenset[str]) -> list[int]:
    """Indices of a few samples that together show every difference from the first."""
    places = {0}
    for name in uneven:
        first = _shape(prepared[0].get(name))
        places.add(next(place for place, one in enumerate(prepared) if _shape(one.get(name)) != first))
    places.update(range(min(_COMPARED, len(prepared))))
    return sorted(places)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)


def _left_padded(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    longest = max(part.shape[1] for part in parts)
    rows = parts[0].new_full((sum(part.shape[0] for part in parts), longest), fill)
    for row, part in enumerate(parts):
        rows[row, longest - part.shape[1] :] = part[0]
    return rows


def _equal(mine: torch.Tensor, value: torch.Tensor) -> bool:
    """Equal, and for pixels nearly so: resizing rounds differently with another number of threads."""
    if not value.is_floating_point() or value.numel() == 0:
        return torch.equal(mine, value)
    most = (mine.float() - value.float()).abs().max().item()
    return most <= ROUNDING * max(value.float().abs().max().item(), 1e-6)


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if set(ours) != set(theirs):
        return False
    for name, value in theirs.items():
        mine = ours[name]
        if isinstance(value, torch.Tensor):
            same = isinstance(mine, torch.Tensor) and mine.shape == value.shape and _equal(mine, value)
        else:
            same = bool(mine == value)
        if not same:
            return False
    return True


def count_image_tokens(processor: Any, sizes: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> int | None:
    """The tokens of images of these (height, width) under these processor options; None if it has no count."""
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
    """How many crops one sample's images became, not counting the overview that some models add.

    Processors return crops in one of three ways: with a count (Molmo2), as rows, or as rows under each image. None
    where an image is not cropped but becomes a row of patches (Qwen2-VL).
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
    """Restore the class's defaults: several counters write the options of a call into them, for every later call."""
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None)
    kept = copy.deepcopy(defaults)
    try:
        yield
    finally:
        if defaults is not None:
            defaults.clear()
            defaults.update(kept)


def _pan_and_scan_crops(processor: Any, size: tuple[int, int], options: Mapping[str, Any]) -> int:
    """Gemma3's crops, which its own count omits."""
    cut = getattr(processor.image_processor, "pan_and_scan_batched", None)
    if cut is None or not options.get("do_pan_and_scan", effective_option(processor, "do_pan_and_scan")):
        return 0
    names = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    how = {name: options.get(name, effective_option(processor, name)) for name in names}
    return len(cut(torch.empty(1, 3, *size, device="meta"), **how))  # nothing is computed


def _tokens_of_crop(processor: Any) -> int:
    return int(getattr(processor, "image_seq_length", 0))
