"""Prompts with images in a pool: read by the model's own forward, answered as `generate` answers them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers

from brim.generation.pool import GenerationPool, PaddedPrompts, PoolPrompt
from brim.generation.precision import in_float32
from brim.generation.select import pool_obstacle
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.trial import PaddedTrial, _generated_logits
from brim.tasks.image_pools import _moved_left
from brim.tasks.multimodal import joined
from tests.generation.tiny_models import IDS, PAD, SHAPE, SINCE_VERSION_5, VOCABULARY, varied

IMAGE = VOCABULARY - 2  # the token that stands for a patch
PATCHES = 4
NEW = 14
ENDS = (7, 23, 41)
TOKENS = TokenIds(ends=ENDS, pad=PAD)
SETTINGS = GenerationSettings(max_new_tokens=NEW)
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Seeing:
    """A model, the shape of its pixels for so many images, and the input that marks image tokens, if it has one."""

    model: Any
    pixels: Callable[[int], tuple[int, ...]]
    marks: str | None = None


def text(**options: Any) -> Any:
    return transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2, **options)


def llava() -> Seeing:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=8, projection_dim=16), text_config=text(),
        image_token_index=IMAGE, image_seq_length=PATCHES,
    )  # fmt: skip
    return Seeing(varied(transformers.LlavaForConditionalGeneration(config)), lambda images: (images, 3, 8, 8))


def smolvlm() -> Seeing:
    """Pixels have a row for each prompt, filled up with empty images."""
    config = transformers.SmolVLMConfig(
        image_token_id=IMAGE, scale_factor=2, pad_token_id=PAD, vision_config={**VISION, "image_size": 16},
        text_config=text(),
    )  # fmt: skip
    return Seeing(varied(transformers.SmolVLMForConditionalGeneration(config)), lambda images: (1, images, 3, 16, 16))


def gemma3() -> Seeing:
    """Its image tokens attend to each other in both directions."""
    words = {**IDS, **SHAPE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 512}
    config = transformers.Gemma3Config(
        text_config=words, vision_config={**VISION, "image_size": 16}, mm_tokens_per_image=PATCHES,
        image_token_index=IMAGE, boi_token_index=VOCABULARY - 3, eoi_token_index=VOCABULARY - 4,
    )  # fmt: skip
    model = varied(transformers.Gemma3ForConditionalGeneration(config), spread=0.3)
    return Seeing(model, lambda images: (images, 3, 16, 16), "token_type_ids")


def paligemma() -> Seeing:
    """All tokens of a prompt attend to each other."""
    words = transformers.GemmaConfig(**IDS, **SHAPE, num_key_value_heads=2, head_dim=8)
    config = transformers.PaliGemmaConfig(
        text_config=words, vision_config=transformers.SiglipVisionConfig(**VISION, image_size=8, vision_use_head=False),
        image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    model = varied(transformers.PaliGemmaForConditionalGeneration(config))
    return Seeing(model, lambda images: (images, 3, 8, 8), "token_type_ids")


FAMILIES = [llava, smolvlm, pytest.param(gemma3, marks=SINCE_VERSION_5)]


def prompts(seeing: Seeing, count: int = 7) -> list[PoolPrompt]:
    """Longest first, with one or two images each."""
    made = []
    for key in range(count):
        draw = torch.Generator().manual_seed(key)
        images = 1 + (key % 3 == 2)
        words = torch.randint(50, 90, (3 + 2 * key,), generator=draw).tolist()
        ids = torch.tensor([[60, *[IMAGE] * PATCHES * images, *words]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["pixel_values"] = torch.randn(seeing.pixels(images), generator=draw).to(seeing.model.dtype)
        if seeing.marks:
            inputs[seeing.marks] = (ids == IMAGE).long()
        made.append(PoolPrompt(ids=ids[0].tolist(), key=key, inputs=inputs))
    return sorted(made, key=lambda one: -len(one.ids))


def pad(some: Sequence[PoolPrompt]) -> PaddedPrompts:
    batch = joined([prompt.inputs for prompt in some], pad=PAD)
    return PaddedPrompts(inputs=batch, kept=batch["attention_mask"].flatten().nonzero().squeeze(1))


def pad_right(some: Sequence[PoolPrompt]) -> PaddedPrompts:
    batch = _moved_left(joined([prompt.inputs for prompt in some], pad=PAD), spare=2)
    return PaddedPrompts(kept=batch.pop("attention_mask").flatten().nonzero().squeeze(1), inputs=batch)


def own(prompt: PoolPrompt) -> Mapping[str, Any]:
    return dict(prompt.inputs)


def answered(
    seeing: Seeing, asked: Sequence[PoolPrompt], *, rows: int = 3, padded: Any = pad, **options: Any
) -> dict[int, list[int]]:
    options = {"slots": 300, "longest": max(len(one.ids) for one in asked), "chunk_tokens": 60, **options}
    pool = GenerationPool(seeing.model, SETTINGS, TOKENS, rows=rows, **options)
    pool.pad = padded
    waiting, got = list(asked), {}
    while waiting or pool.active:
        waiting = waiting[pool.admit(waiting) :]
        got |= {answer.key: answer.tokens for answer in pool.advance()}
    return got


def alone(seeing: Seeing, prompt: PoolPrompt) -> list[int]:
    """What `generate` answers, without the end token."""
    made = seeing.model.generate(
        **prompt.inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=list(ENDS), pad_token_id=PAD
    )
    answer = made[0, len(prompt.ids) :].tolist()
    return answer[:-1] if answer[-1] in ENDS else answer


@pytest.mark.parametrize("padded", [pad, pad_right])
@pytest.mark.parametrize("make", FAMILIES)
def test_answers_about_images_are_those_of_generate_at_batch_size_one(make: Callable[[], Seeing], padded: Any) -> None:
    seeing = make()
    asked = prompts(seeing)
    got = answered(seeing, asked, padded=padded)
    assert [got[one.key] for one in asked] == [alone(seeing, one) for one in asked]
    assert len({tuple(tokens) for tokens in got.values()}) == len(asked)
    assert answered(seeing, asked, rows=7, slots=1000, chunk_tokens=1000, padded=padded) == got


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_on_images_agrees_with_generate(make: Callable[[], Seeing], dtype: torch.dtype) -> None:
    seeing = make()
    seeing.model.to(dtype)
    trial = PaddedTrial(prompts=lambda: [prompts(seeing)[-3:]], pad=pad, own=own)
    assert pool_obstacle(seeing.model, SETTINGS, TOKENS, longest=40, padded=trial) is None


@pytest.mark.parametrize("make", FAMILIES)
def test_generates_logits_in_float32_are_those_of_a_float32_model(make: Callable[[], Seeing]) -> None:
    """Some convert features to the model's own precision on the way."""
    seeing = make()
    seeing.model.to(torch.bfloat16)
    prompt = prompts(seeing)[0]
    with torch.inference_mode():
        with in_float32(seeing.model):
            wide = _generated_logits(seeing.model, prompt.inputs, [60, 61], PAD)
        seeing.model.float()
        exact = _generated_logits(seeing.model, prompt.inputs, [60, 61], PAD)
    assert torch.allclose(wide, exact, atol=0.02 * exact.std().item())


