from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.generation.choose import PADDING, TokenChooser, generation_config_for, uniforms
from brim.generation.settings import TokenIds
from tests.generation.tiny_models import END, NO_ENDS, PAD, llama, settings

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, -3.0, 1.5, 0.2])
DRAWS = 20_000


def chooser(model: Any | None = None, tokens: TokenIds = NO_ENDS, prompt_length: int = 3, **options: Any) -> Any:
    model = llama() if model is None else model
    config = generation_config_for(model, settings(**options), tokens)
    return TokenChooser(model, config, prompt_length=prompt_length, device=torch.device("cpu"))


def frequencies(**options: Any) -> torch.Tensor:
    """How often each token is drawn, one draw for each of many samples."""
    noise = uniforms(0, range(DRAWS), 1)[:, 0]
    drawn = chooser(**options).choose(LOGITS.expand(DRAWS, -1), tokens=None, uniform=noise)
    return torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sampling_frequencies_match_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(dim=0)
    torch.testing.assert_close(frequencies(temperature=temperature), expected, atol=0.015, rtol=0)


def test_a_temperature_near_zero_is_greedy() -> None:
    assert frequencies(temperature=0.01)[LOGITS.argmax()] == 1


def test_top_p_cuts_the_tail_and_keeps_the_rest_in_proportion() -> None:
    kept = torch.tensor([True, False, False, True, False, False, True, False])  # 0.39 + 0.14 + 0.24 ≥ 0.7
    expected = LOGITS.masked_fill(~kept, -torch.inf).softmax(dim=0)
    drawn = frequencies(temperature=1.0, top_p=0.7)
    assert (drawn[~kept] == 0).all()
    torch.testing.assert_close(drawn, expected, atol=0.015, rtol=0)


def test_the_models_own_top_k_applies_to_sampling_only() -> None:
    model = llama()
    model.generation_config.top_k = 2
    model.generation_config.temperature = 0.1
    drawn = frequencies(model=model, temperature=1.0)
    assert drawn.nonzero().squeeze(1).tolist() == [0, 6]
    assert 0.5 < drawn[0] < 0.75, "the temperature that was asked for, not the model's"
    assert chooser(model).choose(LOGITS.unsqueeze(0), tokens=None, uniform=None).tolist() == [0]


@pytest.mark.parametrize("number", [1e-7, 0.5, 1 - 1e-7])
def test_a_token_of_zero_probability_is_never_sampled(number: float) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(455)) * 3  # add up to less than 1 - 1e-7
    logits = torch.nn.functional.pad(logits, (20, 20), value=-torch.inf)
    drawn = chooser(temperature=1.0).choose(logits, tokens=None, uniform=torch.tensor([number]))
    assert 20 <= int(drawn) < 3020


def test_a_number_is_a_function_of_seed_sample_and_step_alone() -> None:
    table = uniforms(5, [3, 1, 2], 10)
    assert table.shape == (3, 10)
    assert table.dtype == torch.float32
    assert torch.equal(uniforms(5, [2], 10)[0], table[2]), "whatever else is in the batch"
    assert torch.equal(uniforms(5, [3, 1, 2], 5), table[:, :5]), "however many follow"
    assert len({*table.flatten().tolist()}) == 30
    for other in (uniforms(6, [3, 1, 2], 10), uniforms(5, [13, 11, 12], 10)):
        assert not torch.isclose(other, table).any()


def test_seed_and_key_are_not_interchangeable() -> None:
    assert not torch.isclose(uniforms(1, [2], 10), uniforms(2, [1], 10)).any()


def test_numbers_are_uniform_between_zero_and_one() -> None:
    numbers = uniforms(0, range(500), 20)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert uniforms(0, [], 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("asked", "looks"),
    [
        ({}, False),
        ({"repetition_penalty": 1.2}, True),
        ({"no_repeat_ngram_size": 3}, True),
        ({"min_new_tokens": 3}, True),
        ({"top_k": 3, "min_p": 0.1}, False),
    ],
)
def test_the_tokens_so_far_are_needed_only_if_a_processor_reads_them(asked: dict[str, Any], looks: bool) -> None:
    model = llama()
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    tokens = TokenIds(ends=(END,), pad=PAD)
    assert chooser(model, tokens, temperature=1.0).needs_tokens is looks


def test_a_repetition_penalty_does_not_apply_to_padding() -> None:
    model = llama()
    model.generation_config.repetition_penalty = 100.0
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).expand(2, -1)
    said = torch.tensor([[PADDING, PADDING, 1], [0, 1, 2]])
    assert chooser(model).choose(logits, tokens=said, uniform=None).tolist() == [0, 3]


def test_the_models_own_configuration_is_left_as_it_was() -> None:
    model = llama()
    model.generation_config.repetition_penalty = 1.3
    before = model.generation_config.to_dict()
    config = generation_config_for(model, settings(9, temperature=0.7, top_p=0.5), NO_ENDS)
    chooser(model, temperature=0.7)
    assert model.generation_config.to_dict() == before
    assert (config.max_new_tokens, config.temperature, config.top_p) == (9, 0.7, 0.5)
    assert config.repetition_penalty == 1.3
