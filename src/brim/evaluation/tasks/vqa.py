"""Visual question answering: short answers, scored by the official accuracy."""

from __future__ import annotations

from brim.evaluation.tasks.generate import GenerateTask

__all__ = ["VqaTask"]


class VqaTask(GenerateTask):
    """As `generate`, but answers are a few words: 16 new tokens unless more are asked for (99.9 % have at most 9)."""

    name = "vqa"
    default_metrics = ("vqa_accuracy", "vqa_accuracy_simple", "exact_match")
    default_new_tokens = 16
