"""What a model is trained on, item by item: each kind of data knows how to prepare one and to batch several."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from brim.data.base import Sample
from brim.data.images import load_image
from brim.data.video import load_video
from brim.errors import RequestError, plural
from brim.memory.transfer import replaced, stacked
from brim.running.loader import LoaderSettings
from brim.training.draws import drawing_from
from brim.training.objective import Batch

__all__ = ["ImageItems", "Items", "OwnItems", "StackedItems", "TensorItems", "TextItems", "VideoItems", "labels_tensor"]


class Items(abc.ABC):
    """A split of a data set as the loop sees it: numbered items, each with an id, a cost and a label."""

    loads = True  # whether preparing an item takes long enough to be worth a process
    uniform = True  # whether every item costs the same
    copied = True  # whether joining items leaves nothing of the tensors that were prepared

    def __init__(self, ids: Sequence[str], labels: torch.Tensor | None) -> None:
        self.ids = ids
        self.labels = labels  # [items]: classes as whole numbers, or values

    def __len__(self) -> int:
        return len(self.ids)

    def cost(self, item: int) -> int:
        """What an item weighs in a batch."""
        del item
        return 1

    @abc.abstractmethod
    def prepare(self, item: int) -> Any:
        """One item as model input on the host; runs in worker processes."""

    def loading(self, settings: LoaderSettings) -> LoaderSettings:
        """The settings with what these items allow."""
        return dataclasses.replace(settings, pool="always" if self.copied else "never")

    def prepare_in(self, epoch: int, item: int, *, seed: int) -> Any:
        """The item as an epoch sees it: the same in each, unless preparing it draws."""
        del epoch, seed
        return self.prepare(item)

    @abc.abstractmethod
    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> Any:
        """Prepared items as one input; on the device, if one is given and that spares the host a copy."""

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """Items with their labels; those that nobody has prepared are prepared here."""
        if prepared is None:
            prepared = [self.prepare(item) for item in items]
        labels = None if self.labels is None else self.labels[torch.as_tensor(list(items))]
        return Batch(self.join(prepared, device), labels)


class StackedItems(Items):
    """Items that are one tensor each, all of one shape."""

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> torch.Tensor:
        """Above each other."""
        return stacked(prepared, device)


class TensorItems(StackedItems):
    """Rows of a tensor in memory, such as features: nothing to prepare."""

    loads = False

    def __init__(self, rows: torch.Tensor, labels: torch.Tensor, ids: Sequence[str] | None = None) -> None:
        super().__init__(ids if ids is not None else _Numbers(len(rows)), labels)
        self.rows = rows  # [items, features]

    def prepare(self, item: int) -> torch.Tensor:
        """One row."""
        return self.rows[item]

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """All rows at once."""
        del prepared, device
        places = torch.as_tensor(list(items))
        assert self.labels is not None
        return Batch(self.rows[places], self.labels[places])


class _SampleItems(StackedItems):
    """Samples that a data set names and the model's own transform reads."""

    def __init__(self, samples: Sequence[Sample], labels: torch.Tensor) -> None:
        super().__init__([sample.id for sample in samples], labels)
        self.samples = samples


