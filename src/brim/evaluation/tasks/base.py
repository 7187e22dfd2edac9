"""What every task is: how a sample becomes model input, what it costs, and how a batch is answered.

    class Shout(Task):
        name = "shout"
        default_metrics = ("exact_match",)

        def cost(self, item): return len(self.samples[item].prompt)
        def prepare(self, item): return self.samples[item].prompt
        def launch(self, items, prepared): return ReadyAnswers([Answer(prediction=text.upper()) for text in prepared])

`prepare` runs in worker processes and must not touch the device; `launch` runs in the main one and should only start
the work there, so that the next batch can follow. A task knows no files and no metrics.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from brim.data.base import Sample, SampleSet
from brim.generation.settings import GenerationSettings
from brim.memory.transfer import moved, replaced
from brim.models.loaded import LoadedModel
from brim.records import Unit
from brim.running.executor import ItemFailure, Pending

__all__ = ["Answer", "LaterAnswers", "ReadyAnswers", "Task", "TaskSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said to one sample; `prediction` is what metrics score and the journal keeps."""

    prediction: Any
    tokens: int | None = None  # new tokens, where there are any
    truncated: bool = False  # stopped by max_new_tokens, not by the model
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What a task may be told beside the model and the data."""

    generation: GenerationSettings | None = None  # None: greedy
    max_new_tokens: int | None = None  # None: the task's own default
    chat: bool | None = None  # None: where the tokenizer has a chat template
    system: str | None = None
    processor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    non_blocking: bool = True  # copies to the device do not hold up the host


class ReadyAnswers(Pending):
    """Answers that are here already."""

    def __init__(self, answers: Sequence[Answer | ItemFailure]) -> None:
        self._answers = answers

    def result(self) -> Sequence[Answer | ItemFailure]:
        """The answers."""
        return self._answers


class LaterAnswers(Pending):
    """Answers read from the device when they are asked for."""

    def __init__(self, read: Callable[[], Sequence[Answer | ItemFailure]]) -> None:
        self._read = read

    def result(self) -> Sequence[Answer | ItemFailure]:
        """Wait for the device and read."""
        return self._read()


class Task(abc.ABC):
    """One task over one data set with one model."""

    name: ClassVar[str]
    default_metrics: tuple[str, ...] = ("exact_match",)
    unit: Unit = "samples"  # what costs count: tokens where lengths vary

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        self.model = model
        self.data = data
        self.samples: tuple[Sample, ...] = data.samples
        self.settings = settings
        self.notes: list[str] = []

    def setup(self) -> None:  # noqa: B027  # most tasks need nothing
        """What must be known before the first cost is asked for: tokenise, check the data."""

    @abc.abstractmethod
    def cost(self, item: int) -> int:
        """What a sample weighs in a batch."""

    @abc.abstractmethod
    def prepare(self, item: int) -> Any:
        """A sample as model input on the host: decoded, tokenised, not yet batched."""

    @abc.abstractmethod
    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """Start a batch; its result is one `Answer` (or `ItemFailure`) per item."""

    def release(self) -> None:  # noqa: B027
        """Let go of device memory kept between batches."""

    def shown_input(self, item: int) -> Any:
        """The sample's input as the journal keeps it."""
        sample = self.samples[item]
        media = [str(image) for image in sample.images] + ([str(sample.video)] if sample.video else [])
        if not media:
            return sample.prompt
        return {"prompt": sample.prompt, "media": media} if sample.prompt else (media[0] if len(media) == 1 else media)

    def references(self, item: int) -> Sequence[Any]:
        """The accepted answers, as the metrics want them."""
        return self.samples[item].references

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """What a metric may want to know of the sample beside prediction and references."""
        return {"id": self.samples[item].id, **self.samples[item].original}

    def identity(self) -> Mapping[str, Any]:
        """What the answers depend on beside model and data, for fingerprints."""
        return {"task": self.name}

    def to_device(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors on their way to the device; from pinned memory the copy does not hold up the host."""
        device = self.model.device

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            return moved(tensor, device) if self.settings.non_blocking else tensor.to(device)

        return {name: replaced(value, torch.Tensor, sent) for name, value in tensors.items()}

    @property
    def joined_on(self) -> torch.device | None:
        """Where samples are put together: on the device, unless copies are to hold up the host; None: on the host."""
        return self.model.device if self.settings.non_blocking else None
