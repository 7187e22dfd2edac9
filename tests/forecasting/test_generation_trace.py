"""Generation is traced by the decode loop that an evaluation runs, with its cache and the pool of its graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.forecasting.events import Trace
from brim.forecasting.later_steps import repeats_its_first_step, with_second_step
from brim.forecasting.trace import trace_workload
from brim.generation.state import round_up
from brim.workloads.inference import GenerateWorkload

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ROWS, PROMPT = 4, 40


def prompts(count: int) -> Mapping[str, torch.Tensor]:
    ids = torch.randint(2, 500, (count, PROMPT))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 2, **options})
    return transformers.LlamaForCausalLM(config).eval()


def generation(model: Any, new_tokens: int = 32, make_batch: Any = prompts) -> GenerateWorkload:
    return GenerateWorkload(model=model, make_batch=make_batch, max_new_tokens=new_tokens, device="cpu")


def cache_bytes(tokens: int, *, heads: int = 2, width: int = 16) -> int:
    return 2 * SHAPE["num_hidden_layers"] * ROWS * heads * round_up(tokens) * width * 4


def most_cache(trace: Trace) -> int:
    live = most = 0
    for event in trace.events:
        if event.category == "cache":
            live += event.bytes if event.kind == "alloc" else -event.bytes
            most = max(most, live)
    return most


def test_the_cache_holds_prompt_and_answer_rounded_up() -> None:
    trace = trace_workload(generation(llama()), ROWS)
    assert trace.approximate is None
    assert most_cache(trace) == cache_bytes(PROMPT + 32)
    assert trace.live_at_peak()["cache"] == cache_bytes(PROMPT + 32)


@pytest.mark.parametrize("new_tokens", [1, 4, 32])
def test_the_second_generation_of_a_further_size_is_concluded(new_tokens: int) -> None:
    """Keys and values, layer by layer, and the captured step are made in the first one only."""
    workload = generation(llama(), new_tokens)
    whole = trace_workload(workload, 2)
    assert repeats_its_first_step(whole)
    concluded = with_second_step(trace_workload(workload, ROWS, steps=1), whole)
    assert concluded is not None
    assert dataclasses.replace(concluded, seconds=0) == dataclasses.replace(trace_workload(workload, ROWS), seconds=0)


def test_the_logits_of_a_prompt_are_never_made_for_all_of_its_tokens() -> None:
    trace = trace_workload(generation(llama(vocab_size=50_000)), ROWS)
    assert 4 * ROWS * 50_000 in {event.bytes for event in trace.events}
    assert max(e.bytes for e in trace.events if e.category not in ("weights",)) < 4 * ROWS * PROMPT * 50_000


def test_a_captured_step_takes_its_memory_from_the_pool_of_graphs() -> None:
    trace = trace_workload(generation(llama()), ROWS)
    captured = [event for event in trace.events if event.pool == 1]
    assert any(event.op.startswith("aten.mm") for event in captured)
    assert all(event.category != "cache" for event in captured)
    short = trace_workload(generation(llama(), new_tokens=4), ROWS)  # not worth capturing
    assert all(event.pool == 0 for event in short.events)


def test_a_long_answer_moves_to_a_larger_cache_layer_by_layer() -> None:
    trace = trace_workload(generation(llama(), new_tokens=300), ROWS)
    first, last = cache_bytes(PROMPT + 128), cache_bytes(PROMPT + 128 + 172)
    both_of_one_layer = first // SHAPE["num_hidden_layers"]
    assert last < most_cache(trace) <= last + first
    assert most_cache(trace) < last + first - both_of_one_layer


@pytest.mark.parametrize("new_tokens", [1, 2, 7])
def test_few_tokens_are_traced_too(new_tokens: int) -> None:
    assert trace_workload(generation(llama(), new_tokens), ROWS).peak_allocated() > 0


def test_nothing_is_left_on_the_workload() -> None:
    workload = generation(llama())
    trace_workload(workload, ROWS)
    assert workload.decoder is None
    assert workload.notes == ()
    assert len(workload.step(prompts(2)).token_lists()) == 2  # it generates for real as before


def test_weights_that_were_never_made_give_the_same_trace() -> None:
    with torch.device("meta"):
        unmade = generation(llama())
    assert trace_workload(unmade, ROWS).peak_allocated() == trace_workload(generation(llama()), ROWS).peak_allocated()


def test_an_encoder_reads_the_prompt_of_a_seq2seq_model() -> None:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=512, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    trace = trace_workload(generation(model), ROWS)
    assert trace.approximate is None
    assert trace.live_at_peak()["cache"] > 0


def test_a_model_run_by_generate_is_traced_by_forwards_with_a_note() -> None:
    config = transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=16)
    trace = trace_workload(generation(transformers.MistralForCausalLM(config).eval()), ROWS)
    assert trace.approximate is not None
    assert "window of 16 tokens" in trace.approximate
    assert trace.peak_allocated() > trace.resident()["weights"]


def test_images_in_a_prompt_are_traced() -> None:
    text = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=500)
    model = transformers.LlavaForConditionalGeneration(config).eval()

    def pictures(count: int) -> Mapping[str, torch.Tensor]:
        batch = dict(prompts(count))
        batch["input_ids"][:, 3:7] = 500  # four patches
        return {**batch, "pixel_values": torch.randn(count, 3, 28, 28)}

    trace = trace_workload(generation(model, make_batch=pictures), ROWS)
    assert trace.approximate is None
    assert trace.live_at_peak()["cache"] == cache_bytes(PROMPT + 32)


def test_a_wrong_batch_is_the_users_to_hear_about() -> None:
    with pytest.raises(RequestError, match="returned a batch of 3"):
        trace_workload(generation(llama(), make_batch=lambda n: prompts(n - 1)), ROWS)
