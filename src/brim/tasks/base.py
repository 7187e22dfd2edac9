"""What every task is: how a sample becomes model input, what it costs, and how a batch is answered.

    class Shout(Task):
        name = "shout"
        default_metrics = ("exact_match",)

        def cost(self, item): return len(self.samples[item].prompt)
        def prepare(self, item): return self.samples[item].prompt
        def launch(self, items, prepared): return ReadyAnswers([Answer(prediction=text.upper()) for text in prepared])

`prepare` runs in worker processes and must not use the device; `launch` runs in the main process and should only start
the work on the device, so that the next batch can follow. A task knows no files and no metrics.
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
from brim.models.base import LoadedModel
from brim.records import Unit
from brim.running.executor import ItemFailure, Pending
from brim.running.pooled import PoolSource

__all__ = ["Answer", "LaterAnswers", "ReadyAnswers", "Task", "TaskSettings", "padded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The model's answer to one sample; `prediction` is what metrics score and samples.jsonl keeps."""

    prediction: Any
    tokens: int | None = None  # new tokens, where there are any
    truncated: bool = False  # stopped by max_new_tokens, not by the model
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings of a task, beside the model and the data."""

    generation: GenerationSettings | None = None  # None: greedy
    max_new_tokens: int | None = None  # None: the task's own default
    chat: bool | None = None  # None: where the tokenizer has a chat template
    system: str | None = None
    processor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    non_blocking: bool = True  # the host does not wait for copies to the device


class ReadyAnswers(Pending):
    """Answers that have been computed already."""

    def __init__(self, answers: Sequence[Answer | ItemFailure]) -> None:
        self._answers = answers

    def result(self) -> Sequence[Answer | ItemFailure]:
        """The answers."""
        return self._answers


class LaterAnswers(Pending):
    """Answers read from the device on use."""

    def __init__(self, read: Callable[[], Sequence[Answer | ItemFailure]]) -> None:
        self._read = read

    def result(self) -> Sequence[Answer | ItemFailure]:
        """Wait for the device and read."""
        return self._read()


def padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Rows of numbers as one tensor, [rows, longest], padded on the right."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.long)


class Task(abc.ABC):
    """One task over one data set with one model."""

    name: ClassVar[str]
    default_metrics: tuple[str, ...] = ("exact_match",)
    unit: Unit = "samples"  # what costs count: tokens where lengths vary
    packs: bool = False  # a batch costs the sum of its samples: none is padded to the costliest

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        self.model = model
        self.data = data
        self.samples: tuple[Sample, ...] = data.samples
        self.settings = settings
        self.notes: list[str] = []

    def setup(self) -> None:  # noqa: B027  # most tasks need nothing
        """Run once before the first `cost`: tokenise, check the data."""

    @abc.abstractmethod
    def cost(self, item: int) -> int:
        """What a sample costs in a batch, in the task's unit."""

    @abc.abstractmethod
    def prepare(self, item: int) -> Any:
        """A sample as model input on the host: decoded, tokenised, not yet batched."""

    @abc.abstractmethod
    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """Start a batch; its result is one `Answer` (or `ItemFailure`) per item."""

    def release(self) -> None:  # noqa: B027
        """Free the device memory kept between batches."""

    def pool_source(self) -> PoolSource | None:
        """Where samples end one by one: pools for them; None: they run batch by batch."""
        return None

    def shown_input(self, item: int) -> Any:
        """The sample's input as samples.jsonl shows it."""
        sample = self.samples[item]
        media = [str(image) for image in sample.images] + ([str(sample.video)] if sample.video else [])
        if not media:
            return sample.prompt
        return {"prompt": sample.prompt, "media": media} if sample.prompt else (media[0] if len(media) == 1 else media)

    def references(self, item: int) -> Sequence[Any]:
        """The accepted answers, in the form that metrics expect."""
        return self.samples[item].references

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """What metrics may read about the sample, beside prediction and references."""
        return {"id": self.samples[item].id, **self.samples[item].original}

    def identity(self) -> Mapping[str, Any]:
        """What the answers depend on beside model and data, for fingerprints."""
        return {"task": self.name}

    def to_device(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors on the device; the host does not wait for copies from pinned memory."""
        device = self.model.device

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            return moved(tensor, device) if self.settings.non_blocking else tensor.to(device)

        return {name: replaced(value, torch.Tensor, sent) for name, value in tensors.items()}

    @property
    def joined_on(self) -> torch.device | None:
        """Where samples are joined into a batch: the device, or None for the host, when copies are blocking."""
        return self.model.device if self.settings.non_blocking else None
