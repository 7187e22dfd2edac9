"""Greedy generation of a fixed number of new tokens: the worst case of a generative language model.

Works with any model that has transformers' `generate` and `generation_config`, without importing transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.workloads.base import Mode, Workload
from brim.workloads.model_call import in_mode

__all__ = ["GenerateWorkload"]

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class GenerateWorkload(Workload):
    """Generates exactly `max_new_tokens` tokens for every item: an early end would make a batch look cheap.

    A batch is a mapping with `input_ids` and, best, `attention_mask`.
    """

    mode: Mode = "generate"

    def __init__(
        self,
        *,
        model: nn.Module,
        make_batch: Callable[[int], Mapping[str, Any]],
        max_new_tokens: int,
        device: torch.device | str,
        identity: Mapping[str, Any] | None = None,
        largest_size: int | None = None,
    ) -> None:
        if not (hasattr(model, "generate") and getattr(model, "generation_config", None) is not None):
            raise RequestError(
                f"mode generate: {type(model).__name__} cannot generate (no generate and generation_config); "
                "use mode forward, or give a step of your own"
            )
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens}: the smallest is 1")
        self.model = model
        self.device = torch.device(device)
        self.max_new_tokens = max_new_tokens
        self._make_batch = make_batch
        self._identity = identity
        self._largest_size = largest_size
        self._generation_config = _greedy_config(model, max_new_tokens)

    def make_batch(self, size: int) -> Mapping[str, Any]:
        """The batch that `make_batch=` gives for the size."""
        return self._make_batch(size)

    def step(self, batch: Mapping[str, Any]) -> Any:
        """One generation; returns the token ids, the prompt included where the model includes it."""
        model: Any = self.model
        with in_mode(model, training=False), self._own_generation_config(), torch.inference_mode():
            return model.generate(**batch, generation_config=self._generation_config)

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.model,)

    def largest_size(self) -> int | None:
        """The size past which a batch makes no sense, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """What the plan is filed under, if it was given."""
        return self._identity

    @contextmanager
    def _own_generation_config(self) -> Iterator[None]:
        # generate() fills unset flags from the model's own config (a temperature, a max_length), then warns that
        # greedy search does not use them. While ours stands in for it, there is nothing else to take.
        model: Any = self.model
        usual = model.generation_config
        model.generation_config = self._generation_config
        try:
            yield
        finally:
            model.generation_config = usual


def _greedy_config(model: Any, max_new_tokens: int) -> Any:
    usual = model.generation_config
    ids = {name: getattr(usual, name, None) for name in _TOKEN_IDS}
    if ids["pad_token_id"] is None:  # unset, generate() picks one and logs about it at every call
        end = ids["eos_token_id"]
        ids["pad_token_id"] = next(iter(end), 0) if isinstance(end, (list, tuple)) else (end or 0)
    return type(usual)(
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        **ids,
    )
