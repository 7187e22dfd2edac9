"""Keys and values of a batch, stored in place: transformers' cache interface over tensors at fixed addresses.

During prefill attention sees only the prompt, so that no mask over empty slots is needed; during decoding every step
reads and writes the same memory, so that it can be captured once and replayed. Transformers' `StaticCache` does only
the second. The only file of this layer that imports transformers' caches and masks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Slots", "grouped_attention", "make_cache"]

GROUPED = "brim_grouped_sdpa"


class Slots:
    """Where the next key goes, shared by all layers of a cache."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.next = torch.zeros(1, dtype=torch.long, device=device)  # the slot the current step writes
        self.decoding = False


@functools.cache
def _layer_class() -> type[Any]:
    from transformers.cache_utils import CacheLayerMixin

    class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
        """One layer's keys and values, [batch, heads, capacity, head_dim]."""

        is_sliding = False

        def __init__(self, slots: Slots, rows: int) -> None:
            super().__init__()
            self.slots = slots
            self.rows = rows

        @property
        def is_compileable(self) -> bool:
            return self.slots.decoding

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
            values = key_states if value_states is None else value_states
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys = self._storage(key_states)
            self.values = self._storage(values)
            self.is_initialized = True

        def _storage(self, states: torch.Tensor) -> torch.Tensor:
            # Zeros, not garbage: a masked slot still enters the sum, and 0 × NaN is NaN.
            return states.new_zeros((self.rows, states.shape[1], self.slots.capacity, states.shape[3]))

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del args, kwargs
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if self.slots.decoding:
                self.keys.index_copy_(2, self.slots.next, key_states)
                self.values.index_copy_(2, self.slots.next, value_states)
                return self.keys, self.values
            rows, length = key_states.shape[0], key_states.shape[2]
            self.keys[:rows, :, :length].copy_(key_states)
            self.values[:rows, :, :length].copy_(value_states)
            return key_states, value_states

        def get_mask_sizes(self, query: Any) -> tuple[int, int]:
            if self.slots.decoding:
                return self.slots.capacity, 0
            return (query if isinstance(query, int) else query.shape[0]), 0

        def get_seq_length(self, *args: Any) -> Any:
            del args
            return self.slots.next.squeeze(0) if self.slots.decoding else 0

        def get_max_length(self) -> int:
            return self.slots.capacity

        get_max_cache_shape = get_max_length  # its name before transformers 5

    return SlotLayer


def make_cache(layers: int, rows: int, slots: Slots) -> Any:
    """A transformers `Cache` for some layers and rows, allocated when the first prompt is read."""
    from transformers.cache_utils import Cache

    layer_class = _layer_class()
    return Cache(layers=[layer_class(slots, rows) for _ in range(layers)])


@contextlib.contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Single-token attention that reads keys and values as they are stored, without repeating them per head.

    With a mask, transformers' SDPA repeats the keys and values of grouped-query attention, which triples the memory
    traffic of a decode step; here the heads of a group take the place of query positions instead.
    """
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    _register_grouped()
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@functools.cache
def _register_grouped() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        heads, kv_heads = query.shape[1], key.shape[1]
        plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        if query.shape[2] != 1 or heads == kv_heads or not plain:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        grouped = query.view(query.shape[0], kv_heads, heads // kv_heads, query.shape[3])
        mask = attention_mask
        if mask is not None and mask.shape[1] not in (1, kv_heads):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        output = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=kwargs.get("scaling")
        )  # [batch, kv_heads, heads / kv_heads, head_dim]
        return output.reshape(query.shape[0], 1, heads, query.shape[3]), None

    AttentionInterface.register(GROUPED, attend)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
