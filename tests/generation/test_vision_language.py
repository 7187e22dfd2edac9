from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from brim.generation.loop import DecodeLoop, PromptBatch
from brim.generation.select import GenerateFallback, make_decoder
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.trial import padded_batch
from tests.generation.tiny_models import IDS, NO_ENDS, PAD, SHAPE, VOCABULARY, own_answers, settings, varied

IMAGE = VOCABULARY - 2  # the token that stands for a patch
PATCHES = 4
TOKENS = 12


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=PATCHES, eos_token_id=2
    )
    return varied(transformers.LlavaForConditionalGeneration(config))


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", ["chosen", "fallback"])
def test_a_prompt_with_an_image_answers_as_it_does_alone(kind: str) -> None:
    model = llava()
    image = [IMAGE] * PATCHES
    prompts = [torch.tensor([1, *image, 7, 8, 9]), torch.tensor([1, 5, 6, *image, *range(20, 31)])]
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    options = GenerationSettings(max_new_tokens=TOKENS)
    unended = own_answers(model, prompts, TOKENS, pixel_values=pixels)
    swapped = own_answers(model, prompts, TOKENS, pixel_values=pixels.flip(0))
    assert all(one != other for one, other in zip(unended, swapped, strict=True)), "the image must matter"
    tokens = TokenIds(ends=(unended[0][7],), pad=PAD)
    expected = own_answers(model, prompts, TOKENS, tokens.ends, pixel_values=pixels)
    decoder: Any = make_decoder(model, options, tokens, images=True)
    assert isinstance(decoder, DecodeLoop)
    if kind == "fallback":
        decoder = GenerateFallback(model, options, tokens, why="a test")
    assert decoder.padding == "left"
    text = padded_batch(prompts, "left", pad=PAD)
    batch = PromptBatch(inputs={**text.inputs, "pixel_values": pixels}, keys=text.keys)
    assert decoder.generate(batch).token_lists() == expected


def test_grouped_attention_is_used_in_the_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that the attention reads is the language model's: the loop must change that one."""
    model = llava()
    loop = DecodeLoop(model, settings(4), NO_ENDS, padding="left")
    assert loop._text_config is model.get_decoder().config
