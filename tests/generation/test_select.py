"""Which decoder a model gets, and transformers' own generate as a decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.generation.loop import DecodeLoop, Padding
from brim.generation.precision import in_float32
from brim.generation.select import Decoder, GenerateFallback, make_decoder
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import TokenIds
from brim.generation.state import DecodeState
from brim.generation.trial import disagreement, logit_difference, padded_batch
from tests.generation import tiny_models
from tests.generation.tiny_models import (
    FAMILIES,
    NO_ENDS,
    PAD,
    SINCE_VERSION_5,
    answers_of,
    bart,
    batch_of,
    gpt2,
    gpt_neo,
    llama,
    make_prompts,
    mamba,
    mistral,
    own_answers,
    settings,
)

TOKENS = 12


def decoder_for(model: Any, **options: Any) -> Decoder:
    return make_decoder(model, settings(TOKENS), NO_ENDS, **options)


def ignoring_positions(model: Any) -> Any:
    """The model with positions that it counts itself, from its cache."""
    return ignoring(model, "position_ids")


def ignoring(model: Any, *names: str) -> Any:
    inner = model.base_model
    usual = inner.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        return usual(*arguments, **{name: value for name, value in options.items() if name not in names})

    inner.forward = forward
    return model


def failing(model: Any, error: Exception) -> Any:
    def forward(*arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        raise error

    model.base_model.forward = forward
    return model


def test_prompts_are_padded_on_the_right_where_the_model_allows_it() -> None:
    decoder = decoder_for(llama())
    assert isinstance(decoder, DecodeLoop)
    assert (decoder.padding, decoder.notes) == ("right", [])


def test_prompts_with_images_are_padded_on_the_left() -> None:
    decoder = decoder_for(llama(), images=True)
    assert isinstance(decoder, DecodeLoop)
    assert decoder.padding == "left"


def test_prompts_are_left_padded_for_models_that_compute_positions() -> None:
    model, prompts = ignoring_positions(llama()), make_prompts()
    decoder = decoder_for(model)
    assert isinstance(decoder, DecodeLoop)
    assert decoder.padding == "left", "rotary positions are relative: only a gap within a row shows"
    assert answers_of(decoder, prompts) == own_answers(model, prompts, TOKENS)


def test_a_model_that_neither_padding_side_fits_gets_the_fallback() -> None:
    decoder = decoder_for(ignoring_positions(gpt2()))
    assert isinstance(decoder, GenerateFallback)
    assert "its logits differ from GPT2LMHeadModel's own by" in decoder.notes[0]


def test_a_window_needs_the_fallback_unless_everything_fits_into_it() -> None:
    model, prompts = mistral(sliding_window=30), make_prompts((3, 17, 40))
    for longest in (None, 18, 40):
        decoder = decoder_for(model, longest=longest)
        assert isinstance(decoder, GenerateFallback)
        assert "attends to a window of 30 tokens" in decoder.notes[0]
        assert answers_of(decoder, prompts) == own_answers(model, prompts, TOKENS)
    decoder = decoder_for(model, longest=17)
    assert isinstance(decoder, DecodeLoop)
    assert answers_of(decoder, prompts[:2]) == own_answers(model, prompts[:2], TOKENS)


def test_mistral_without_a_window_gets_the_loop() -> None:
    model, prompts = mistral(sliding_window=None), make_prompts()
    decoder = decoder_for(model)
    assert isinstance(decoder, DecodeLoop)
    assert answers_of(decoder, prompts) == own_answers(model, prompts, TOKENS)


def test_a_sliding_window_by_cache_length_needs_the_fallback() -> None:
    model, prompts = gpt_neo(window_size=100), make_prompts((3, 70))
    decoder = decoder_for(model, longest=70)
    assert isinstance(decoder, GenerateFallback)
    assert "a window of 100 tokens" in decoder.notes[0]
    assert answers_of(decoder, prompts) == own_answers(model, prompts, TOKENS)


@SINCE_VERSION_5
def test_a_state_space_model_gets_the_fallback_and_its_own_answers() -> None:
    model, prompts = mamba(), make_prompts()
    decoder = decoder_for(model, longest=40)
    assert isinstance(decoder, GenerateFallback)
    assert "transformers' own generate, which is slower" in decoder.notes[0]
    expected = own_answers(model, prompts, TOKENS)
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    assert answers_of(decoder, prompts) == expected
    assert len(decoder.notes) == 1, "its prompts may share a batch"


def test_prompts_of_a_model_whose_answers_padding_changes_are_answered_one_by_one() -> None:
    """RWKV and RecurrentGemma take padding for tokens."""
    model, prompts = ignoring(llama(), "attention_mask", "position_ids"), make_prompts()
    expected = own_answers(model, prompts, TOKENS)
    batched = GenerateFallback(model, settings(TOKENS), NO_ENDS, why="a test")
    assert answers_of(batched, prompts) != expected
    decoder = decoder_for(model)
    assert isinstance(decoder, GenerateFallback)
    assert "prompts are answered one by one" in decoder.notes[1]
    assert answers_of(decoder, prompts) == expected


def test_answers_one_by_one_keep_their_own_noise_and_ends() -> None:
    """Sampled answers are those of batches in which padding changes nothing, whichever ends first."""
    model, prompts, keys = llama(), make_prompts(), (9, 4, 7, 0, 2, 5)
    options = settings(TOKENS, temperature=0.8)
    ends = TokenIds(ends=tuple(range(40, 50)), pad=PAD)
    batched = GenerateFallback(model, options, ends, why="a test")
    alone = GenerateFallback(model, options, ends, why="a test", one_by_one="a test")
    answers = answers_of(alone, prompts, keys)
    assert answers == answers_of(batched, prompts, keys)
    assert len({len(answer) for answer in answers}) > 2


def test_positions_in_several_dimensions_need_the_fallback() -> None:
    model = llama()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    decoder = decoder_for(model)
    assert isinstance(decoder, GenerateFallback)
    assert "LlamaForCausalLM has positions in several dimensions" in decoder.notes[0]


@pytest.mark.parametrize(("name", "value"), [("encoder_no_repeat_ngram_size", 2), ("encoder_repetition_penalty", 1.5)])
def test_a_configuration_that_reads_the_encoder_input_needs_the_fallback(name: str, value: float) -> None:
    model, prompts = bart(), make_prompts((7,))
    free = own_answers(model, prompts, TOKENS)
    setattr(model.generation_config, name, value)
    decoder = decoder_for(model)
    assert isinstance(decoder, GenerateFallback)
    assert decoder.padding == "right"
    assert f"asks for {name}" in decoder.notes[0]
    expected = own_answers(model, prompts, TOKENS)
    assert (expected != free) is (name == "encoder_repetition_penalty")  # few n-grams are said twice by chance
    assert answers_of(decoder, prompts) == expected


def test_a_model_whose_trial_fails_gets_the_fallback_and_the_reason() -> None:
    decoder = decoder_for(failing(llama(), ValueError("no such cache\nand a long story")))
    assert isinstance(decoder, GenerateFallback)
    assert decoder.notes[0].endswith("slower: a trial of it raised ValueError: no such cache")


def test_out_of_memory_in_the_trial_is_raised() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    model = failing(llama(), error)
    with pytest.raises(torch.OutOfMemoryError):
        decoder_for(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_suitable_loop_matches_its_model_and_keeps_no_trial_state(family: str) -> None:
    loop = decoder_for(FAMILIES[family]())
    assert isinstance(loop, DecodeLoop)
    assert disagreement(loop) == ""
    assert loop._kept is None
    if isinstance(loop, Seq2SeqLoop):
        assert loop._encoded == {}
        assert loop._cache is None


def off_by_one_position(state: DecodeState, *, slot: int, position: torch.Tensor, valid: torch.Tensor) -> None:
    BEGIN(state, slot=slot, position=position + 1, valid=valid)


def blind_to_padding(state: DecodeState, *, slot: int, position: torch.Tensor, valid: torch.Tensor) -> None:
    BEGIN(state, slot=slot, position=position, valid=torch.ones_like(valid))


def off_by_one_slot(state: DecodeState, *, slot: int, position: torch.Tensor, valid: torch.Tensor) -> None:
    BEGIN(state, slot=slot - 1, position=position, valid=valid)


BEGIN = DecodeState.begin


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "opt"])
@pytest.mark.parametrize("wrong", [off_by_one_position, blind_to_padding, off_by_one_slot])
def test_a_loop_that_is_slightly_wrong_is_detected(
    wrong: Any, family: str, padding: Padding, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = DecodeLoop(FAMILIES[family](), settings(TOKENS), NO_ENDS, padding=padding)
    assert disagreement(loop) == ""
    monkeypatch.setattr(DecodeState, "begin", wrong)
    assert "its logits differ from" in disagreement(loop)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_loop_that_is_slightly_wrong_is_detected(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Seq2SeqLoop(FAMILIES[family](), settings(TOKENS), NO_ENDS)
    monkeypatch.setattr(DecodeState, "begin", off_by_one_slot)
    assert "its logits differ from" in disagreement(loop)


def test_nan_logits_are_a_disagreement() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    assert "its logits differ" in disagreement(DecodeLoop(model, settings(), NO_ENDS))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_padded_batch_contains_each_whole_prompt(padding: Padding) -> None:
    prompts = make_prompts((2, 5, 3))
    batch = padded_batch(prompts, padding, pad=PAD)
    assert batch.rows == 3
    assert (batch.lengths is None) is (padding == "left")
    for row, prompt in enumerate(prompts):
        gap = 5 - len(prompt)
        ids = batch.inputs["input_ids"][row].tolist()
        assert ids == (prompt.tolist() + [PAD] * gap if padding == "right" else [PAD] * gap + prompt.tolist())
        if padding == "left":
            assert batch.inputs["attention_mask"][row].tolist() == [0] * gap + [1] * len(prompt)
        else:
            assert batch.lengths is not None
            assert batch.lengths[row] == len(prompt)


@pytest.mark.parametrize("make", [llama, pytest.param(bart, marks=SINCE_VERSION_5)])
def test_ended_and_truncated_answers_are_distinguished(make: Any) -> None:
    model, prompts = make(), make_prompts()
    unended = own_answers(model, prompts, 12)
    tokens = TokenIds(ends=(unended[0][5], unended[1][7]), pad=PAD)
    expected = own_answers(model, prompts, 12, tokens.ends)
    assert len({len(answer) for answer in expected}) > 1
    fallback = GenerateFallback(model, settings(12), tokens, why="a test")
    answers = fallback.generate(batch_of(fallback, prompts))
    assert answers.token_lists() == expected
    assert answers.ended() == [len(answer) < 12 for answer in expected]


def test_the_models_own_configuration_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.generation_config.repetition_penalty = 1.5
    usual, before = model.generation_config, model.generation_config.to_dict()
    fallback = GenerateFallback(model, settings(4, temperature=1.0), NO_ENDS, why="a test")
    answers_of(fallback, make_prompts())

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ValueError, match="no"):
        answers_of(fallback, make_prompts())
    assert model.generation_config is usual
    assert usual.to_dict() == before


def test_no_warning_about_generation_flags(capfd: pytest.CaptureFixture[str]) -> None:
    model = llama()
    for name, value in {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "do_sample": True, "max_length": 3}.items():
        setattr(model.generation_config, name, value)
    for options in ({}, {"temperature": 1.3}):
        answers_of(GenerateFallback(model, settings(4, **options), NO_ENDS, why="a test"), make_prompts())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("make", [tiny_models.qwen2, tiny_models.gpt2])
def test_the_models_own_logits_in_float32_leave_its_weights_as_they_were(make: Callable[[], Any]) -> None:
    half = make().to(torch.bfloat16)
    before = {name: one.clone() for name, one in half.state_dict().items()}
    ids = torch.tensor([[5, 9, 31, 60]])
    with torch.inference_mode():
        with in_float32(half):
            wide = half(ids, use_cache=False).logits
        exact = copy.deepcopy(half).float()(ids, use_cache=False).logits
    assert wide.dtype == torch.float32
    assert torch.allclose(wide, exact, atol=1e-4)
    assert all(torch.equal(one, before[name]) for name, one in half.state_dict().items())


def test_a_model_that_rounds_roughly_is_judged_by_float32() -> None:
    model = tiny_models.qwen2().to(torch.bfloat16)
    exact = torch.tensor([0.0, 1.0, 2.0])
    own = iter([exact + 0.5, exact])  # in half precision, then in float32
    near = lambda: iter([(exact - 0.6, lambda: next(own))])  # noqa: E731
    assert logit_difference(model, near) == ""
    own = iter([exact + 0.5, exact])
    far = lambda: iter([(exact - 0.8, lambda: next(own))])  # noqa: E731
    assert "standard deviations" in logit_difference(model, far)
