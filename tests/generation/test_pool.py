"""A pool gives every prompt the answer that transformers' `generate` gives it alone, however rows come and go."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.generation.arena import ALIGNMENT, Regions
from brim.generation.choose import TokenChooser
from brim.generation.pool import GenerationPool, PoolAnswer, PoolPrompt
from brim.generation.select import pool_obstacle
from brim.generation.settings import GenerationSettings, TokenIds
from tests.generation import tiny_models
from tests.generation.fake_graphs import FakeGraph, fake_captures

ENDS = (tiny_models.END, 7, 23, 41)
TOKENS = TokenIds(ends=ENDS, pad=tiny_models.PAD)
NEW = 14


def prompts(count: int, *, prefix: Sequence[int] = (), seed: int = 0) -> list[PoolPrompt]:
    """Longest first, as an evaluation admits them."""
    draw = random.Random(seed)
    rows = [[*prefix, *(draw.randrange(50, 100) for _ in range(draw.randint(1, 30)))] for _ in range(count)]
    return [PoolPrompt(ids=ids, key=key) for key, ids in enumerate(sorted(rows, key=len, reverse=True))]


def answered(
    model: Any, asked: Sequence[PoolPrompt], *, settings: GenerationSettings | None = None, rows: int = 5,
    slots: int = 400, stopped: Any = None, **options: Any,
) -> dict[int, PoolAnswer]:  # fmt: skip
    pool = GenerationPool(
        model, settings or GenerationSettings(max_new_tokens=NEW), TOKENS, rows=rows, slots=slots,
        longest=max(len(one.ids) for one in asked), **options,
    )  # fmt: skip
    pool.stopped = stopped
    waiting, got = list(asked), {}
    while waiting or pool.active:
        waiting = waiting[pool.admit(waiting) :]
        got |= {answer.key: answer for answer in pool.advance()}
    return got


def alone(model: Any, prompt: PoolPrompt, new: int = NEW) -> list[int]:
    """What `generate` answers, without the end token."""
    ids = torch.tensor([list(prompt.ids)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=list(ENDS)
    )
    answer = made[0, ids.shape[1] :].tolist()
    return answer[:-1] if answer[-1] in ENDS else answer


@pytest.mark.parametrize(
    "make",
    [tiny_models.llama, tiny_models.qwen2, tiny_models.mistral, tiny_models.gpt_neox, tiny_models.mixtral,
     pytest.param(tiny_models.gemma3, marks=tiny_models.SINCE_VERSION_5)],
)  # fmt: skip
@pytest.mark.parametrize("shared", [0, 9])
def test_answers_are_those_of_generate_at_batch_size_one(make: Callable[[], Any], shared: int) -> None:
    model = make()
    prefix = [60 + place for place in range(shared)]
    asked = prompts(17, prefix=prefix)
    got = answered(model, asked, prefix=prefix, chunk_tokens=20)
    assert [got[one.key].tokens for one in asked] == [alone(model, one) for one in asked]
    lengths = {len(answer.tokens) for answer in got.values()}
    assert len(lengths) > 2, "answers must end at different lengths for rows to come and go"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("chunk", [7, 40, 1000])
def test_batch_invariant_forwards_have_one_shape_each(
    chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, steps and the rows that tokens are chosen for: what a library's choice of kernels depends on."""
    model, asked = tiny_models.llama(), prompts(17)
    settings = GenerationSettings(max_new_tokens=NEW, temperature=temperature)
    usual = answered(model, asked, settings=settings, slots=2000, chunk_tokens=chunk)
    shapes: dict[str, set[int]] = {"read": set(), "head": set(), "chosen": set()}
    choose = TokenChooser.choose

    def recorded(chooser: TokenChooser, logits: torch.Tensor, **named: Any) -> torch.Tensor:
        shapes["chosen"].add(logits.shape[0])
        return choose(chooser, logits, **named)

    monkeypatch.setattr(TokenChooser, "choose", recorded)
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: shapes["read"].add(given[0].numel()))
    model.get_output_embeddings().register_forward_hook(lambda _, __, made: shapes["head"].add(made.shape[1]))
    settings = dataclasses.replace(settings, batch_invariant=True)
    got = answered(model, asked, settings=settings, rows=5, slots=2000, chunk_tokens=chunk)
    assert {key: one.tokens for key, one in got.items()} == {key: one.tokens for key, one in usual.items()}
    assert shapes == {"read": {chunk, 5}, "head": {5}, "chosen": {5}}


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_neither_rows_nor_chunks_change_an_answer(rows: int, chunk: int) -> None:
    model, asked = tiny_models.qwen2(), prompts(17)
    usual = answered(model, asked, slots=2000)
    got = answered(model, asked, rows=rows, slots=2000, chunk_tokens=chunk)
    assert {key: one.tokens for key, one in got.items()} == {key: one.tokens for key, one in usual.items()}
    assert max(one.shared_with for one in got.values()) == min(rows, 17)


