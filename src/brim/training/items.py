"""What a model is trained on, item by item, and what every reader of a data set decides.

A reader (in data_sets.py, features.py, moving_shapes.py or dense_tasks.py) returns a `TrainingSource`: the task and
number of classes, from which the model is built, and a function that makes the `Items` of both splits afterwards. Each
kind of `Items` prepares one item on the host and joins several to a batch.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from brim.data.base import Sample, SampleSet
from brim.data.images import load_image
from brim.data.video import load_video
from brim.errors import RequestError, plural
from brim.memory.transfer import replaced, stacked
from brim.models import python_factory
from brim.running.loader import LoaderSettings
from brim.settings.caller import named_as
from brim.settings.train_settings import DataSettings, TrainSettings
from brim.training.models import ModelBundle
from brim.training.objective import Batch
from brim.workloads.knobs import check_knobs

__all__ = [
    "FactoryItems",
    "ImageItems",
    "Items",
    "StackedItems",
    "TensorItems",
    "TextItems",
    "TrainingSource",
    "VideoItems",
    "head_outputs",
    "held_out_count",
    "label_task",
    "labels_tensor",
    "load_factory_splits",
    "open_validation_split",
    "refuse_other_classes",
    "samples_kept",
    "seeded_rng",
]  # fmt: skip


# ------------------------------------------------------------------------------------------ data sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """A data set that has been read; its items are made once the model is known."""

    name: str
    task: str  # classify, regress, segment or detect; own: the model computes its own loss
    outputs: int  # of the model's head
    make_items: Callable[[ModelBundle, torch.dtype], tuple[Items, Items | None]]  # training and validation
    rows: torch.Tensor | None = None  # the training features of an `mlp`
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def label_task(labels: Sequence[Any]) -> str:
    """`classify` where all labels are texts or whole numbers, else `regress`."""
    return "regress" if any(isinstance(label, float) and not label.is_integer() for label in labels) else "classify"


def head_outputs(settings: TrainSettings, task: str, classes: int) -> int:
    """The number of classes, or a larger `model.num_classes`; 1 for values."""
    asked = settings.model.num_classes
    if task != "classify":
        return 1
    if asked is not None and asked < classes:
        raise RequestError(f"model.num_classes {asked}: the data has {plural(classes, 'class', 'classes')}")
    if max(asked or 0, classes) < 2:
        raise RequestError(f"the data has {classes} class; there must be 2 or more")
    return asked or classes


def refuse_other_classes(labels: Sequence[int], classes: int, *, where: str, ids: Sequence[str] | None = None) -> None:
    """Raise a `RequestError` for the first label that is not from 0 to `classes` - 1."""
    for place, label in enumerate(labels):
        if not 0 <= label < classes:
            sample = str(place) if ids is None else ids[place]
            raise RequestError(
                f"{where}: the label {label} of sample {sample} is no class: classes are numbered from 0 to "
                f"{classes - 1}. Number the classes from 0, leave out samples without one, or learn values with "
                "task: regress"
            )


def labels_tensor(values: Sequence[float | int], *, task: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Classes as int64, values of a regression as `dtype`."""
    return torch.tensor(list(values), dtype=torch.int64 if task == "classify" else dtype)


def samples_kept(count: int, data: DataSettings) -> int:
    """How many of `count` training samples are used: `data.percentage` of them, `data.limit` at most."""
    share = max(math.floor(count * data.percentage / 100), 1)
    return min(share, data.limit or share)


def held_out_count(count: int, data: DataSettings, *, where: str, noun: str = "sample") -> int:
    """How many of `count` training samples are held out for validation where there is no validation split."""
    if data.val_split == "none" or data.val_fraction == 0:
        return 0
    share = max(round(data.val_fraction * count), 1)
    if share >= count:
        raise RequestError(
            f"{where}: {plural(count, f'{noun} is', f'{noun}s are')} too few to hold some out for validation"
        )
    return share


