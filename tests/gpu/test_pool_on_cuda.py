"""Pools and shared contexts where flash attention, graphs and half precision are real."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.generation.likelihoods import OptionRows, SharedContexts, shared_contexts_obstacle
from brim.generation.pool import GenerationPool, PoolPrompt
from brim.generation.select import pool_obstacle
from brim.generation.settings import GenerationSettings, TokenIds
from tests.gpu.test_eval_on_cuda import language_model, random_prompts

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")

NEW = 40
ENDS = tuple(range(7, 512, 25))  # enough of them that answers end at different lengths
TOKENS = TokenIds(ends=ENDS, pad=0)


def answered(
    model: Any, prompts: Sequence[Sequence[int]], *, rows: int, order: Sequence[int] | None = None,
    prefix: Sequence[int] = (), chunk_tokens: int = 1024, **options: Any,
) -> list[list[int]]:  # fmt: skip
    """Answers in a pool of so many rows; `order` is that in which prompts are admitted."""
    settings = GenerationSettings(max_new_tokens=NEW, **options)
    pool = GenerationPool(
        model, settings, TOKENS, rows=rows, slots=64 * (120 + NEW), longest=max(map(len, prompts)), prefix=prefix,
        chunk_tokens=chunk_tokens,
    )  # fmt: skip
    keys = range(len(prompts)) if order is None else order
    waiting = [PoolPrompt(ids=prompts[key], key=key) for key in keys]
    found: dict[int, list[int]] = {}
    while waiting or pool.active:
        waiting = waiting[pool.admit(waiting) :]
        found |= {one.key: one.tokens for one in pool.advance()}
    assert pool.notes == []  # no capture failed
    pool.release()
    return [found[key] for key in range(len(prompts))]


def alone(model: Any, prompt: list[int]) -> list[int]:
    """What `generate` answers at batch size 1, without the end token."""
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=list(ENDS)
        )
    answer = made[0, len(prompt) :].tolist()
    return answer[:-1] if answer[-1] in ENDS else answer


def differs_at_near_ties(model: Any, prompts: Sequence[list[int]], ours: Any, theirs: Any) -> int:
    """How many answers differ; each must do so where the model's own logits are nearly equal."""
    count = 0
    for prompt, one, other in zip(prompts, ours, theirs, strict=True):
        if one == other:
            continue
        count += 1
        place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *one[:place]]], device="cuda")).logits[0, -1].float()
        end = logits[list(ENDS)].max()  # an answer that is over has taken one of these
        taken = [logits[answer[place]] if place < len(answer) else end for answer in (one, other)]
        assert (taken[0] - taken[1]).abs() < 0.1 * logits.std()
    return count


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("rows", [5, 64])
def test_answers_differ_from_generate_only_at_near_ties(rows: int, shared: int) -> None:
    model = language_model(torch.bfloat16)
    prefix = [100 + n for n in range(shared)]
    prompts = [[*prefix, *prompt.tolist()] for prompt in random_prompts(48)]
    assert pool_obstacle(model, GenerationSettings(max_new_tokens=NEW), TOKENS, longest=100, prefix=shared > 0) is None
    ours = answered(model, prompts, rows=rows, prefix=prefix)
    theirs = [alone(model, prompt) for prompt in prompts]
    assert differs_at_near_ties(model, prompts, ours, theirs) <= len(prompts) // 2
    assert len({len(answer) for answer in ours}) > 2, "answers must end at different lengths"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_invariant_answers_depend_on_the_prompt_alone(temperature: float) -> None:
    model = language_model(torch.bfloat16)
    prompts = [prompt.tolist() for prompt in random_prompts(48)]
    options = {"batch_invariant": True, "temperature": temperature}
    first = answered(model, prompts, rows=64, **options)
    order = random.Random(3).sample(range(48), 48)
    assert answered(model, prompts, rows=64, order=order, **options) == first
    alone = [answered(model, [prompt], rows=64, **options)[0] for prompt in prompts[:4]]
    if not temperature:  # the noise of sampling depends on a sample's number
        assert alone == first[:4]


def test_likelihoods_of_shared_contexts_are_the_models_own() -> None:
    model = language_model(torch.bfloat16)
    assert shared_contexts_obstacle(model, longest=200) is None
    draw = random.Random(0)
    prefix = [draw.randrange(8, 512) for _ in range(130)]

    def some(count: int) -> list[int]:
        return [draw.randrange(8, 512) for _ in range(count)]

    questions = []
    for _ in range(12):
        context, options = [*prefix, *some(draw.randint(1, 30))], [some(draw.randint(1, 6)) for _ in range(4)]
        rows = [[*context, *option] for option in options]
        questions.append(OptionRows(rows=rows, scored=[len(option) for option in options]))
    scores = SharedContexts(model, prefix=prefix).scores(questions).tolist()
    exact = language_model(torch.float32)
    exact.load_state_dict(model.state_dict())
    for number, (found, row, scored) in enumerate(
        zip(scores, [r for q in questions for r in q.rows], [s for q in questions for s in q.scored], strict=True)
    ):
        values = []
        for one in (model, exact):
            with torch.inference_mode():
                logits = one(torch.tensor([row], device="cuda")).logits[0, -scored - 1 : -1].float()
            values.append(float(logits.log_softmax(-1).gather(1, torch.tensor(row[-scored:]).cuda()[:, None]).sum()))
        own, wanted = values
        assert abs(found - wanted) <= 3 * abs(own - wanted) + 0.1 * scored, number


def test_options_without_a_token_stand_beside_options_of_one() -> None:
    """Flash attention takes every sequence to have one where none has several."""
    model = language_model(torch.bfloat16)
    questions = [
        OptionRows(rows=[[60, 61, 62], [60, 61, 63]], scored=[1, 1]),
        OptionRows(rows=[[70, 71, 72], [70, 71, 73, 74]], scored=[1, 2]),
    ]
    scorer = SharedContexts(model)
    together = scorer.scores(questions)
    alone = torch.cat([scorer.scores([question]) for question in questions])
    torch.testing.assert_close(together, alone, rtol=0.05, atol=0.1)


def test_a_killed_pool_continues_and_every_sample_is_there_once(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder, data, out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "run"
    language_model(torch.bfloat16).save_pretrained(folder)
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", eos_token="w7", unk_token="w0")
    fast.save_pretrained(folder)
    draw = random.Random(0)
    rows = [
        {
            "id": str(n),
            "prompt": " ".join(f"w{draw.randrange(8, 512)}" for _ in range(draw.randint(5, 200))),
            "response": "w9",
        }
        for n in range(600)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "brim", "eval", "-m", str(folder), "-d", str(data), "--dtype", "bfloat16", "-b", "16",
        "--max-tokens", "300", "--batch-invariant", "-o", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal = out / "samples.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 60:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    before = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    assert 60 <= len(before) < len(rows), errors
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL, timeout=180)
    after = {line["id"]: line["prediction"] for line in map(json.loads, journal.read_text().splitlines())}
    assert len(journal.read_text().splitlines()) == len(after) == len(rows)
    whole = tmp_path / "whole"
    subprocess.run([*command[:-1], str(whole)], check=True, stdout=subprocess.DEVNULL, timeout=180)
    wanted = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert after == {line["id"]: line["prediction"] for line in wanted}
