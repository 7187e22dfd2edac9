"""Multiple choice by log-likelihood: the option that the model finds likeliest after the question is its answer.

A question's context is read once for all its options, and what all questions begin with once for the run, where the
model allows it (`generation/likelihoods.py`); else every option is a row of a padded batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import SampleSet
from brim.errors import RequestError, plural
from brim.generation.arena import head_on
from brim.generation.likelihoods import (
    OptionRows,
    SharedContexts,
    log_likelihood,
    saves_enough,
    shared_contexts_obstacle,
    shared_prefix,
)
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.settings.caller import written
from brim.tasks.base import Answer, LaterAnswers, Task, TaskSettings, padded
from brim.tasks.prompts import PromptWriter

__all__ = ["ChoiceTask"]

Row = tuple[list[int], list[int]]  # context, continuation


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
        self._rows: list[list[Row]] = []  # per sample and option
        self._costs: list[int] = []
        self._shared: SharedContexts | None = None

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
            self._costs = [_padded_tokens(rows) for rows in self._rows]
            return
        heads, lines = self._writer.token_ids(contexts), iter(self._writer.token_ids(whole))
        self._rows = [
            [_split(head, next(lines)) for _ in sample.choices]
            for head, sample in zip(heads, self.samples, strict=True)
        ]
        self._costs = [_padded_tokens(rows) for rows in self._rows]
        self._share()

    def _share(self) -> None:
        """Read what options and questions have in common once, where that saves enough and the model allows it."""
        room = self.model.positions or 1 << 62
        asked = [_question(rows) for rows in self._rows]
        usable = [one for one in asked if max(map(len, one.rows)) <= room]  # the others never reach the model
        if not usable or min(one.shared for one in usable) < 1:
            return
        prefix = shared_prefix([one.rows[0] for one in usable], most=min(one.most_prefix for one in usable))
        costs = [one.tokens_to_read(min(prefix, one.shared)) for one in asked]
        if not saves_enough(sum(costs), unshared=sum(self._costs)):
            return
        longest = max(len(row) for one in usable for row in one.rows)
        obstacle = shared_contexts_obstacle(self.model.module, longest=longest)
        if obstacle is None:
            self._shared = SharedContexts(self.model.module, prefix=usable[0].rows[0][:prefix])
            self._costs = [max(cost, 1) for cost in costs]
            self.packs = True
        elif obstacle:
            self.notes.append(f"what the options of a question share is read again for each of them: {obstacle}")

    def cost(self, item: int) -> int:
        """The tokens to read; without sharing, every option is a row as long as the longest."""
        return self._costs[item]

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
        if self._shared is not None:
            scores = self._shared.scores([_question(options) for options in prepared])  # [rows]
        else:
            score = self._seq2seq_scores if self.model.kind == "seq2seq" else self._causal_scores
            with torch.inference_mode():
                scores = score(rows)
        counts = [len(options) for options in prepared]

        def read() -> list[Answer]:
            values: list[float] = scores.tolist()
            answers, start = [], 0
            for item, count in zip(items, counts, strict=True):
                answers.append(self._answer(item, values[start : start + count]))
                start += count
            return answers

        return LaterAnswers(read)

    def release(self) -> None:
        """Free the keys and values of what all questions begin with."""
        if self._shared is not None:
            self._shared.release()

    def in_padded_rows(self, prepared: list[Row]) -> tuple[ChoiceTask, list[Row]]:
        """For a trace: a task that shares nothing, and a row with as many tokens to read and to score."""
        if self._shared is None:
            return self, prepared
        question = _question(prepared)
        tokens = question.tokens_to_read(len(self._shared.prefix))
        scored = min(sum(question.scored), tokens)
        plain = copy.copy(self)
        plain._shared = None
        filler = [0] * tokens
        return plain, [(filler[: tokens - scored + 1], filler[:scored])]

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

    def _causal_scores(self, rows: Sequence[Row]) -> torch.Tensor:
        """The continuations' log-likelihoods; the model's head runs on their positions only."""
        ids = padded([[*c, *k] for c, k in rows], self.model.tokenizer.pad_token_id or 0)
        owner = torch.tensor([row for row, (_, k) in enumerate(rows) for _ in k])
        place = torch.tensor([len(c) + step - 1 for c, k in rows for step in range(len(k))])
        target = torch.tensor([token for _, k in rows for token in k])
        named = {"ids": ids, "owner": owner, "place": place, "target": target}
        moved = self.to_device(named)
        # Padded on the right, so that a causal model needs no mask: nothing attends to what comes after it.
        with head_on(self.model.module, moved["owner"] * ids.shape[1] + moved["place"]):
            logits = self.model.module(input_ids=moved["ids"], use_cache=False).logits[0]  # [continuation tokens, v]
        likelihood = log_likelihood(logits, moved["target"])
        return torch.zeros(len(rows), device=logits.device).index_add_(0, moved["owner"], likelihood)

    def _seq2seq_scores(self, rows: Sequence[Row]) -> torch.Tensor:
        tensors = {
            "input_ids": padded([context for context, _ in rows], self.model.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(context) for context, _ in rows], 0),
            "labels": padded([continuation for _, continuation in rows], -100),
        }
        moved = self.to_device(tensors)
        logits = self.model.module(**moved).logits  # [rows, longest continuation, vocabulary]
        labels = moved["labels"]
        likelihood = log_likelihood(logits.flatten(0, 1), labels.clamp_min(0).flatten()).view_as(labels)
        scores: torch.Tensor = (likelihood * (labels >= 0)).sum(dim=1)
        return scores


def _split(context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Where the continuation begins: after the tokens that both share, at least one token before the end."""
    shared = 0
    while shared < min(len(context), len(whole) - 1) and context[shared] == whole[shared]:
        shared += 1
    shared = max(shared, 1)
    return whole[:shared], whole[shared:]


def _question(rows: Sequence[Row]) -> OptionRows:
    return OptionRows(
        rows=[[*context, *continuation] for context, continuation in rows],
        scored=[len(continuation) for _, continuation in rows],
    )


def _padded_tokens(rows: Sequence[Row]) -> int:
    return len(rows) * max(len(context) + len(continuation) for context, continuation in rows)
