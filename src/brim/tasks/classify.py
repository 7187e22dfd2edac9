"""Classification of texts, images and videos: the best classes of each sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import Sample, SampleSet
from brim.data.images import load_image
from brim.data.video import load_video
from brim.errors import RequestError, plural
from brim.memory.transfer import stacked
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.settings.caller import written
from brim.tasks.base import Answer, LaterAnswers, Task, TaskSettings, padded

__all__ = ["ClassifyTask", "align_classes"]

_NEEDS = {"text_classifier": "text", "image_classifier": "an image", "video_classifier": "a video"}
_MOST_RANKS = 5


class ClassifyTask(Task):
    """The prediction is the five best classes by name, best first."""

    name = "classify"
    default_metrics = ("top1", "top5")

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        super().__init__(model, data, settings)
        if model.kind not in _NEEDS:
            raise RequestError(
                f"{written('task', 'classify')}: {model.name} is a {model.kind.replace('_', ' ')} model; give a "
                f"classifier, or use {written('task', 'generate')}"
            )
        self._labels: tuple[str, ...] | None = None
        self._lengths: list[int] = []
        self._ids: list[list[int]] = []
        if model.kind == "text_classifier":
            self.unit = "tokens"

    def setup(self) -> None:
        """Check that every sample has what the model reads; tokenise texts."""
        kind = self.model.kind
        without = [sample.id for sample in self.samples if not self._readable(sample)]
        if without:
            raise RequestError(
                f"{written('task', 'classify')}: {self.model.name} reads {_NEEDS[kind]}, and "
                f"{plural(len(without), 'sample has', 'samples have')} none (the first is {without[0]!r})"
            )
        if kind == "text_classifier":
            tokenizer = self.model.tokenizer
            self._ids = tokenizer([sample.prompt for sample in self.samples])["input_ids"]
            self._lengths = [len(ids) for ids in self._ids]

    def _readable(self, sample: Sample) -> bool:
        if self.model.kind == "text_classifier":
            return sample.prompt is not None
        return bool(sample.images) if self.model.kind == "image_classifier" else sample.video is not None

    def cost(self, item: int) -> int:
        """Tokens of a text; every image or clip costs 1."""
        return max(self._lengths[item], 1) if self._lengths else 1

    def prepare(self, item: int) -> Any:
        """Token ids, or one input tensor in the model's dtype."""
        sample = self.samples[item]
        if self.model.kind == "text_classifier":
            room = self.model.positions
            if room is not None and self._lengths[item] > room:
                raise ValueError(f"the text has {self._lengths[item]} tokens, the model {room} positions")
            return self._ids[item]
        transform = self.model.transform
        assert transform is not None
        if self.model.kind == "image_classifier":
            return transform(load_image(sample.images[0])).to(self.model.dtype)
        assert sample.video is not None
        frames = load_video(sample.video, frames=self.model.frames or 16)  # [frames, height, width, 3]
        return transform(torch.from_numpy(frames).permute(0, 3, 1, 2)).to(self.model.dtype)

    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """One forward; the best classes are chosen on the device."""
        del items
        with torch.inference_mode():
            if self.model.kind == "text_classifier":
                logits = self.model.module(**self._text_batch(prepared)).logits
            else:
                batch = self.to_device({"pixels": stacked(prepared, self.joined_on)})
                output = self.model.module(batch["pixels"])
                logits = output.logits if hasattr(output, "logits") else output
            scores = logits.float().softmax(dim=-1)  # [samples, classes]
            count = scores.shape[-1]
            best, classes = scores.topk(min(_MOST_RANKS, count), dim=-1)
        return LaterAnswers(lambda: self._read(classes.tolist(), best.tolist(), count))

    def references(self, item: int) -> Sequence[Any]:
        """The class by its name, where the data has names."""
        names = self.data.class_names
        return [names[r] if names and isinstance(r, int) and r < len(names) else str(r)
                for r in self.samples[item].references]  # fmt: skip

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """Predictions are names in order of score: metrics need nothing else."""
        return {"id": self.samples[item].id}

    def identity(self) -> Mapping[str, Any]:
        """The number of frames in a clip."""
        return {"task": self.name, "frames": self.model.frames}

    def _read(self, classes: list[list[int]], scores: list[list[float]], count: int) -> list[Answer]:
        labels = self._labels if self._labels is not None else self._aligned(count)
        return [
            Answer(prediction=[labels[place] for place in row], details={"confidence": round(best[0], 6)})
            for row, best in zip(classes, scores, strict=True)
        ]

    def _aligned(self, count: int) -> tuple[str, ...]:
        """The names of the model's outputs, once it is known how many there are."""
        highest = max((r for sample in self.samples for r in sample.references if isinstance(r, int)), default=0)
        if not self.data.class_names and highest >= count:
            raise RequestError(
                f"{self.data.name} has a class {highest}, and {self.model.name} the classes 0 to {count - 1}: the "
                "model was trained for other classes"
            )
        self._labels, note = align_classes(self.data.class_names, self.model.class_names, count)
        if note:
            self.notes.append(note)
        return self._labels

    def _text_batch(self, prepared: Sequence[Any]) -> dict[str, torch.Tensor]:
        tensors = {
            "input_ids": padded(prepared, self.model.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(ids) for ids in prepared], 0),
        }
        return self.to_device(tensors)


def align_classes(data: Sequence[str], model: Sequence[str], count: int) -> tuple[tuple[str, ...], str]:
    """The label of each of the model's `count` outputs in the data's words, and a note for the user ("" for none).

    Classes are matched by name where the model knows all names, otherwise by position, with a note. Data with
    numbered classes gets numbers: a model may use one name for two classes. More classes in the data than outputs of
    the model is a `RequestError`.
    """
    if not data:
        return tuple(str(place) for place in range(count)), ""
    known = {_plain(name): place for place, name in enumerate(model)}
    places = [known.get(_plain(name)) for name in data]
    if model and all(place is not None for place in places) and len(set(places)) == len(places):
        labels = [*model]
        for name, place in zip(data, places, strict=True):
            assert place is not None
            labels[place] = name
        return tuple(labels), ""
    if len(data) > count:
        raise RequestError(
            f"the data has {plural(len(data), 'class', 'classes')} and the model {plural(count, 'output')}: the model "
            "was trained for other classes"
        )
    labels = [*data, *(_unused(place, model) for place in range(len(data), count))]
    generic = not model or all(re.fullmatch(r"LABEL_\d+", name) for name in model)
    if generic and len(data) == count:
        return tuple(labels), ""
    return tuple(labels), (
        f"the model's classes ({_some(model) or count}) and the data's ({_some(data)}) have different names: they are "
        "matched by their order"
    )


def _unused(place: int, model: Sequence[str]) -> str:
    return model[place] if place < len(model) else str(place)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
