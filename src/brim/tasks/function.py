"""Any Python function as the model: a list of samples in, one answer for each out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.data.base import SampleSet
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.running.results import one_for_each
from brim.tasks.base import Answer, ReadyAnswers, Task, TaskSettings

__all__ = ["FunctionTask"]

_METRICS = {
    "vqa": ("vqa_accuracy", "vqa_accuracy_simple", "exact_match"),
    "choice": ("choice_accuracy",),
    "classify": ("top1", "top5"),
}


class FunctionTask(Task):
    """Calls the factory's function with `Sample`s; what it returns is the prediction."""

    name = "function"

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        super().__init__(model, data, settings)
        self.default_metrics = _METRICS.get(data.suggested_task, self.default_metrics)

    def cost(self, item: int) -> int:
        """The length of the prompt, where there is one."""
        return max(len(self.samples[item].prompt or ""), 1)

    def prepare(self, item: int) -> Any:
        """The sample itself."""
        return self.samples[item]

    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """Call the function."""
        del items
        results = one_for_each(self.model.module(list(prepared)), len(prepared))
        return ReadyAnswers([Answer(prediction=result) for result in results])

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """The options of a multiple choice, beside the record."""
        choices = self.samples[item].choices
        return {**super().metric_facts(item), **({"options": choices} if choices else {})}
