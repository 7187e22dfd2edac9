"""The prompts and the language model of the generation benchmarks: random tokens, lengths as prompts have them."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["LONGEST", "NEW_TOKENS", "QWEN2_SHAPE", "build_model", "prompts"]

LONGEST = 1500
NEW_TOKENS = 16

# 0.27 B parameters in the shape of Qwen2.
QWEN2_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def prompts(count: int = 4096, seed: int = 0) -> list[list[int]]:
    """Prompts of log-normal length, mean near 204 tokens, at most 1,500."""
    draw = random.Random(seed)
    lengths = [min(max(round(draw.lognormvariate(4.92, 0.9)), 4), LONGEST) for _ in range(count)]
    lengths[0] = LONGEST
    return [[draw.randrange(100, 65000) for _ in range(length)] for length in lengths]


def build_model(device: str = "cuda") -> Any:
    """The model with random weights in bfloat16, ready to generate."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN2_SHAPE)).to(torch.bfloat16)
    model.eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model
