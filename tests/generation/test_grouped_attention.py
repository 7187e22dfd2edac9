from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from brim.generation.cache import GROUPED, grouped_attention
from brim.generation.loop import DecodeLoop
from tests.generation.tiny_models import NO_ENDS, batch_of, llama, make_prompts, qwen2, settings


@torch.inference_mode()
def step_logits(model: Any) -> torch.Tensor:
    """The logits of a first decode step over prompts of different lengths."""
    loop = DecodeLoop(model, settings(4), NO_ENDS)
    batch = batch_of(loop, make_prompts())
    state = loop._state_for(batch, 4)
    state.accept(loop.prefill(state, batch).argmax(dim=-1), torch.tensor([-1]), 0)
    return loop.decode_one_token(state)


@pytest.fixture
def key_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many heads the keys of each single-token attention have."""
    seen: list[int] = []
    usual = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if key.shape[2] == 64:  # every slot: a decode step
            seen.append(key.shape[1])
        return usual(query, key, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def test_keys_are_read_as_they_are_stored_and_the_logits_are_the_same(
    key_heads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen2()
    grouped = step_logits(model)
    assert key_heads == [2, 2], "two heads of keys in each of two layers"
    key_heads.clear()
    monkeypatch.setattr("brim.generation.loop.grouped_attention", lambda config: contextlib.nullcontext())
    plain = step_logits(model)
    assert key_heads == [4, 4], "repeated for each head of queries"
    torch.testing.assert_close(grouped, plain, rtol=1e-5, atol=1e-5)
    assert plain.std() > 0.5


def test_ungrouped_heads_use_plain_attention(key_heads: list[int]) -> None:
    step_logits(llama())
    assert key_heads == [4, 4]


def test_a_mask_for_each_head_of_queries_is_honoured() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = qwen2()
    with grouped_attention(model.config):
        attend = ALL_ATTENTION_FUNCTIONS[GROUPED]
    module = model.model.layers[0].self_attn
    query, keys = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8)
    mask = torch.rand(2, 4, 1, 16) > 0.5
    mask[..., 0] = True
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, keys, keys, mask, scaling=0.3)
    torch.testing.assert_close(attend(module, query, keys, keys, mask, scaling=0.3)[0], expected)


def test_the_configuration_is_restored_also_after_an_error() -> None:
    config = qwen2().config
    with grouped_attention(config):
        assert config._attn_implementation == GROUPED
    assert config._attn_implementation == "sdpa"

    def fail() -> None:
        with grouped_attention(config):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # the one raised above
        fail()
    assert config._attn_implementation == "sdpa"


def test_another_attention_implementation_is_unchanged() -> None:
    model = qwen2(attn_implementation="eager")
    with grouped_attention(model.config):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(step_logits(model), step_logits(qwen2()), rtol=1e-4, atol=1e-4)
