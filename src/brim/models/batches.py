"""Worst-case batches of random content: images, labels, token ids. Global random generators are not used.

Token ids: every prompt as long as the knob says, without padding and without special tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from brim.workloads.knobs import Knob

__all__ = [
    "default_lengths",
    "plain_token_range",
    "random_floats",
    "random_integers",
    "special_token_ids",
    "token_batch",
    "token_knobs",
]

DEFAULT_TOKENS = 512
DEFAULT_NEW_TOKENS = 32


def token_batch(size: int, tokens: int, id_range: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and a full `attention_mask`, both [size, tokens]."""
    ids = random_integers(*id_range, (size, tokens), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def special_token_ids(config: Mapping[str, Any]) -> set[int]:
    """Every special token id of a configuration: its `*_token_id` entries, also nested ones."""
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
    """The default (tokens, max_new_tokens) within a limit, which applies to their sum if `shared`, else to each."""
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


def random_floats(shape: Sequence[int], *, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `torch.randn`, but the same values on every call, without using the global generator."""
    return torch.randn(tuple(shape), device=device, dtype=dtype, generator=_generator(device))


def random_integers(low: int, high: int, shape: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """As `torch.randint` (`high` excluded), the same values on every call."""
    return torch.randint(low, high, tuple(shape), device=device, generator=_generator(device))


def _generator(device: torch.device) -> torch.Generator | None:
    # Devices that exist only in a trace (meta, CUDA faked on a machine without it) have no generator.
    real = device.type in ("cpu", "mps") or (device.type == "cuda" and torch.cuda.is_available())
    return torch.Generator(device=device).manual_seed(0) if real else None
