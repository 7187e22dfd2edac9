"""Multiple choice by log-likelihood: the option that the model finds likeliest after the question is its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import SampleSet
from brim.errors import RequestError, plural
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.settings.caller import written
from brim.tasks.base import Answer, LaterAnswers, Task, TaskSettings, padded
from brim.tasks.prompts import PromptWriter

__all__ = ["ChoiceTask"]


class ChoiceTask(Task):
    """One log-likelihood per option; the prediction is their list."""

    name = "choice"
    default_metrics = ("choice_accuracy", "choice_accuracy_normalised")
    unit = "tokens"

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        super().__init__(model, data, settings)
        if model.kind not in ("language", "seq2seq"):
            raise RequestError(
                f"{written('task', 'choice')}: {model.name} is a {model.kind.replace('_', ' ')} model; it takes a "
                "language model"
            )
        self._writer = PromptWriter(model.tokenizer, None, settings)
        self._rows: list[list[tuple[list[int], list[int]]]] = []  # per sample and option: context, continuation

    def setup(self) -> None:
        """Tokenise questions and options."""
        without = [sample.id for sample in self.samples if not sample.choices]
        if without:
            raise RequestError(
                f"{written('task', 'choice')}: {plural(len(without), 'sample has', 'samples have')} no choices (the "
                f"first is {without[0]!r}); name the column with {written('map', 'choices=COLUMN')}"
            )
        contexts = [self._writer.text(sample.prompt or "") for sample in self.samples]
        glue = "" if self._writer.chat else " "
        whole = [context + glue + choice for context, sample in zip(contexts, self.samples, strict=True)
                 for choice in sample.choices]  # fmt: skip
        if self.model.kind == "seq2seq":
            options = iter(self._writer.token_ids([choice for sample in self.samples for choice in sample.choices]))
            heads = self._writer.token_ids(contexts)
            self._rows = [[(head, next(options)) for _ in sample.choices]
                          for head, sample in zip(heads, self.samples, strict=True)]  # fmt: skip
            return
        heads, lines = self._writer.token_ids(contexts), iter(self._writer.token_ids(whole))
        self._rows = [
            [_split(head, next(lines)) for _ in sample.choices]
            for head, sample in zip(heads, self.samples, strict=True)
        ]

    def cost(self, item: int) -> int:
        """Every option is a row as long as the longest."""
        rows = self._rows[item]
        return len(rows) * max(len(context) + len(continuation) for context, continuation in rows)

    def prepare(self, item: int) -> Any:
        """Context and continuation of every option."""
        room = self.model.positions
        longest = max(len(context) + len(continuation) for context, continuation in self._rows[item])
        if room is not None and longest > room:
            raise ValueError(f"the longest option has {longest} tokens with its question, the model {room} positions")
        return self._rows[item]

    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """One forward over all options of all samples."""
        rows = [row for options in prepared for row in options]
        score = self._seq2seq_scores if self.model.kind == "seq2seq" else self._causal_scores
        with torch.inference_mode():
            scores = score(rows)  # [rows]
        counts = [len(options) for options in prepared]

        def read() -> list[Answer]:
            values: list[float] = scores.tolist()
            answers, start = [], 0
            for item, count in zip(items, counts, strict=True):
                answers.append(self._answer(item, values[start : start + count]))
                start += count
            return answers

        return LaterAnswers(read)

    def shown_input(self, item: int) -> Any:
        """The question and its options."""
        return {"prompt": self.samples[item].prompt, "choices": list(self.samples[item].choices)}

    def metric_facts(self, item: int) -> Mapping[str, Any]:
        """The options' texts: references may name them, and normalised accuracy needs their lengths."""
        return {"id": self.samples[item].id, "options": self.samples[item].choices}

    def identity(self) -> Mapping[str, Any]:
        """How questions become prompts."""
        return {"task": self.name, "chat": self._writer.chat, "system": self.settings.system}

    def _answer(self, item: int, values: list[float]) -> Answer:
        best = max(range(len(values)), key=values.__getitem__)
        return Answer(prediction=values, details={"choice": self.samples[item].choices[best]})

    def _causal_scores(self, rows: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """The continuations' log-likelihoods; the model's head runs on their positions only."""
        ids = padded([[*c, *k] for c, k in rows], self.model.tokenizer.pad_token_id or 0)
        owner = torch.tensor([row for row, (_, k) in enumerate(rows) for _ in k])
        place = torch.tensor([len(c) + step - 1 for c, k in rows for step in range(len(k))])
        target = torch.tensor([token for _, k in rows for token in k])
        named = {"ids": ids, "owner": owner, "place": place, "target": target}
        moved = self.to_device(named)
        head = self.model.module.get_output_embeddings()
        handle = head.register_forward_pre_hook(
            lambda _, arguments: (arguments[0][moved["owner"], moved["place"]].unsqueeze(0), *arguments[1:])
        )
        try:
            # Padded on the right, so that a causal model needs no mask: nothing attends to what comes after it.
            logits = self.model.module(input_ids=moved["ids"], use_cache=False).logits[0]  # [continuation tokens, v]
        finally:
            handle.remove()
        likelihood = _log_likelihood(logits, moved["target"])
        return torch.zeros(len(rows), device=logits.device).index_add_(0, moved["owner"], likelihood)

    def _seq2seq_scores(self, rows: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        tensors = {
            "input_ids": padded([context for context, _ in rows], self.model.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(context) for context, _ in rows], 0),
            "labels": padded([continuation for _, continuation in rows], -100),
        }
        moved = self.to_device(tensors)
        logits = self.model.module(**moved).logits  # [rows, longest continuation, vocabulary]
        labels = moved["labels"]
        likelihood = _log_likelihood(logits.flatten(0, 1), labels.clamp_min(0).flatten()).view_as(labels)
        scores: torch.Tensor = (likelihood * (labels >= 0)).sum(dim=1)
        return scores


def _split(context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Where the continuation begins: after the tokens that both share, at least one token before the end."""
    shared = 0
    while shared < min(len(context), len(whole) - 1) and context[shared] == whole[shared]:
        shared += 1
    shared = max(shared, 1)
    return whole[:shared], whole[shared:]


def _log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    chosen: torch.Tensor = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)