def open_validation_split(
    train: SampleSet, opened: Callable[[str, str | None], SampleSet], data: DataSettings
) -> SampleSet | None:
    """The validation split that the settings name, or that the data has; None: there is none.

    `opened` reads a path and a split, as it did for the training split.
    """
    if data.val_root is not None:
        return opened(data.val_root, data.val_split)
    if data.val_split == "none" or train.facts.get("split") is None:
        return None
    assert data.root is not None
    try:
        validation = opened(data.root, data.val_split)
    except RequestError:
        if data.val_split is not None:
            raise
        return None
    return None if validation.facts.get("split") == train.facts.get("split") else validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorySplits:
    """What a user's Python function returned for both splits."""

    train: Any
    validation: Any  # None: there is none
    collate: Callable[[Sequence[Any]], Any] | None
    facts: Mapping[str, Any]


def load_factory_splits(settings: TrainSettings, name: str) -> FactorySplits:
    """Call the function of `data.type: py:FILE:FACTORY` with `data.params`, and ask its result for both splits."""
    with named_as(knob="data.params"):
        params = check_knobs(dict(settings.data.params), python_factory.factory_knobs(name), owner=f"py:{name}")
    split: Any = python_factory.load_function(name, knobs=params, device=torch.device("cpu"), dtype=None)
    train, validation = split("train"), split("validation")
    if not hasattr(train, "__len__") or len(train) == 0:
        raise RequestError(f"data.type py:{name}: the training split is empty or has no length")
    return FactorySplits(
        train=train,
        validation=validation,
        collate=getattr(split, "collate", None),
        facts={"source": python_factory.factory_source_digest(name), "params": params},
    )


# ------------------------------------------------------------------------------------------ items


class Items(abc.ABC):
    """A split of a data set: numbered items, each with an id, a cost and a label."""

    uses_loader = True  # whether preparing an item takes long enough for processes of its own
    is_random = False  # whether code of the user's own prepares an item, which may draw random numbers
    uniform = True  # whether all items cost the same
    join_copies = True  # whether a joined batch is a copy, so that the memory of prepared items can be used again

    def __init__(self, ids: Sequence[str], labels: torch.Tensor | None) -> None:
        self.ids = ids
        self.labels = labels  # [items]: classes or values

    def __len__(self) -> int:
        return len(self.ids)

    def cost(self, item: int) -> int:
        """The item's share of a batch's memory: 1, or for example its tokens."""
        del item
        return 1

    @abc.abstractmethod
    def prepare(self, item: int) -> Any:
        """One item as model input on the host; called in loader processes too."""

    def loader_settings(self, settings: LoaderSettings) -> LoaderSettings:
        """The settings of a loader for these items."""
        return dataclasses.replace(settings, pool="always" if self.join_copies else "never")

    def prepare_for_epoch(self, epoch: int, item: int, *, seed: int) -> Any:
        """The item in an epoch; random numbers that the user's code draws depend on seed, epoch and item alone."""
        with seeded_rng(seed, epoch, item) if self.is_random else contextlib.nullcontext():
            return self.prepare(item)

    @abc.abstractmethod
    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> Any:
        """Prepared items as one input; on `device` where that saves a copy on the host."""

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """Items with their labels; without `prepared`, they are prepared here."""
        if prepared is None:
            prepared = [self.prepare(item) for item in items]
        labels = None if self.labels is None else self.labels[torch.as_tensor(list(items))]
        return Batch(self.join(prepared, device), labels)


class StackedItems(Items):
    """Items that are one tensor each, all of one shape."""

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> torch.Tensor:
        """Stacked along a new first dimension."""
        return stacked(prepared, device)


class TensorItems(StackedItems):
    """Rows of a tensor in memory, such as features."""

    uses_loader = False

    def __init__(self, rows: torch.Tensor, labels: torch.Tensor, ids: Sequence[str] | None = None) -> None:
        super().__init__(ids if ids is not None else _PositionIds(len(rows)), labels)
        self.rows = rows  # [items, features]

    def prepare(self, item: int) -> torch.Tensor:
        """One row."""
        return self.rows[item]

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """All rows with one index operation."""
        del prepared, device
        places = torch.as_tensor(list(items))
        assert self.labels is not None
        return Batch(self.rows[places], self.labels[places])


class _SampleItems(StackedItems):
    """Samples of a data set that the model's transform turns into tensors."""

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
        """The transformed picture, [channels, height, width]."""
        return _plain(self._transform(load_image(self.samples[item].images[0])))


