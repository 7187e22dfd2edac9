"""transformers' own `generate`, for models that the decode loop does not fit; slower, and the same answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from brim.decode.answers import Answers
from brim.decode.choose import TokenChooser, generation_config_for, uniforms
from brim.decode.loop import Padding, PromptBatch
from brim.decode.settings import GenerationSettings, TokenIds

__all__ = ["GenerateFallback"]


class GenerateFallback:
    """The interface of `DecodeLoop` over `model.generate`."""

    def __init__(self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, why: str) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.padding: Padding = "right" if model.config.is_encoder_decoder else "left"
        self.device = next(model.parameters()).device
        self.notes = [f"generation runs through transformers' own generate, which is slower: {why}"]

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""
        model, settings = self.model, self.settings
        config = generation_config_for(model, settings, self.tokens)
        processors = []
        if settings.samples:
            length = int(batch.inputs["input_ids"].shape[1])
            chooser = TokenChooser(model, config, prompt_length=length, device=self.device)
            noise = uniforms(settings.seed, batch.keys, settings.max_new_tokens).to(self.device)
            processors.append(_Draw(chooser, noise))
            config = generation_config_for(model, _greedy(settings), self.tokens)
        usual = model.generation_config
        model.generation_config = config  # generate() fills what is unset from here, and warns about it
        try:
            ids = model.generate(**batch.inputs, generation_config=config, logits_processor=processors)
        finally:
            model.generation_config = usual
        start = 1 if model.config.is_encoder_decoder else batch.inputs["input_ids"].shape[1]
        produced = ids[:, start:]
        answers = Answers.empty(batch.rows, settings.max_new_tokens, self.tokens, self.device)
        answers.write(torch.arange(batch.rows, device=self.device), produced, at=0)
        answers.send(produced.shape[1])
        return answers

    def release(self) -> None:
        """Nothing is kept between batches."""


class _Draw:
    """A logits processor that leaves one token in the running: the one drawn with the sample's own noise."""

    def __init__(self, chooser: TokenChooser, noise: torch.Tensor) -> None:
        self._chooser = chooser
        self._noise = noise
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self._chooser.choose(scores, tokens=input_ids, uniform=self._noise[:, self._step])
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen.unsqueeze(1), 0.0)


def _greedy(settings: GenerationSettings) -> GenerationSettings:
    return dataclasses.replace(settings, temperature=0.0, top_p=1.0)
