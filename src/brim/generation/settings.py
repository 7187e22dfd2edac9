"""What to generate: how many tokens, how they are chosen, where an answer ends. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import given, named

__all__ = ["GenerationSettings", "TokenIds"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Greedy by default; a temperature above 0 samples, with noise that depends on seed, sample and step alone."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    graphs: bool = True  # capture decode steps as CUDA graphs where that is faster
    own_loop: bool = True  # brim's decode loop where it fits the model; else always transformers' generate
    pool: bool = True  # answers leave one by one, where that is faster and fits the model; else whole batches
    batch_invariant: bool = False  # every forward of a pool has the same shape: nothing else changes an answer

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={self.max_new_tokens}: the smallest is 1")
        if self.temperature < 0:
            raise RequestError(f"{given('temperature', self.temperature)}: it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"{given('top_p', self.top_p)}: it must be above 0 and at most 1")
        if any(not stop for stop in self.stop_strings):
            raise RequestError(f"{named('stop')} '': a stop string must not be empty")

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled rather than chosen greedily."""
        return self.temperature > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Special token ids: those that end an answer, and the padding."""

    ends: tuple[int, ...]
    pad: int

    @classmethod
    def of(cls, generation_config: Any, tokenizer: Any = None) -> TokenIds:
        """From a model's generation configuration, completed by its tokenizer."""
        ends = _listed(getattr(generation_config, "eos_token_id", None))
        if not ends and tokenizer is not None:
            ends = _listed(getattr(tokenizer, "eos_token_id", None))
        pad = getattr(generation_config, "pad_token_id", None)
        if pad is None and tokenizer is not None:
            pad = getattr(tokenizer, "pad_token_id", None)
        return cls(ends=ends, pad=int(pad) if pad is not None else (ends[0] if ends else 0))


def _listed(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(one) for one in ids)