class VideoItems(_SampleItems):
    """Clips."""

    def __init__(
        self, samples: Sequence[Sample], labels: torch.Tensor, transform: Callable[[Any], torch.Tensor], *, frames: int
    ) -> None:
        super().__init__(samples, labels)
        self._transform, self._frames = transform, frames
        _refuse_without([sample.id for sample in samples if sample.video is None], "a video")

    def prepare(self, item: int) -> torch.Tensor:
        """The transformed clip, [channels, frames, height, width]."""
        video = self.samples[item].video
        assert video is not None
        frames = load_video(video, frames=self._frames)  # [frames, height, width, 3]
        return _plain(self._transform(torch.from_numpy(frames).permute(0, 3, 1, 2)))


class TextItems(Items):
    """Texts as token ids; the cost of a text is its tokens, since a batch is padded to its longest text."""

    uses_loader = False
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
        """The number of tokens."""
        return max(len(self._tokens[item]), 1)

    def prepare(self, item: int) -> list[int]:
        """Token ids."""
        return self._tokens[item]

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Padded on the right, with the attention mask."""
        del device
        longest = max(len(ids) for ids in prepared)
        return {
            "input_ids": torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in prepared]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prepared]),
        }


class FactoryItems(Items):
    """Samples of a user's Python function: (input, label) pairs, or inputs alone where the model computes its loss.

    `label_dtype` None: samples have no label; `classes` None: labels are not classes; `join`: the user's collate.
    """

    is_random = True

    def __init__(
        self,
        samples: Any,
        *,
        label_dtype: torch.dtype | None,
        classes: int | None = None,
        join: Callable[[Sequence[Any]], Any] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        super().__init__(ids or _PositionIds(len(samples)), None)
        self._samples = samples
        self._label_dtype = label_dtype
        self._classes = classes
        self._join = join
        self.join_copies = join is None

    def prepare(self, item: int) -> Any:
        """The sample with its label; arrays become tensors, unless the user's collate joins the samples."""
        sample = self._samples[item]
        return sample if self._join is not None else replaced(sample, np.ndarray, _as_tensor)

    def join(self, prepared: Sequence[Any], device: torch.device | None = None) -> Any:
        """By the user's collate function, else by torch's."""
        if self._join is not None:
            return self._join(prepared)
        if all(isinstance(one, torch.Tensor) for one in prepared):
            return stacked(prepared, device)
        return torch.utils.data.default_collate(list(prepared))

    def batch(
        self, items: Sequence[int], prepared: Sequence[Any] | None = None, *, device: torch.device | None = None
    ) -> Batch:
        """Inputs joined, and the labels of the samples."""
        samples = [self.prepare(item) for item in items] if prepared is None else list(prepared)
        if self._label_dtype is None:
            return Batch(self.join(samples, device), None)
        labels = torch.stack([torch.as_tensor(label, dtype=self._label_dtype) for _, label in samples])
        self._check_classes(items, labels)
        return Batch(self.join([one for one, _ in samples], device), labels)

    def _check_classes(self, items: Sequence[int], labels: torch.Tensor) -> None:
        """Refuse labels that are no classes: cross entropy fails on them, or silently ignores -100."""
        if self._classes is None or labels.dim() != 1:
            return
        for item, label in zip(items, labels.tolist(), strict=True):
            if not 0 <= label < self._classes:
                raise RequestError(
                    f"sample {self.ids[item]}: the label {label} is no class: classes are numbered from 0 to "
                    f"{self._classes - 1}"
                )


class _PositionIds(Sequence[str]):
    """Ids of items without names: their positions, made on access."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [str(number) for number in range(self._count)[place]]
        return str(range(self._count)[place])


@contextlib.contextmanager
def seeded_rng(*numbers: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch on the CPU with these numbers inside; restore them afterwards.

    Augmentations use these three. Devices' generators are left alone, which `torch.manual_seed` would seed as well.
    """
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without torchvision's subclass, which the loader does not take."""
    return tensor.as_subclass(torch.Tensor)


def _as_tensor(array: Any) -> Any:
    return torch.as_tensor(array) if array.dtype.kind in "biufc" else array


def _refuse_without(ids: Sequence[str], what: str) -> None:
    if ids:
        raise RequestError(
            f"data.root: the model reads {what}, and {plural(len(ids), 'sample has', 'samples have')} none (the "
            f"first is {ids[0]!r})"
        )
