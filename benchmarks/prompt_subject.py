"""Prompts of token ids as something that `brim` evaluates, without the cost of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["number_tokenizer", "prompt_subject"]

VOCABULARY = 65536


class NumberTokenizer:
    """Text is token ids in decimal; ids are kept with the text, so that reading costs almost nothing."""

    pad_token_id = 0
    eos_token_id = None
    chat_template = None

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, Any]:
        del options
        return {"input_ids": [self._prompts[int(text)] for text in texts]}

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """The ids in decimal."""
        del options
        return [" ".join(map(str, row)) for row in rows]


def prompt_subject(model: Any, prompts: Sequence[list[int]], new_tokens: int) -> Any:
    """A generation task over the prompts."""
    import torch

    from brim.data.base import Sample, SampleSet
    from brim.evaluation.setup import EvaluationSetup
    from brim.metrics.registry import parse_metrics
    from brim.models.base import LoadedModel
    from brim.tasks.base import TaskSettings
    from brim.tasks.generate import GenerateTask

    loaded = LoadedModel(
        name="benchmark",
        kind="language",
        module=model,
        device=next(model.parameters()).device,
        dtype=torch.bfloat16,
        tokenizer=NumberTokenizer(prompts),
    )
    samples = tuple(Sample(id=str(n), prompt=str(n), references=("1",)) for n in range(len(prompts)))
    data = SampleSet(name="prompts", format="jsonl", samples=samples, suggested_task="generate")
    task = GenerateTask(loaded, data, TaskSettings(max_new_tokens=new_tokens))
    task.setup()
    costs = tuple(task.cost(item) for item in range(len(samples)))
    return EvaluationSetup(model=loaded, data=data, task=task, metrics=tuple(parse_metrics("exact_match")), costs=costs)


def number_tokenizer() -> Any:
    """A real tokenizer over the same ids, for a contender that cannot do without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", unk_token="0", padding_side="left")
