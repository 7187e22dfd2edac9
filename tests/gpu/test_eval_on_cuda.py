"""Generation and evaluation where memory and graphs are real."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.generation.graphs import CaptureFailedError, capture, shared_pool
from brim.generation.loop import DecodeLoop
from brim.generation.select import make_decoder
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.trial import padded_batch
from tests import saved_models

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def language_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, eos_token_id=7, pad_token_id=0))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.to("cuda", dtype).eval()


def random_prompts(count: int, longest: int = 60) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(8, 512, (length,), generator=generator).cuda() for length in lengths]


def one_by_one(model: Any, prompts: list[torch.Tensor], new_tokens: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        mask = torch.ones(1, len(prompt), dtype=torch.long, device="cuda")
        with torch.inference_mode():
            out = model.generate(prompt[None], attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        tokens = out[0, len(prompt) :].tolist()
        answers.append(tokens[: tokens.index(7)] if 7 in tokens else tokens)
    return answers


def answers_of(model: Any, prompts: list[torch.Tensor], settings: GenerationSettings) -> tuple[Any, list[list[int]]]:
    decoder = make_decoder(model, settings, TokenIds.of(model.generation_config))
    batch = padded_batch(prompts, decoder.padding, pad=0)
    return decoder, decoder.generate(batch).token_lists()


@pytest.fixture(autouse=True)
def exact_float32() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("count", "new_tokens"), [(8, 20), (3, 150)])
def test_captured_steps_give_the_tokens_of_generate_at_batch_size_one(count: int, new_tokens: int) -> None:
    model = language_model()
    prompts = random_prompts(count)
    decoder, answers = answers_of(model, prompts, GenerationSettings(max_new_tokens=new_tokens))
    assert isinstance(decoder, DecodeLoop)
    assert decoder.notes == []  # no capture failed
    assert answers == one_by_one(model, prompts, new_tokens)


def test_captured_and_eager_steps_agree_also_when_drawing() -> None:
    model = language_model()
    prompts = random_prompts(9)
    settings = GenerationSettings(max_new_tokens=40, temperature=0.9, top_p=0.8, seed=5)
    _, captured = answers_of(model, prompts, settings)
    _, eager = answers_of(model, prompts, dataclasses.replace(settings, graphs=False))
    assert captured == eager


def test_a_kept_graph_is_replayed_on_the_next_batch() -> None:
    model = language_model()
    loop = DecodeLoop(model, GenerationSettings(max_new_tokens=16), TokenIds.of(model.generation_config))
    first, second = random_prompts(16)[:8], random_prompts(16)[8:]
    loop.generate(padded_batch(first, "right", pad=0)).token_lists()
    kept = loop._kept
    longest = max(len(prompt) for prompt in first)
    second[0] = torch.randint(8, 512, (longest,), device="cuda")
    answers = loop.generate(padded_batch(second, "right", pad=0)).token_lists()
    assert loop._kept is kept
    assert kept is not None
    assert kept.graph is not None
    assert answers == one_by_one(model, second, 16)


def test_the_memory_of_graphs_is_given_back_when_the_loop_is_gone() -> None:
    def in_graph_pools() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))

    before = in_graph_pools()
    loop, _ = answers_of(language_model(), random_prompts(4), GenerationSettings(max_new_tokens=16))
    assert in_graph_pools() > before
    del loop
    assert in_graph_pools() == before


def test_after_a_capture_that_became_void_random_numbers_and_graphs_work() -> None:
    one = torch.zeros(1, device="cuda").add_(1)  # a step must have run before it is captured
    pool = shared_pool(one.device)
    earlier = capture(lambda: one.add_(1), pool)
    with pytest.raises(CaptureFailedError):
        capture(one.item, pool)  # which waits for the device
    torch.rand(4, device="cuda")
    earlier.replay()
    capture(lambda: one.add_(1), pool).replay()
    assert one.item() == 3


def test_half_precision_differs_from_single_samples_only_at_near_ties() -> None:
    model = language_model(torch.bfloat16)
    prompts = random_prompts(12)
    _, batched = answers_of(model, prompts, GenerationSettings(max_new_tokens=12))
    for prompt, answer in zip(prompts, batched, strict=True):
        _, alone = answers_of(model, [prompt], GenerationSettings(max_new_tokens=12))
        if alone[0] == answer:
            continue
        shared = next(n for n, (a, b) in enumerate(zip(alone[0], answer, strict=False)) if a != b)
        text = torch.cat([prompt, torch.tensor(answer[:shared], dtype=torch.long, device="cuda")])
        with torch.inference_mode():
            logits = model(text[None]).logits[0, -1].float()
        best, taken = logits.max(), logits[answer[shared]]
        assert best - taken < 0.05 * logits.std()  # a near-tie


def test_an_evaluation_survives_a_limit_that_its_first_sizes_break(tmp_path: Path) -> None:
    from brim.evaluation.run import evaluate
    from brim.settings.eval_settings import EvalRequest

    folder = tmp_path / "model"
    model = language_model()
    model.save_pretrained(folder)
    words = {f"w{n}": n for n in range(512)}
    tokenizer = pytest.importorskip("tokenizers")
    plain = tokenizer.Tokenizer(tokenizer.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizer.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", eos_token="w7", unk_token="w0")
    fast.save_pretrained(folder)
    rows = [{"prompt": " ".join(f"w{8 + (n * k) % 500}" for k in range(1, 300)), "response": "w9"} for n in range(200)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = EvalRequest(model=str(folder), data=str(data), max_new_tokens=8, device="cuda", use_cache=False)
    free = evaluate(request, output=tmp_path / "free")
    limited = dataclasses.replace(request, batch_size=200, memory_limit="160MiB")
    tight = evaluate(limited, output=tmp_path / "tight")
    assert tight.summary["oom_events"] > 0
    assert tight.summary["num_failed"] == 0
    assert tight.summary["peak_reserved_bytes"] <= 160 * 2**20
    same = [a["prediction"] == b["prediction"] for a, b in zip(free.samples, tight.samples, strict=True)]
    assert sum(same) >= 0.99 * len(same)  # float32, but other batch shapes take other kernels
    assert free.summary["gpu_utilisation_mean"] is not None
    assert (tmp_path / "free" / "monitor.csv").exists()


@pytest.mark.parametrize("command", ["eval", "find"])
def test_a_card_filled_by_another_process_is_exit_3(tmp_path: Path, command: str) -> None:
    """The weights need 1 GiB, and a neighbour leaves half of that."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", _FILL_CARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline().strip() == "full"
        shape = {**SHAPE, "vocab_size": 128 * 1024, "hidden_size": 1024, "num_attention_heads": 8}
        config = transformers.LlamaConfig(**shape, eos_token_id=7, pad_token_id=0, dtype="float32")
        config.save_pretrained(tmp_path / "lm")
        saved_models.tokenizer().save_pretrained(tmp_path / "lm")
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps({"question": "what is 1 plus 1 ?", "answer": "2"}) + "\n")
        asked = ["-m", str(tmp_path / "lm"), "-d", str(data), "-o", str(tmp_path / "run")]
        if command == "find":
            asked = [str(tmp_path / "lm")]
        done = subprocess.run(
            [sys.executable, "-m", "brim", command, *asked, "--device", "cuda", "--dtype", "float32", "--no-cache"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        neighbour.communicate(input="\n", timeout=60)
    message = " ".join(done.stderr.split())
    assert done.returncode == 3, message
    assert "Traceback" not in message
    assert re.search(r"not enough memory on cuda\S*: [\d.]+ \w+ needed, [\d.]+ \w+ of [\d.]+ GiB free", message), (
        message
    )


# Leaves about 900 MiB: room for the CUDA context of another process, not for a GiB of weights beside it.
_FILL_CARD = """
import sys, torch
kept = []
free, _ = torch.cuda.mem_get_info()
for part in (2**30, 2**26):
    while torch.cuda.mem_get_info()[0] > 900 * 2**20 + part:
        kept.append(torch.empty(part, dtype=torch.uint8, device="cuda"))
print("full", flush=True)
sys.stdin.readline()
"""