class ImageItems(_SampleItems):
    """Pictures."""

    def __init__(
        self, samples: Sequence[Sample], labels: torch.Tensor, transform: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__(samples, labels)
        self._transform = transform
        _refuse_without([sample.id for sample in samples if not sample.images], "an image")

    def prepare(self, item: int) -> torch.Tensor:
        """The picture as the model sees it, [channels, height, width]."""
        return _plain(self._transform(load_image(self.samples[item].images[0])))


class VideoItems(_SampleItems):
    """Clips."""

    def __init__(
        self,
        samples: Sequence[Sample],
        labels: torch.Tensor,
        transform: Callable[[Any], torch.Tensor],
        *,
        frames: int,
    ) -> None:
        super().__init__(samples, labels)
        self._transform, self._frames = transform, frames
        _refuse_without([sample.id for sample in samples if sample.video is None], "a video")

    def prepare(self, item: int) -> torch.Tensor:
        """The clip as the model sees it, [channels, frames, height, width]."""
        video = self.samples[item].video
        assert video is not None
        frames = load_video(video, frames=self._frames)  # [frames, height, width, 3]
        return _plain(self._transform(torch.from_numpy(frames).permute(0, 3, 1, 2)))


class TextItems(Items):
    """Texts as token ids; one costs as many as it has, since a batch is padded to its longest."""

    loads = False
    uniform = False

    def __init__(
        self, samples: Sequence[Sample], labels: torch.Tensor, tokenizer: Any, *, longest: int | None = None
    ) -> None:
        super().__init__([sample.id for sample in samples], labels)
        _refuse_without([sample.id for sample in samples if not sample.prompt], "a text")
        options: dict[str, Any] = {} if longest is None else {"truncation": True, "max_length": longest}
        self._tokens: list[list[int]] = tokenizer([sample.prompt for sample in samples], **options)["input_ids"]
        self._pad = tokenizer.pad_token_id or 0

    def cost(self, item: int) -> int:
        """Its tokens."""
        return max(len(self._tokens[item]), 1)

    def prepare(self, item: int) -> list[int]:
        """Token ids."""
        return self._tokens[item]

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Padded on the right, with the mask that says so."""
        del device
        longest = max(len(ids) for ids in prepared)
        return {
            "input_ids": torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in prepared]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prepared]),
        }


class OwnItems(Items):
    """What a Python factory gives: (input, label) pairs, or inputs alone where the model has its own loss."""

    def __init__(
        self,
        samples: Any,
        *,
        label_dtype: torch.dtype | None,
        classes: int | None = None,
        join: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        super().__init__(_Numbers(len(samples)), None)
        self._classes = classes  # None: labels are not the numbers of classes
        self._samples = samples
        self._label_dtype = label_dtype  # None: samples have no label
        self._join = join
        self.copied = join is None

    def prepare(self, item: int) -> Any:
        """The sample, with its label; arrays as tensors, unless the factory joins them itself."""
        sample = self._samples[item]
        return sample if self._join is not None else replaced(sample, np.ndarray, _as_tensor)

    def prepare_in(self, epoch: int, item: int, *, seed: int) -> Any:
        """The sample; what the user's code draws for it is its own."""
        with drawing_from(seed, epoch, item):
            return self.prepare(item)

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> Any:
        """As the factory's `collate` does, else as torch does."""
        if self._join is not None:
            return self._join(prepared)
        if all(isinstance(one, torch.Tensor) for one in prepared):
            return stacked(prepared, device)
        return torch.utils.data.default_collate(list(prepared))

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """Inputs joined, and the labels that came with them."""
        samples = [self.prepare(item) for item in items] if prepared is None else list(prepared)
        if self._label_dtype is None:
            return Batch(self.join(samples, device), None)
        labels = torch.stack([torch.as_tensor(label, dtype=self._label_dtype) for _, label in samples])
        self._check_classes(items, labels)
        return Batch(self.join([one for one, _ in samples], device), labels)

    def _check_classes(self, items: Sequence[int], labels: torch.Tensor) -> None:
        """A label that is no class would stop the loss deep inside, or, as -100, be left out of it in silence."""
        if self._classes is None or labels.dim() != 1:
            return
        for item, label in zip(items, labels.tolist(), strict=True):
            if not 0 <= label < self._classes:
                raise RequestError(
                    f"sample {self.ids[item]}: the label {label} is no class: they are numbered from 0 to "
                    f"{self._classes - 1}"
                )


class _Numbers(Sequence[str]):
    """The ids of things that have only their place."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [str(number) for number in range(self._count)[place]]
        return str(range(self._count)[place])


def labels_tensor(values: Sequence[float | int], *, task: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Classes as whole numbers, values to learn as `dtype`."""
    return torch.tensor(list(values), dtype=torch.int64 if task == "classify" else dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without what torchvision's transforms know of it, which is in the way of the loader."""
    return tensor.as_subclass(torch.Tensor)


def _as_tensor(array: Any) -> Any:
    return torch.as_tensor(array) if array.dtype.kind in "biufc" else array


def _refuse_without(ids: Sequence[str], what: str) -> None:
    if ids:
        raise RequestError(
            f"data.root: the model reads {what}, and {plural(len(ids), 'sample has', 'samples have')} none (the "
            f"first is {ids[0]!r})"
        )
