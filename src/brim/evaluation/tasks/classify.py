"""Classification of texts, images and videos: the best classes of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import Sample, SampleSet
from brim.data.images import load_image
from brim.data.video import load_video
from brim.errors import RequestError, plural
from brim.evaluation.tasks.base import Answer, LaterAnswers, Task, TaskSettings
from brim.evaluation.tasks.class_names import align_classes
from brim.memory.transfer import stacked
from brim.models.loaded import LoadedModel
from brim.running.executor import Pending
from brim.settings.caller import written

__all__ = ["ClassifyTask"]

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
                "classifier, or use "
                f"{written('task', 'generate')}"
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
                f"{plural(len(without), 'sample has', 'samples have')} none (the "
                f"first is {without[0]!r})"
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
        """Tokens of a text; a picture or a clip is like any other."""
        return max(self._lengths[item], 1) if self._lengths else 1

    def prepare(self, item: int) -> Any:
        """Token ids, or one input tensor, as narrow as the model computes."""
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
        """The class by name, where the data names its classes."""
        names = self.data.class_names
        return [names[r] if names and isinstance(r, int) and r < len(names) else str(r)
                for r in self.samples[item].references]  # fmt: skip

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """Labels come by name and in order: nothing else is needed."""
        return {"id": self.samples[item].id}

    def identity(self) -> Mapping[str, Any]:
        """How clips are cut."""
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
                f"{self.data.name} has a class {highest}, and {self.model.name} the classes 0 to {count - 1}: it was "
                "made for other ones"
            )
        self._labels, note = align_classes(self.data.class_names, self.model.class_names, count)
        if note:
            self.notes.append(note)
        return self._labels

    def _text_batch(self, prepared: Sequence[Any]) -> dict[str, torch.Tensor]:
        tokenizer = self.model.tokenizer
        longest = max(len(ids) for ids in prepared)
        pad = tokenizer.pad_token_id or 0
        tensors = {
            "input_ids": torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in prepared]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prepared]),
        }
        return self.to_device(tensors)
