"""Worst-case batches of token ids: every prompt as long as the knob says, no padding, no special token."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from brim.workloads.knobs import Knob
from brim.workloads.random_tensors import random_integers

__all__ = ["default_lengths", "plain_token_range", "special_token_ids", "token_batch", "token_knobs"]

DEFAULT_TOKENS = 512
DEFAULT_NEW_TOKENS = 32


def token_batch(size: int, tokens: int, id_range: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and a full `attention_mask`, both [size, tokens]."""
    ids = random_integers(*id_range, (size, tokens), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def special_token_ids(config: Mapping[str, Any]) -> set[int]:
    """Every id that a configuration gives a meaning: its `*_token_id` entries, nested ones included."""
    found: set[int] = set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= special_token_ids(value)
        elif str(key).endswith(("_token_id", "_token_ids", "_token_index")):
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {entry for entry in values if isinstance(entry, int)}
    return found


def plain_token_range(vocabulary: int, special: Collection[int]) -> tuple[int, int]:
    """The longest run of ids without a special one, as (low, high) with `high` excluded."""
    edges = sorted({-1, vocabulary, *(token for token in special if 0 <= token < vocabulary)})
    runs = [(low + 1, high) for low, high in itertools.pairwise(edges)]
    low, high = max(runs, key=lambda run: run[1] - run[0])
    return (low, high) if high > low else (0, vocabulary)


def default_lengths(limit: int | None, *, shared: bool) -> tuple[int, int]:
    """The default (tokens, max_new_tokens) within a limit, which both share unless they have a side each."""
    if limit is None:
        return DEFAULT_TOKENS, DEFAULT_NEW_TOKENS
    new_tokens = max(1, min(DEFAULT_NEW_TOKENS, limit // 2))
    return max(1, min(DEFAULT_TOKENS, limit - new_tokens if shared else limit)), new_tokens


def token_knobs(limit: int | None, *, generates: bool, shared: bool = True) -> tuple[Knob, ...]:
    """`tokens`, and `max_new_tokens` for a model that generates."""
    tokens, new_tokens = default_lengths(limit, shared=shared)
    if not generates:
        tokens = DEFAULT_TOKENS if limit is None else min(DEFAULT_TOKENS, limit)
    prompt = Knob(name="tokens", default=tokens, help="tokens in a prompt", minimum=1, maximum=limit)
    if not generates:
        return (prompt,)
    new = Knob(name="max_new_tokens", default=new_tokens, help="tokens to generate", minimum=1, maximum=limit)
    return prompt, new
