"""The decode loop for models with an encoder: the encoder reads the prompt once, and the decoder starts empty."""

from __future__ import annotations

from typing import Any

import torch

from brim.generation.loop import DecodeLoop, PromptBatch
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import DecodeState

__all__ = ["Seq2SeqLoop"]


class Seq2SeqLoop(DecodeLoop):
    """As `DecodeLoop`, but the prompt goes through the encoder: padded on the right, under a mask."""

    def __init__(self, model: Any, settings: GenerationSettings, tokens: TokenIds) -> None:
        super().__init__(model, settings, tokens, padding="right")
        start = self._config.decoder_start_token_id
        start = start if start is not None else getattr(model.config, "decoder_start_token_id", None)
        start = start if start is not None else self._config.bos_token_id
        self._start_token = int(start if start is not None else tokens.pad)
        self._encoded: dict[str, Any] = {}  # the current batch's: inputs of every decoder step beside its token
        self._cache: Any = None

    def prefill(self, state: DecodeState, batch: PromptBatch) -> torch.Tensor:
        """Encode the prompts and run the decoder on its start token."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        inputs = dict(batch.inputs)
        encoded = self.model.get_encoder()(**inputs)
        self._encoded = {"encoder_outputs": encoded, "attention_mask": inputs.get("attention_mask")}
        self._cache = EncoderDecoderCache(state.cache, DynamicCache())
        state.slots.decoding = False
        start = torch.full((batch.rows, 1), self._start_token, dtype=torch.long, device=self.device)
        output = self.model(decoder_input_ids=start, past_key_values=self._cache, use_cache=True, **self._encoded)
        state.begin(slot=1, position=torch.ones(batch.rows, dtype=torch.long, device=self.device), valid=start >= 0)
        state.slots.decoding = True
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def decode_one_token(self, state: DecodeState) -> torch.Tensor:
        """Store the last token of every row and give the logits of the next, [rows, vocabulary]."""
        inputs: dict[str, Any] = {"decoder_input_ids": state.token, "decoder_attention_mask": state.valid}
        if "cache_position" in self._parameters:  # before transformers 5
            inputs["cache_position"] = state.slots.next
        output = self.model(past_key_values=self._cache, use_cache=True, **inputs, **self._encoded)
        state.advance()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def release(self) -> None:
        """Free what the last batch left."""
        super().release()
        self._encoded, self._cache = {}, None

    def _start(self, batch: PromptBatch) -> int:  # noqa: ARG002  # the start token alone
        return 1

    def _history(self, batch: PromptBatch) -> torch.Tensor:
        return torch.full((batch.rows, 1), self._start_token, dtype=torch.long, device=self.device)

    def _state_for(self, batch: PromptBatch, segment: int) -> DecodeState:
        self._kept = None  # a graph holds the encoder's output of its own batch
        return super()._state_for(batch, segment)

    def _next_segment(self, state: DecodeState, remaining: torch.Tensor, left: int) -> DecodeState:
        grown = super()._next_segment(state, remaining, left)
        encoded = self._encoded["encoder_outputs"]
        encoded.last_hidden_state = encoded.last_hidden_state.index_select(0, remaining)
        mask = self._encoded["attention_mask"]
        self._encoded["attention_mask"] = None if mask is None else mask.index_select(0, remaining)
        self._cache.self_attention_cache = grown.cache
        for layer in self._cache.cross_attention_cache.layers:
            layer.keys = layer.keys.index_select(0, remaining)
            layer.values = layer.values.index_select(0, remaining)
        return grown
