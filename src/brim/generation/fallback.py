"""transformers' own `generate`, for models that the decode loop does not fit; slower, and the same answers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from brim.generation.answers import Answers
from brim.generation.choose import PADDING, WARPERS, TokenChooser, generation_config_for, uniforms
from brim.generation.loop import CHECK_STEPS, Padding, PromptBatch, Stopped
from brim.generation.settings import GenerationSettings, TokenIds

__all__ = ["GenerateFallback"]


class GenerateFallback:
    """The interface of `DecodeLoop` over `model.generate`."""

    def __init__(self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, why: str) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.padding: Padding = "right" if model.config.is_encoder_decoder else "left"
        self.device = next(model.parameters()).device
        self.stopped: Stopped | None = None
        self.notes = [f"generation runs through transformers' own generate, which is slower: {why}"]

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""
        model, settings = self.model, self.settings
        ours, theirs = _shared_out(generation_config_for(model, settings, self.tokens))
        processors = []
        if settings.samples or ours.repetition_penalty not in (None, 1.0):
            length = int(batch.inputs["input_ids"].shape[1])
            chooser = TokenChooser(model, ours, prompt_length=length, device=self.device)
            noise = uniforms(settings.seed, batch.keys, settings.max_new_tokens) if settings.samples else None
            mask = None if model.config.is_encoder_decoder else batch.inputs.get("attention_mask")
            processors.append(_Choose(chooser, noise=None if noise is None else noise.to(self.device), mask=mask))
        start = 1 if model.config.is_encoder_decoder else int(batch.inputs["input_ids"].shape[1])
        criteria = [] if self.stopped is None else [_StopCriterion(self.stopped, start)]
        usual = model.generation_config
        model.generation_config = theirs  # generate() fills what is unset from here, and warns about it
        try:
            ids = model.generate(
                **batch.inputs, generation_config=theirs, logits_processor=processors, stopping_criteria=criteria
            )
        finally:
            model.generation_config = usual
        produced = ids[:, start:]
        answers = Answers.empty(batch.rows, settings.max_new_tokens, self.tokens, self.device)
        answers.write(torch.arange(batch.rows, device=self.device), produced, at=0)
        answers.send(produced.shape[1])
        return answers

    def release(self) -> None:
        """Nothing is kept between batches."""


class _Choose:
    """A logits processor that leaves one token in the running: the chooser's, with the sample's own noise."""

    def __init__(self, chooser: TokenChooser, *, noise: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self._chooser = chooser
        self._noise = noise  # [rows, max_new_tokens]
        self._mask = mask  # [rows, length of the prompts], 0 where they are padding
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.clone()
        if self._mask is not None:
            tokens[:, : self._mask.shape[1]].masked_fill_(self._mask == 0, PADDING)
        uniform = None if self._noise is None else self._noise[:, self._step]
        chosen = self._chooser.choose(scores, tokens=tokens, uniform=uniform)
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen.unsqueeze(1), 0.0)


class _StopCriterion:
    """A stopping criterion of transformers that asks now and then which answers have come to their end."""

    def __init__(self, stopped: Stopped, start: int) -> None:
        self._stopped = stopped
        self._start = start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        del scores, kwargs
        new = input_ids[:, self._start :]
        ended = [False] * len(new)
        if new.shape[1] % CHECK_STEPS == 0:
            ended = self._stopped(new.tolist())
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


def _shared_out(config: Any) -> tuple[Any, Any]:
    """What the chooser does, once everything else is done, and what is left to `generate`.

    The chooser draws, and penalises repetition: `generate` would penalise the padding of a batch too.
    """
    ours, theirs = type(config)(), copy.deepcopy(config)
    for name in ("max_new_tokens", "eos_token_id", "do_sample"):
        setattr(ours, name, getattr(config, name))
    for name in ("repetition_penalty", *WARPERS):
        setattr(ours, name, getattr(config, name, None))
        setattr(theirs, name, None)
    theirs.do_sample = False
    return ours, theirs