def test_sampling_depends_on_seed_and_key_alone() -> None:
    model, asked = tiny_models.qwen2(), prompts(9)
    settings = GenerationSettings(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=3)
    few, many = (answered(model, asked, settings=settings, rows=rows, slots=1000) for rows in (2, 9))
    other = answered(model, asked, settings=GenerationSettings(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=4))
    tokens = [one.tokens for _, one in sorted(few.items())]
    assert tokens == [one.tokens for _, one in sorted(many.items())]
    assert tokens != [one.tokens for _, one in sorted(other.items())]


def test_an_answer_says_whether_it_ended_by_itself() -> None:
    got = answered(tiny_models.qwen2(), prompts(17)).values()
    assert {one.ended for one in got} == {True, False}
    assert all(len(one.tokens) < NEW for one in got if one.ended)
    assert all(len(one.tokens) == NEW for one in got if not one.ended)
    assert not any(token in ENDS for one in got for token in one.tokens)


def test_an_answer_that_needs_no_further_token_leaves() -> None:
    asked = prompts(6)
    usual = answered(tiny_models.qwen2(), asked)
    got = answered(tiny_models.qwen2(), asked, stopped=lambda answers: [len(tokens) > 2 for tokens in answers])
    assert any(len(one.tokens) < len(usual[key].tokens) for key, one in got.items())
    assert all(one.tokens == usual[key].tokens[: len(one.tokens)] for key, one in got.items())


def test_a_pool_that_grows_keeps_what_is_in_it() -> None:
    model, asked = tiny_models.qwen2(), prompts(12)
    pool = GenerationPool(
        model, GenerationSettings(max_new_tokens=NEW), TOKENS, rows=12, slots=100, longest=len(asked[0].ids)
    )
    admitted = pool.admit(asked)
    assert 0 < admitted < 12
    first = pool.advance()
    pool.grow(2000)
    got = {one.key: one.tokens for one in first}
    assert pool.admit(asked[admitted:]) == 12 - admitted
    while pool.active:
        got |= {one.key: one.tokens for one in pool.advance()}
    assert [got[one.key] for one in asked] == [alone(model, one) for one in asked]


def test_tokens_that_were_computed_for_nobody_are_counted() -> None:
    pool = GenerationPool(
        tiny_models.qwen2(), GenerationSettings(max_new_tokens=NEW), TOKENS, rows=9, slots=2000, longest=40
    )
    asked = prompts(9)
    pool.admit(asked)
    while pool.active:
        pool.advance()
    assert pool.useful_tokens < pool.computed_tokens
    assert pool.useful_tokens >= sum(len(one.ids) for one in asked)


