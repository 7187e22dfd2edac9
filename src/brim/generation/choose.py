"""From logits to the next token: greedy, or sampled with noise that depends on the sample and not on its batch.

transformers' logits processors apply the generation configuration (penalties, temperature, top-p); the sampling
itself is brim's: one uniform number per sample and step, from a counter-based generator keyed by seed and sample, so
that neither the batch size nor a resumed run changes an answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from brim.generation.settings import GenerationSettings, TokenIds

__all__ = ["PADDING", "WARPERS", "TokenChooser", "generation_config_for", "uniforms"]

PADDING = -1  # marks padding among the tokens so far
# Options of a generation configuration that apply to sampling only.
WARPERS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")

# Processors that read the scores only; any other may read the tokens so far.
_SCORES_ONLY = {
    "InfNanRemoveLogitsProcessor",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
}


def generation_config_for(model: Any, settings: GenerationSettings, tokens: TokenIds) -> Any:
    """The model's own generation configuration, with the settings in place of its values."""
    config = copy.deepcopy(model.generation_config)
    config.max_length = None
    if not model.config.is_encoder_decoder:
        config.min_length = 0  # it counts the prompt, and in a batch its padding
    config.max_new_tokens = settings.max_new_tokens
    config.do_sample = settings.samples
    config.num_beams = 1
    config.num_return_sequences = 1
    config.return_dict_in_generate = False
    config.use_cache = True
    config.eos_token_id = list(tokens.ends) or None
    config.pad_token_id = tokens.pad
    config.temperature = settings.temperature if settings.samples else None
    config.top_p = settings.top_p if settings.samples and settings.top_p < 1 else None
    if not settings.samples:
        for name in WARPERS:
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

    `needs_tokens`: whether the tokens so far are read; if not, a choice depends on the logits only and can be
    captured together with the step that computes them.
    """

    def __init__(self, model: Any, config: Any, *, prompt_length: int, device: torch.device) -> None:
        config = copy.copy(config)
        config.max_length = prompt_length + config.max_new_tokens  # this and the next as in `generate`
        ends = config.eos_token_id
        config._eos_token_tensor = None if ends is None else torch.tensor(ends, dtype=torch.long, device=device)
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
        """The next token of each row, [rows], from logits [rows, vocabulary] and the tokens so far, [rows, length]."""
        scores = logits.float()
        if tokens is not None:
            # Padding becomes a token one past the vocabulary: a penalty on it affects no real token.
            tokens = tokens.where(tokens != PADDING, scores.shape[1])
            scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        for processor in self._processors:
            scores = processor(tokens, scores)
        scores = scores[:, : logits.shape[1]]
        if not self._draws:
            return scores.argmax(dim=-1)
        assert uniform is not None
        running = scores.softmax(dim=-1).cumsum(dim=-1)  # [rows, vocabulary]
        reached = running >= (uniform * running[:, -1]).unsqueeze(-1)
        return reached.to(torch.uint8).argmax(dim=-1)  # the first token at which the running sum passes the number
