"""Pictures and text as a vision-language model's processor makes them, one sample at a time, batched afterwards.

A processor batches for itself, but then a batch that is split after an out-of-memory error would have to be made again
from the pictures. So samples are processed alone, in worker processes, and put together here: what is as long as the
text is padded on the left, everything else is laid end to end. Not every processor's output may be put together so:
the first batch of every make-up (some samples without pictures, pictures of several sizes) is compared with the
processor's own, by a few of its samples, and where they differ the processor is asked for whole batches.

Pixels are most of what a sample weighs, so they are handled as little as can be: made as narrow as the model computes
in the worker process, and put together on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import SampleSet
from brim.data.images import image_size, load_image
from brim.evaluation.tasks.base import TaskSettings
from brim.evaluation.tasks.prompts import PromptWriter
from brim.memory.transfer import end_to_end
from brim.models.hf_image_tokens import count_crops, count_image_tokens
from brim.models.loaded import LoadedModel

__all__ = ["MultimodalInputs", "joined"]

_PATCH_AREA = 28 * 28  # pixels to a token, where the processor cannot say
_PIXELS = "pixel_values"  # how the names of pixels begin: of images, of videos
ROUNDING = 0.05  # of the largest pixel: two of 256 levels are 0.016
_COMPARED = 3  # samples of a batch, to see whether the processor would have put them together in the same way
_PATCH_NUMBERS = "image_token_pooling"  # Molmo2's: which patches become one token, counted over the whole batch


class MultimodalInputs:
    """Turns samples with pictures into batches of one model's inputs."""

    def __init__(self, model: LoadedModel, data: SampleSet, writer: PromptWriter, settings: TaskSettings) -> None:
        self._processor = model.processor
        self._samples = data.samples
        self._writer = writer
        self._options = dict(settings.processor_options)
        self._pad = model.tokenizer.pad_token_id or 0
        self._narrow = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else None
        self._checked: set[frozenset[str]] = set()  # the make-ups that were compared
        self._whole = False  # ask the processor for whole batches
        self.notes: list[str] = []
        self._tokens_by_size: dict[tuple[tuple[int, int], ...], int] = {}  # a processor takes milliseconds to count
        tokenizer = model.tokenizer
        if tokenizer is not None:
            tokenizer.padding_side = "left"

    def lengths(self) -> list[int]:
        """How many tokens each sample has: its text, and what its pictures come to."""
        texts = self._writer.token_ids([self._writer.text(sample.prompt or "") for sample in self._samples])
        return [len(ids) + self._image_tokens(item) for item, ids in enumerate(texts)]

    def prepare(self, item: int) -> dict[str, Any]:
        """One sample as its processor gives it; every tensor has a leading dimension."""
        return self._process([item])

    def seen(self, item: int, prepared: Mapping[str, Any]) -> dict[str, int]:
        """What a sample's pictures came to: tokens of its prompt, and crops where the model cuts pictures up."""
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
        """Samples as one batch, their pixels put together on the device if one is given."""
        if len(items) > 1 and not self._whole:
            self._compare(items, prepared)
        if self._whole:
            return self._process(items)
        return joined(prepared, pad=self._pad, device=device)

    def _compare(self, items: Sequence[int], prepared: Sequence[Mapping[str, Any]]) -> None:
        """At the first batch of a make-up: does the processor give the same for a few of these, as unlike as any?"""
        uneven = _uneven(prepared)
        if uneven in self._checked:
            return
        self._checked.add(uneven)
        places = _typical(prepared, uneven)
        ours = joined([prepared[place] for place in places], pad=self._pad)
        if not _same(ours, self._process([items[place] for place in places])):
            self._whole = True
            self.notes.append(
                f"{type(self._processor).__name__} makes other inputs of a batch than of its samples: it is asked for "
                "whole batches, in this process, which is slower"
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
        """Pixels as the model will convert them first of all, while they are still in the worker process."""
        if self._narrow is None or not name.startswith(_PIXELS) or not isinstance(value, torch.Tensor):
            return value
        return value.to(self._narrow) if value.is_floating_point() else value

    def _image_tokens(self, item: int) -> int:
        sizes = []
        for image in self._samples[item].images:
            try:
                width, height = image_size(image)
            except Exception:  # it will fail as a sample of its own when it is loaded
                continue
            sizes.append((height, width))
        if not sizes:
            return 0
        key = tuple(sizes)
        if key not in self._tokens_by_size:
            self._tokens_by_size[key] = self._count_tokens(sizes)
        return self._tokens_by_size[key]

    def _count_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """What pictures of these heights and widths come to, by the processor's own count where it has one."""
        counted = count_image_tokens(self._processor, sizes, self._options)
        if counted is not None:
            return counted
        return sum(height * width for height, width in sizes) // _PATCH_AREA + len(sizes)


def joined(prepared: Sequence[Mapping[str, Any]], *, pad: int, device: torch.device | None = None) -> dict[str, Any]:
    """Inputs of single samples as one batch: text padded on the left, pictures end to end, on a device if given."""
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in prepared for name in one):  # some samples may be without pictures
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
    """Every sample's patches counted on from the last of the sample before; below 0 there is none."""
    numbers, start = [], 0
    for one in holders:
        own = one[_PATCH_NUMBERS]
        numbers.append(torch.where(own >= 0, own + start, own))
        start += one["pixel_values"].shape[0] * one["pixel_values"].shape[1]  # [crops, patches, pixels]
    return numbers


def _uneven(prepared: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """What some samples lack, or have in other shapes than the rest."""
    names = {name for one in prepared for name in one}
    return frozenset(name for name in names if len({_shape(one.get(name)) for one in prepared}) > 1)


def _typical(prepared: Sequence[Mapping[str, Any]], uneven: frozenset[str]) -> list[int]:
    """Places of a few samples that differ from the first in all in which any does."""
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
    """The same numbers; of pixels nearly, since resizing rounds differently with another number of threads."""
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
