"""Models of two layers with random weights, prompts for them, and what transformers' own `generate` answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import transformers

from brim.generation.loop import PromptBatch
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers
from brim.generation.trial import padded_batch
from tests.saved_models import varied

# Weights are drawn in the order of a model's parameters, which version 5 changed for BART; and before it padding leaks
# into a state-space model, so that its batches answer otherwise than its single prompts.
SINCE_VERSION_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers 5")

VOCABULARY = 101
PAD = 0
END = 2
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": END}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
UNTIED = {"tie_word_embeddings": False}  # a tied head repeats the last token for ever
NO_ENDS = TokenIds(ends=(), pad=PAD)
LENGTHS = (3, 17, 1, 40, 8, 25)


def llama(**options: Any) -> Any:
    options = {"num_key_value_heads": 4, **options}
    return varied(transformers.LlamaForCausalLM(transformers.LlamaConfig(**IDS, **SHAPE, **options)))


def llama_stretched(kind: str, *, trained: int) -> Any:
    """Positions beyond those of its training turn all positions of a forward in another way."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": trained}
    shape = SHAPE | ({"max_position_embeddings": trained} if kind == "dynamic" else {})
    config = transformers.LlamaConfig(**IDS, **shape, num_key_value_heads=4, rope_scaling=rope)
    return varied(transformers.LlamaForCausalLM(config))


def qwen2(**options: Any) -> Any:
    """Two query heads share one of keys and values."""
    config = transformers.Qwen2Config(**IDS, **SHAPE, num_key_value_heads=2, **options)
    return varied(transformers.Qwen2ForCausalLM(config))


def mistral(**options: Any) -> Any:
    config = transformers.MistralConfig(**IDS, **SHAPE, num_key_value_heads=2, **options)
    return varied(transformers.MistralForCausalLM(config))


def mixtral() -> Any:
    """Each token goes to two of four experts."""
    config = transformers.MixtralConfig(**IDS, **SHAPE, num_key_value_heads=2, num_local_experts=4)
    return varied(transformers.MixtralForCausalLM(config))


def gemma3() -> Any:
    """Layers with a window that is wider than any prompt here, with rotations of their own."""
    config = transformers.Gemma3TextConfig(**IDS, **SHAPE, **UNTIED, num_key_value_heads=1, head_dim=8)
    return varied(transformers.Gemma3ForCausalLM(config))


def gpt2() -> Any:
    config = transformers.GPT2Config(**IDS, **UNTIED, n_embd=32, n_layer=2, n_head=4, n_positions=160)
    model = varied(transformers.GPT2LMHeadModel(config))
    model.config.pad_token_id = None  # as published; with one the model speaks up about masks
    return model


def gpt_neo(**options: Any) -> Any:
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(
        **IDS, **UNTIED, hidden_size=32, num_layers=2, attention_types=kinds, num_heads=4,
        max_position_embeddings=160, **options,
    )  # fmt: skip
    return varied(transformers.GPTNeoForCausalLM(config))


def gpt_neox() -> Any:
    return varied(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**IDS, **SHAPE)))


def bloom() -> Any:
    config = transformers.BloomConfig(**IDS, **UNTIED, hidden_size=32, n_layer=2, n_head=4)
    return varied(transformers.BloomForCausalLM(config))


def opt() -> Any:
    config = transformers.OPTConfig(
        **IDS, **UNTIED, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=160,
    )  # fmt: skip
    return varied(transformers.OPTForCausalLM(config))


def mamba() -> Any:
    config = transformers.MambaConfig(**IDS, **UNTIED, hidden_size=32, num_hidden_layers=2, state_size=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # its biases are drawn, too
        model = transformers.MambaForCausalLM(config)
    return varied(model)


def t5() -> Any:
    config = transformers.T5Config(
        **IDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied
    return varied(model, spread=0.2, louder=("relative", "SelfAttention.v"), quieter=("EncDecAttention",))


def bart() -> Any:
    config = transformers.BartConfig(
        **IDS, **UNTIED, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=160,
        decoder_start_token_id=3,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    model.generation_config.forced_eos_token_id = None  # the default forces an end at the last token
    return varied(model, spread=0.2, louder=("embed_positions",), quieter=("encoder_attn",))


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": qwen2,
    "llama": llama,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "bloom": bloom,
    "opt": opt,
    "t5": t5,
    "bart": bart,
}


def make_prompts(lengths: Iterable[int] = LENGTHS, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]


def batch_of(decoder: Any, prompts: Sequence[torch.Tensor], keys: Sequence[int] | None = None) -> PromptBatch:
    """The prompts padded as the decoder wants them."""
    seq2seq = decoder.model.config.is_encoder_decoder
    batch = padded_batch(list(prompts), decoder.padding, pad=decoder.tokens.pad, masked=seq2seq)
    return PromptBatch(inputs=batch.inputs, lengths=batch.lengths, keys=batch.keys if keys is None else keys)


def answers_of(decoder: Any, prompts: Sequence[torch.Tensor], keys: Sequence[int] | None = None) -> list[list[int]]:
    answers: Answers = decoder.generate(batch_of(decoder, prompts, keys))
    return answers.token_lists()


def own_answers(
    model: Any, prompts: Sequence[torch.Tensor], max_new_tokens: int, ends: Sequence[int] = (), **inputs: torch.Tensor
) -> list[list[int]]:
    """What transformers' own `generate` answers to each prompt alone, cut before the first of the end tokens.

    `inputs` hold one more entry per prompt for each further input of the model.
    """
    usual = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = list(ends) or None
    answers = []
    for row, prompt in enumerate(prompts):
        ids = model.generate(
            input_ids=prompt.unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **{name: values[row : row + 1] for name, values in inputs.items()},
        )[0].tolist()
        new = ids[1:] if model.config.is_encoder_decoder else ids[len(prompt) :]
        first = min((new.index(end) for end in ends if end in new), default=len(new))
        answers.append(new[:first])
    model.generation_config.eos_token_id = usual
    return answers


def ends_met_at_different_times(answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Two tokens by which some answers end within four tokens, some within twelve, and at least two never."""
    seen, never = sorted({token for answer in answers for token in answer}), len(answers[0])
    for pair in itertools.combinations(seen, 2):
        lengths = [min((answer.index(end) for end in pair if end in answer), default=never) for answer in answers]
        if min(lengths) < 4 and any(4 <= length < 12 for length in lengths) and lengths.count(never) >= 2:
            return pair
    raise AssertionError("no such pair of tokens")


def settings(max_new_tokens: int = 12, **options: Any) -> GenerationSettings:
    return GenerationSettings(max_new_tokens=max_new_tokens, **options)
