"""From logits to the next token: greedy, or drawn with noise that belongs to the sample and not to its batch.

transformers' logits processors do what the generation configuration asks (penalties, temperature, nucleus); the draw
itself is brim's: one uniform number per sample and step, from a counter-based generator keyed by seed and sample, so
that neither the batch size nor a resumed run changes an answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from brim.decode.settings import GenerationSettings, TokenIds

__all__ = ["TokenChooser", "generation_config_for", "uniforms"]

# Processors that look at the scores alone; any other may look at the tokens so far.
_SCORES_ONLY = {
    "InfNanRemoveLogitsProcessor",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
}


def generation_config_for(model: Any, settings: GenerationSettings, tokens: TokenIds) -> Any:
    """The model's own generation configuration with what was asked for in its place."""
    config = copy.deepcopy(model.generation_config)
    config.max_length = None
    config.min_length = 0
    config.max_new_tokens = settings.max_new_tokens
    config.do_sample = settings.samples
    config.num_beams = 1
    config.use_cache = True
    config.eos_token_id = list(tokens.ends) or None
    config.pad_token_id = tokens.pad
    config.temperature = settings.temperature if settings.samples else None
    config.top_p = settings.top_p if settings.samples and settings.top_p < 1 else None
    if not settings.samples:
        config.top_k = None
        for name in ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"):
            if hasattr(config, name):
                setattr(config, name, None)
    return config


def uniforms(seed: int, keys: Sequence[int], count: int) -> torch.Tensor:
    """[samples, count] numbers in (0, 1), each a function of seed, sample and step alone."""
    import numpy

    rows = [numpy.random.Generator(numpy.random.Philox(key=[seed, key])).random(count) for key in keys]
    drawn = torch.from_numpy(numpy.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)
    return drawn.to(torch.float32).clamp_(1e-7, 1 - 1e-7)


class TokenChooser:
    """Chooses the next token of every row of a batch.

    `needs_tokens` says whether the tokens so far are looked at; without that, a choice depends on the logits alone
    and can be captured together with the step that made them.
    """

    def __init__(self, model: Any, config: Any, *, prompt_length: int, device: torch.device) -> None:
        self._processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt_length,
            encoder_input_ids=None,
            prefix_allowed_tokens_fn=None,
            logits_processor=[],
            device=str(device),
            model_kwargs={},
        )
        self._draws = bool(config.do_sample)
        self.needs_tokens = any(type(one).__name__ not in _SCORES_ONLY for one in self._processors)

    def choose(
        self, logits: torch.Tensor, *, tokens: torch.Tensor | None, uniform: torch.Tensor | None
    ) -> torch.Tensor:
        """The next token of each row, [rows], from logits [rows, vocabulary]."""
        scores = logits.float()
        for processor in self._processors:
            scores = processor(tokens, scores)
        if not self._draws:
            return scores.argmax(dim=-1)
        assert uniform is not None
        running = scores.softmax(dim=-1).cumsum(dim=-1)  # [rows, vocabulary]
        reached = running >= (uniform * running[:, -1]).unsqueeze(-1)
        return reached.to(torch.uint8).argmax(dim=-1)  # the first token at which the running sum passes the number
