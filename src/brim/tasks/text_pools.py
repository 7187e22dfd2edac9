"""Prompts of token ids in a generation pool: what they need of one, and their answers as they end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.generation.arena import ALIGNMENT, region_slots
from brim.generation.likelihoods import shared_prefix
from brim.generation.pool import INVARIANT_ROWS, GenerationPool, PoolPrompt, chunk_tokens_of
from brim.generation.select import pool_obstacle, pool_pays_on
from brim.generation.settings import GenerationSettings, TokenIds
from brim.running.pooled import PooledResult
from brim.sizing.pool import PoolNeeds, PoolSize

__all__ = ["ReadAnswers", "TextPool", "TextPools"]

# Answers from their tokens, whether each ended by itself, and what else is reported of each.
ReadAnswers = Callable[[list[list[int]], list[bool], list[Mapping[str, Any]]], Sequence[Any]]


class TextPools:
    """Pools for the prompts of one task, of which at least the lengths are known: 0 for those that are never read."""

    def __init__(
        self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, read: ReadAnswers,
        lengths: Sequence[int], prompts: Sequence[list[int]] = (),
        stopped: Callable[[list[list[int]]], list[bool]] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.settings, self.tokens = model, settings, tokens
        self.lengths, self.prompts, self.read, self.stopped = lengths, prompts, read, stopped
        self.longest = max(lengths, default=0)  # tokens of a prompt
        self.notes: list[str] = []
        self.first_slots = chunk_tokens_of(model, settings)
        self.portion = sys.maxsize

    def obstacle(self) -> str | None:
        """Why there is no pool: "" where none is expected, such as on a CPU; None if there is one."""
        parameter = next(self.model.parameters())
        if not (self.settings.pool and self.settings.own_loop and self.longest):
            return ""
        if not pool_pays_on(parameter.device, parameter.dtype):
            return ""
        if self.shared_prefix:
            why = self._obstacle(prefix=True)
            if why is None:
                return None
            many = len(self.shared_prefix)
            self.notes.append(f"the {many:,} tokens that all prompts share are read again for each of them: {why}")
            self.shared_prefix = []
        return self._obstacle(prefix=False)

    def _obstacle(self, *, prefix: bool) -> str | None:
        return pool_obstacle(self.model, self.settings, self.tokens, longest=self.longest, prefix=prefix)

    @functools.cached_property
    def shared_prefix(self) -> list[int]:
        """The tokens with which all prompts begin, if they are many; at least one token is each prompt's own.

        None where answers must not depend on the other prompts.
        """
        prompts = [ids for ids, length in zip(self.prompts, self.lengths, strict=False) if length]
        if self.settings.batch_invariant or not prompts:
            return []
        return prompts[0][: shared_prefix(prompts, most=min(map(len, prompts)) - 1)]

    def needs(self, items: Sequence[int]) -> PoolNeeds:
        """Slots of keys and values, and what a row takes in a step: logits above all, in two precisions."""
        own = self.settings.max_new_tokens - len(self.shared_prefix)
        head = self.model.get_output_embeddings().weight  # [vocabulary, width]
        copies = 4 if self.settings.samples else 1  # of 4 bytes
        row_bytes = head.shape[0] * (head.element_size() + 4 * copies) + 64 * head.shape[1] * head.element_size()
        return PoolNeeds(
            slots=tuple(sorted((region_slots(max(self.lengths[item] + own, 1)) for item in items), reverse=True)),
            extra_slots=ALIGNMENT + region_slots(len(self.shared_prefix)),
            row_bytes=int(row_bytes),
            step_rows=INVARIANT_ROWS if self.settings.batch_invariant else None,
        )

    def open(self, size: PoolSize) -> TextPool:
        """An empty pool."""
        return TextPool(self, size)


class TextPool:
    """A generation pool over a task's prompts, as `PooledExecutor` drives it."""

    def __init__(self, source: TextPools, size: PoolSize) -> None:
        self._source = source
        settings = source.settings
        self._pool = GenerationPool(
            source.model, settings, source.tokens, rows=INVARIANT_ROWS if settings.batch_invariant else size.rows,
            slots=size.slots, longest=source.longest, prefix=source.shared_prefix,
            chunk_tokens=chunk_tokens_of(source.model, settings, halvings=size.halvings),
        )  # fmt: skip
        self._pool.stopped = source.stopped

    @property
    def computed(self) -> int:
        """Tokens of prompts and steps."""
        return self._pool.computed_tokens

    @property
    def useful(self) -> int:
        """Of them, those of prompts and answers."""
        return self._pool.useful_tokens

    @property
    def active(self) -> int:
        """Sequences in it."""
        return self._pool.active

    @property
    def slots(self) -> int:
        """Its size, in tokens."""
        return self._pool.arena.slots

    @property
    def slot_bytes(self) -> int:
        """Keys and values of a token."""
        return self._pool.arena.slot_bytes

    def admit(self, items: Sequence[int], prepared: Sequence[Any]) -> int:
        """Read prompts as far as there is room."""
        return self._pool.admit([PoolPrompt(ids=ids, key=item) for item, ids in zip(items, prepared, strict=True)])

    def advance(self) -> list[PooledResult]:
        """Some steps; the answers that have ended."""
        ended = self._pool.advance()
        if not ended:
            return []
        answers = self._source.read(
            [one.tokens for one in ended], [one.ended for one in ended], [self.details(one.key) for one in ended]
        )
        return [
            PooledResult(item=one.key, result=answer, shared_with=one.shared_with)
            for one, answer in zip(ended, answers, strict=True)
        ]

    def details(self, item: int) -> Mapping[str, Any]:
        """What is reported of an item beside its answer."""
        del item
        return {}

    def grow(self, slots: int) -> None:
        """More room."""
        self._pool.grow(slots)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return self._pool.tensors()

    def release(self) -> None:
        """Free it."""
        self._source.notes += [note for note in self._pool.notes if note not in self._source.notes]
        self._pool.release()