@SINCE_VERSION_5
def test_where_all_of_a_prompt_is_seen_padding_must_be_on_the_left() -> None:
    seeing = paligemma()
    found = {
        side: pool_obstacle(
            seeing.model, SETTINGS, TOKENS, longest=40,
            padded=PaddedTrial(prompts=lambda: [prompts(seeing)[-3:]], pad=side, own=own),
        )
        for side in (pad, pad_right)
    }  # fmt: skip
    assert found[pad] is None
    assert found[pad_right] is not None
    asked = prompts(seeing)
    assert [answered(seeing, asked)[one.key] for one in asked] == [alone(seeing, one) for one in asked]


def images_swapped(some: Sequence[PoolPrompt]) -> PaddedPrompts:
    padded = pad(some)
    return dataclasses.replace(padded, inputs={**padded.inputs, "pixel_values": padded.inputs["pixel_values"].flip(0)})


def raises(some: Sequence[PoolPrompt]) -> PaddedPrompts:
    raise KeyError("attention_mask")


@pytest.mark.parametrize(("wrong", "why"), [(images_swapped, "logits differ"), (raises, "raised KeyError")])
def test_a_pool_that_reads_images_otherwise_is_found_by_the_trial(wrong: Any, why: str) -> None:
    seeing = llava()
    trial = PaddedTrial(prompts=lambda: [prompts(seeing)[-3:]], pad=wrong, own=own)
    obstacle = pool_obstacle(seeing.model, SETTINGS, TOKENS, longest=40, padded=trial)
    assert obstacle is not None
    assert why in obstacle


def test_a_trial_that_runs_out_of_memory_or_has_no_sample_says_so() -> None:
    def short(some: Sequence[PoolPrompt]) -> PaddedPrompts:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    seeing = llava()
    found = [
        pool_obstacle(seeing.model, SETTINGS, TOKENS, longest=40, padded=PaddedTrial(prompts=asked, pad=short, own=own))
        for asked in (lambda: [prompts(seeing)[-3:]], list)
    ]
    assert found == ["a trial of it ran out of memory", "no sample could be prepared for a trial"]


def test_a_prompt_longer_than_any_was_thought_to_be_is_answered() -> None:
    seeing = llava()
    asked = prompts(seeing)
    assert answered(seeing, asked, longest=2) == answered(seeing, asked)


def test_a_chunk_is_bounded_by_padded_tokens_and_by_what_images_weigh() -> None:
    seeing = llava()
    read: list[list[int]] = []

    def recorded(some: Sequence[PoolPrompt]) -> PaddedPrompts:
        read.append([len(prompt.ids) for prompt in some])
        return pad(some)

    def chunks(asked: Sequence[PoolPrompt], chunk_tokens: int) -> list[list[int]]:
        read.clear()
        pool = GenerationPool(seeing.model, SETTINGS, TOKENS, rows=7, slots=1000, longest=30, chunk_tokens=chunk_tokens)
        pool.pad = recorded
        assert pool.admit(asked) == len(asked)
        return list(read)

    asked = prompts(seeing)
    assert all(len(some) * max(some) <= 50 for some in chunks(asked, 50))
    assert [len(some) for some in chunks(asked, 8)] == [1] * 7, "a prompt is never cut"
    heavy = [dataclasses.replace(prompt, weight=25) for prompt in asked]
    assert max(len(some) for some in chunks(heavy, 75)) == 3
    assert max(len(some) for some in chunks(asked, 75)) > 3
    kinds = [dataclasses.replace(prompt, kind=prompt.key % 2) for prompt in asked]
    assert sorted(len(some) for some in chunks(kinds, 1000)) == [3, 4]


def test_padding_of_prompts_counts_as_computed() -> None:
    seeing = llava()
    asked = prompts(seeing)
    pool = GenerationPool(seeing.model, SETTINGS, TOKENS, rows=7, slots=1000, longest=30)
    pool.pad = pad
    pool.admit(asked)
    assert pool.useful_tokens == sum(len(one.ids) for one in asked)
    assert pool.computed_tokens == 7 * len(asked[0].ids)
