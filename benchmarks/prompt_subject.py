"""Prompts of token ids as something that `brim` evaluates, without the cost of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["choice_subject", "number_tokenizer", "prompt_subject"]

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
        return {"input_ids": [[token for part in text.split() for token in self._prompts[int(part)]] for text in texts]}

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """The ids in decimal."""
        del options
        return [" ".join(map(str, row)) for row in rows]


def prompt_subject(model: Any, prompts: Sequence[list[int]], new_tokens: int) -> Any:
    """A generation task over the prompts."""
    from brim.data.base import Sample
    from brim.tasks.base import TaskSettings
    from brim.tasks.generate import GenerateTask

    samples = [Sample(id=str(n), prompt=str(n), references=("1",)) for n in range(len(prompts))]
    settings = TaskSettings(max_new_tokens=new_tokens)
    return _setup(model, prompts, samples, GenerateTask, settings, metric="exact_match")


def choice_subject(model: Any, questions: Sequence[tuple[list[int], list[list[int]]]]) -> Any:
    """Multiple choice over contexts and their options."""
    from brim.data.base import Sample
    from brim.tasks.base import TaskSettings
    from brim.tasks.choice import ChoiceTask

    texts: list[list[int]] = []
    samples = []
    for number, (context, options) in enumerate(questions):
        names = [str(len(texts) + place) for place in range(len(options) + 1)]
        texts += [context, *options]
        samples.append(Sample(id=str(number), prompt=names[0], choices=tuple(names[1:]), references=(0,)))
    return _setup(model, texts, samples, ChoiceTask, TaskSettings(), metric="choice_accuracy")


def _setup(
    model: Any, texts: Sequence[list[int]], samples: Sequence[Any], kind: Any, settings: Any, *, metric: str
) -> Any:
    import torch

    from brim.data.base import SampleSet
    from brim.evaluation.setup import EvaluationSetup
    from brim.metrics.registry import parse_metrics
    from brim.models.base import LoadedModel

    loaded = LoadedModel(
        name="benchmark",
        kind="language",
        module=model,
        device=next(model.parameters()).device,
        dtype=torch.bfloat16,
        tokenizer=NumberTokenizer(texts),
    )
    data = SampleSet(name="prompts", format="jsonl", samples=tuple(samples), suggested_task=kind.name)
    task = kind(loaded, data, settings)
    task.setup()
    costs = tuple(task.cost(item) for item in range(len(samples)))
    return EvaluationSetup(model=loaded, data=data, task=task, metrics=tuple(parse_metrics(metric)), costs=costs)


def number_tokenizer() -> Any:
    """A real tokenizer over the same ids, for a contender that cannot do without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", unk_token="0", padding_side="left")
