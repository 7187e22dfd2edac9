"""Workloads without gradients: a forward, and a generation of all new tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.generation.loop import PromptBatch
from brim.generation.select import Decoder, make_decoder
from brim.generation.settings import GenerationSettings, TokenIds
from brim.records import Mode
from brim.workloads.base import Workload, call_model, in_mode

__all__ = ["ForwardWorkload", "GenerateWorkload"]


class ForwardWorkload(Workload):
    """Runs the model in evaluation mode on each batch; after every step its training flags are as before.

    `inference_mode=False` takes `torch.no_grad` instead, for a model that keeps tensors made in a forward
    (a cache, a lazily filled buffer) and is trained afterwards.

        workload = ForwardWorkload(model=resnet, make_batch=lambda n: torch.randn(n, 3, 224, 224), device="cpu")
    """

    mode: Mode = "forward"

    def __init__(
        self,
        *,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        device: torch.device | str,
        identity: Mapping[str, Any] | None = None,
        largest_size: int | None = None,
        inference_mode: bool = True,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self._make_batch = make_batch
        self._identity = identity
        self._largest_size = largest_size
        self._without_gradients = torch.inference_mode if inference_mode else torch.no_grad

    def make_batch(self, size: int) -> Any:
        """The batch that `make_batch=` gives for the size."""
        return self._make_batch(size)

    def step(self, batch: Any) -> Any:
        """One forward; its output is returned, so that it counts in the peak as it does in an evaluation."""
        with in_mode(self.model, training=False), self._without_gradients():
            return call_model(self.model, batch)

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.model,)

    def largest_size(self) -> int | None:
        """The largest useful size, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """What a cached plan is stored under, if it was given."""
        return self._identity


class GenerateWorkload(Workload):
    """Generates exactly `max_new_tokens` tokens for every item: an answer that ends early would understate the cost.

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
        if not hasattr(model, "_get_logits_processor") or getattr(model, "generation_config", None) is None:
            raise RequestError(
                f"mode generate: {type(model).__name__} is not a generating model of transformers; use mode forward, "
                "or give a step of your own"
            )
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens}: the smallest is 1")
        self.model = model
        self.device = torch.device(device)
        self.max_new_tokens = max_new_tokens
        self._make_batch = make_batch
        self._identity = identity
        self._largest_size = largest_size
        self.decoder: Decoder | None = None  # made at the first step, unless someone gives another

    def make_batch(self, size: int) -> Mapping[str, Any]:
        """The batch that `make_batch=` gives for the size."""
        return self._make_batch(size)

    def step(self, batch: Mapping[str, Any]) -> Any:
        """One generation by the decode loop that an evaluation runs; returns the answers."""
        with in_mode(self.model, training=False):
            if self.decoder is None:
                settings = GenerationSettings(max_new_tokens=self.max_new_tokens)
                tokens = TokenIds(ends=(), pad=TokenIds.of(getattr(self.model, "generation_config", None)).pad)
                longest = int(batch["input_ids"].shape[1])
                self.decoder = make_decoder(self.model, settings, tokens, images=len(batch) > 2, longest=longest)
                self.notes = (*self.notes, *self.decoder.notes)
            return self.decoder.generate(_prompts(batch, self.decoder.padding))

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.model,)

    def release(self) -> None:
        """Free the keys, values and graph kept for the next step of the same size."""
        if self.decoder is not None:
            self.decoder.release()

    def largest_size(self) -> int | None:
        """The largest useful size, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """What a cached plan is stored under, if it was given."""
        return self._identity


def _prompts(batch: Mapping[str, Any], padding: str) -> PromptBatch:
    """A worst-case batch has no padding: every row is as long as the batch."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    full = mask is None or len(batch) <= 2
    if padding == "right" and full and "decoder_input_ids" not in batch:
        lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.long, device=ids.device)
        return PromptBatch(inputs={"input_ids": ids}, lengths=lengths, keys=range(ids.shape[0]))
    inputs = {"attention_mask": torch.ones_like(ids), **batch}
    return PromptBatch(inputs=inputs, keys=range(ids.shape[0]))