class FixedGraph(FakeGraph):
    """Replays a step where all that a real graph has fixed is as it was."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__(step)
        cells = [cell.cell_contents for cell in step.__closure__ or ()]
        self._pool = next(one for one in cells if isinstance(one, GenerationPool))
        self._fixed = self._now()

    def _now(self) -> Any:
        return [one.data_ptr() for one in self._pool.tensors()], self._pool.longest

    def replay(self) -> None:
        assert self._now() == self._fixed, "a graph reads and writes where it was captured"
        super().replay()


@pytest.mark.parametrize("rows", [8, 14])
def test_captured_steps_give_the_same_answers_whatever_grows_or_gets_longer(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[FixedGraph] = []

    def capture(step: Callable[[], Any]) -> FixedGraph:
        graphs.append(FixedGraph(step))
        return graphs[-1]

    fake_captures(monkeypatch, "brim.generation.pool", capture)
    model, asked = tiny_models.qwen2(), prompts(24)
    settings = GenerationSettings(max_new_tokens=NEW)
    pool = GenerationPool(model, settings, TOKENS, rows=rows, slots=200, longest=len(asked[12].ids))
    waiting, got = [*asked[12:], *asked[:12]], {}
    while waiting or pool.active:
        waiting = waiting[pool.admit(waiting) :]
        got |= {answer.key: answer.tokens for answer in pool.advance()}
        if len(waiting) < 6 and pool.arena.slots == 200:
            pool.grow(600)
    assert [got[one.key] for one in asked] == [alone(model, one) for one in asked]
    assert pool.arena.slots == 600
    assert pool.longest == len(asked[0].ids)
    assert sum(graph.replays for graph in graphs) > len(graphs) > 2
    pool.release()
    assert pool.tensors() == pool._state.tensors()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tiny_models.mistral(sliding_window=8), "window"),
        (tiny_models.bloom, "logits differ"),  # its positions are a bias that packed attention does not get
    ],
)
def test_a_model_that_a_pool_does_not_fit_says_why(make: Callable[[], Any], why: str) -> None:
    obstacle = pool_obstacle(make(), GenerationSettings(max_new_tokens=NEW), TOKENS, longest=30)
    assert obstacle is not None
    assert why in obstacle or "raised" in obstacle


def test_experts_whose_tokens_are_the_batchs_are_not_independent_of_it() -> None:
    model, settings = tiny_models.mixtral(), GenerationSettings(max_new_tokens=NEW)
    assert pool_obstacle(model, settings, TOKENS, longest=30) is None
    invariant = GenerationSettings(max_new_tokens=NEW, batch_invariant=True)
    obstacle = pool_obstacle(model, invariant, TOKENS, longest=30)
    assert obstacle is not None
    assert "expert" in obstacle
    assert pool_obstacle(tiny_models.llama(), invariant, TOKENS, longest=30) is None


def test_a_trial_that_runs_out_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = tiny_models.llama(), GenerationSettings(max_new_tokens=NEW)

    def short(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", short)
        assert pool_obstacle(model, settings, TOKENS, longest=30) == "a trial of it ran out of memory"
    assert pool_obstacle(model, settings, TOKENS, longest=30) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_the_longest_prompt_decides_for_all_need_batches(kind: str) -> None:
    model, settings = tiny_models.llama_stretched(kind, trained=30), GenerationSettings(max_new_tokens=NEW)
    assert pool_obstacle(model, settings, TOKENS, longest=30 - NEW) is None
    obstacle = pool_obstacle(model, settings, TOKENS, longest=31 - NEW)
    assert obstacle == f"LlamaForCausalLM has {kind} positions: beyond 30 tokens the longest decides for all"
    asked = [PoolPrompt(ids=list(range(5, 11)), key=0), PoolPrompt(ids=list(range(3, 60)), key=1)]
    pool = GenerationPool(model, settings, TOKENS, rows=2, slots=400, longest=60)
    pool.admit(asked)
    got: dict[Any, list[int]] = {}
    while pool.active:
        got |= {one.key: one.tokens for one in pool.advance()}
    assert got[0] != alone(model, asked[0])  # what the obstacle keeps from happening


def test_a_penalty_on_tokens_so_far_needs_batches() -> None:
    model = tiny_models.qwen2()
    model.generation_config.repetition_penalty = 1.3
    obstacle = pool_obstacle(model, GenerationSettings(max_new_tokens=NEW), TOKENS, longest=30)
    assert obstacle is not None
    assert "tokens so far" in obstacle


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_trial_agrees_with_the_models_own_logits_of_one_forward_in_each_precision(
    prefix: bool, dtype: torch.dtype, most: int
) -> None:
    """Forwards that are launched kernel by kernel are most of a trial's time."""
    settings, model = GenerationSettings(max_new_tokens=NEW), tiny_models.qwen2().to(dtype)
    caches: list[bool] = []
    model.register_forward_pre_hook(lambda _, __, named: caches.append(named["use_cache"]), with_kwargs=True)
    assert pool_obstacle(model, settings, TOKENS, longest=30, prefix=prefix) is None
    assert 1 <= caches.count(False) <= most


# ------------------------------------------------------------------------------------------------- regions


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 90)), max_size=60), st.integers(0, 500))
def test_regions_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]], slots: int) -> None:
    regions = Regions(slots)
    whole = regions.free_slots
    taken: dict[int, int] = {}
    for gives, number in steps:
        if gives and taken:
            start = sorted(taken)[number % len(taken)]
            regions.give_back(start)
            del taken[start]
        elif (start := regions.take(number)) is not None:
            taken[start] = start + -(-number // ALIGNMENT) * ALIGNMENT
        ordered = sorted(taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
        assert all(start >= ALIGNMENT and end <= slots for start, end in ordered)
        assert regions.free_slots == whole - sum(end - start for start, end in ordered)
    for start in list(taken):
        regions.give_back(start)
    assert regions.free_slots == whole
    if whole >= ALIGNMENT:
        assert regions.take(whole // ALIGNMENT * ALIGNMENT) == ALIGNMENT, "neighbours are merged"
