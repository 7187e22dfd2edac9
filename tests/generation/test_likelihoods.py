"""Continuations scored with shared contexts have the log-likelihoods that each has alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.generation import arena, likelihoods
from brim.generation.arena import KeyPart, head_on
from brim.generation.likelihoods import (
    OptionRows,
    SharedContexts,
    joined_by_context,
    shared_contexts_obstacle,
    shared_tokens,
)
from tests.generation import tiny_models

MODELS = [tiny_models.llama, tiny_models.qwen2, tiny_models.mistral, tiny_models.gpt_neox]


@torch.no_grad()
def alone(model: Any, questions: Sequence[OptionRows]) -> list[float]:
    values = []
    for question in questions:
        for row, scored in zip(question.rows, question.scored, strict=True):
            table = model(input_ids=torch.tensor([row])).logits[0].log_softmax(dim=-1)
            places = range(len(row) - scored, len(row))
            values.append(sum(float(table[place - 1, row[place]]) for place in places))
    return values


def questions(count: int, *, prefix: Sequence[int] = (), seed: int = 0) -> list[OptionRows]:
    draw = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(50, 100) for _ in range(draw.randint(least, most))]

    made = []
    for _ in range(count):
        context = [*prefix, *some(1, 20)]
        options = [some(1, 6) for _ in range(draw.randint(1, 5))]
        made.append(OptionRows(rows=[[*context, *option] for option in options], scored=[len(one) for one in options]))
    return made


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shared", [0, 9])
def test_likelihoods_are_those_of_each_option_alone(make: Callable[[], Any], shared: int) -> None:
    model = make()
    prefix = [60 + place for place in range(shared)]
    asked = questions(11, prefix=prefix)
    scorer = SharedContexts(model, prefix=prefix)
    for batch in (asked[:4], asked[4:]):
        assert scorer.scores(batch).tolist() == pytest.approx(alone(model, batch), abs=1e-4)


def test_a_head_that_is_not_called_as_a_module_is_noticed() -> None:
    """As in code that computes logits from the embedding's weights: they would be those of other tokens."""
    model = tiny_models.llama()
    unused = torch.nn.Linear(1, 1)
    model.get_output_embeddings = lambda: unused
    with pytest.raises(ValueError, match="output embeddings"), head_on(model, torch.tensor([2])):
        model(input_ids=torch.tensor([[60, 61, 62]]))


@pytest.mark.parametrize("make", MODELS)
def test_misses_are_the_tokens_that_are_not_the_likeliest(make: Callable[[], Any]) -> None:
    model, prefix = make(), list(range(60, 69))
    asked = questions(6, prefix=prefix)
    written = [*asked[0].rows[0]]
    for _ in range(3):  # a row that greedy decoding writes
        with torch.no_grad():
            written.append(int(model(input_ids=torch.tensor([written])).logits[0, -1].argmax()))
    asked.append(OptionRows(rows=[written, [*written[:-1], written[-1] ^ 1]], scored=[3, 2]))
    scores, misses = SharedContexts(model, prefix=prefix).scores_and_misses(asked)
    assert scores.tolist() == pytest.approx(alone(model, asked), abs=1e-4)
    assert misses.tolist() == missed(model, asked)
    assert misses[-2:].tolist() == [0, 1]


@torch.no_grad()
def missed(model: Any, questions: Sequence[OptionRows]) -> list[int]:
    counts = []
    for question in questions:
        for row, scored in zip(question.rows, question.scored, strict=True):
            likeliest = model(input_ids=torch.tensor([row])).logits[0].argmax(dim=-1).tolist()
            counts.append(sum(likeliest[place - 1] != row[place] for place in range(len(row) - scored, len(row))))
    return counts


def test_released_keys_of_the_prefix_are_computed_again() -> None:
    model, prefix = tiny_models.llama(), list(range(60, 70))
    asked = questions(3, prefix=prefix)
    scorer = SharedContexts(model, prefix=prefix)
    before = scorer.scores(asked)
    scorer.release()
    assert torch.equal(scorer.scores(asked), before)


@pytest.mark.parametrize(
    "question",
    [
        OptionRows(rows=[[51, 52, 53], [51, 52, 54]], scored=[1, 1]),  # nothing of the options is read
        OptionRows(rows=[[51, 52, 53]] * 2, scored=[2, 1]),  # the same row twice, scored from other places
        OptionRows(rows=[[51, 52, 53, 54], [51, 52]], scored=[3, 1]),  # one is the beginning of the other
        OptionRows(rows=[[51, 52, 53, 54, 55], [51, 52, 53, 60]], scored=[3, 2]),  # options begin alike
        OptionRows(rows=[[51, 52, 53, 54]], scored=[2]),
        OptionRows(rows=[[51, 52, 53, 54], [51, 60, 61], [51, 52, 53, 55]], scored=[3, 2, 1]),  # two differ at the end
        OptionRows(rows=[[51, 52], [51, 53]], scored=[0, 1]),  # an option without a token
    ],
)
def test_options_of_every_shape(question: OptionRows) -> None:
    model = tiny_models.llama()
    asked = [question, *questions(2)]
    assert SharedContexts(model).scores(asked).tolist() == pytest.approx(alone(model, asked), abs=1e-4)


def test_every_sequence_of_an_attention_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sequence has more than one, flash attention takes each to have one: without a token it is an error."""
    seen: list[int] = []

    def attend(query: torch.Tensor, part: KeyPart, *, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        groups = part.tokens
        assert len(groups.region_starts) == len(groups.query_starts) == len(groups.used) + 1
        assert int(groups.query_starts[-1]) == query.shape[0]
        seen.extend(groups.query_starts.diff().tolist())
        return plain(query, part, scale=scale)

    plain = arena._plain
    monkeypatch.setattr(arena, "_plain", attend)
    model = tiny_models.llama()
    short = [OptionRows(rows=[[51, 52, 53], [51, 52, 54]], scored=[1, 1])]
    longer = [OptionRows(rows=[[60, 61, 62], [60, 61, 63, 64]], scored=[1, 2])]
    for asked in ([*short, *longer], [*longer, *short], [*short, *longer, *short, *longer], short):
        assert SharedContexts(model).scores(asked).tolist() == pytest.approx(alone(model, asked), abs=1e-4)
    assert min(seen) == 1


def test_no_token_is_read_twice() -> None:
    """Eight tokens of prefix, three of the context, one and two of the options: their last tokens are scored only."""
    model = tiny_models.llama()
    prefix, context = list(range(60, 68)), [70, 71, 72]
    question = OptionRows(rows=[[*prefix, *context, 80, 81], [*prefix, *context, 82, 83, 84]], scored=[2, 3])
    read = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].flatten().tolist()))
    scorer = SharedContexts(model, prefix=prefix)
    scorer.scores([question])
    scorer.scores([question])
    own = [*context, 80, 82, 83]
    assert read == [prefix, own, own]
    assert question.tokens_to_read(len(prefix)) == len(own)


def test_options_that_differ_in_their_last_token_are_read_once() -> None:
    model, read = tiny_models.llama(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].flatten().tolist()))
    question = OptionRows(rows=[[51, 60, 61, 62], [51, 70, 71], [51, 60, 61, 63]], scored=[3, 2, 3])
    SharedContexts(model).scores([question])
    assert read == [[51, 60, 61, 70]]
    assert question.tokens_to_read(0) == 4


def test_the_prefix_ends_before_what_scores_are_read_at() -> None:
    """As of two equal questions whose options begin alike."""
    question = OptionRows(rows=[[51, 52, 53, 60, 61], [51, 52, 53, 60, 62]], scored=[2, 2])
    assert question.shared == 4
    assert question.most_prefix == 2
    model = tiny_models.llama()
    scorer = SharedContexts(model, prefix=question.rows[0][: question.most_prefix])
    assert scorer.scores([question] * 2).tolist() == pytest.approx(alone(model, [question] * 2), abs=1e-4)


class TestObstacles:
    @pytest.fixture(autouse=True)
    def of_any_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(likelihoods, "MIN_CPU_PARAMETERS", 0)

    @pytest.mark.parametrize("make", MODELS)
    def test_models_with_plain_attention_have_none(self, make: Callable[[], Any]) -> None:
        assert shared_contexts_obstacle(make(), longest=50) is None

    def test_a_model_that_attends_in_its_own_way_fails_the_trial(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if its layers ignored the parts: every token attends to all before it in the row."""
        model = tiny_models.llama()
        monkeypatch.setattr(likelihoods._Keys, "parts", _everything_before)
        assert "standard deviations" in str(shared_contexts_obstacle(model, longest=50))

    def test_a_window_shorter_than_the_longest_option_is_one(self) -> None:
        model = tiny_models.mistral()
        model.config.sliding_window = 64
        assert shared_contexts_obstacle(model, longest=63) is None
        assert "64 tokens" in str(shared_contexts_obstacle(model, longest=64))

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_positions_that_the_longest_row_decides_for_all_are_one(self, kind: str) -> None:
        model = tiny_models.llama_stretched(kind, trained=64)
        assert shared_contexts_obstacle(model, longest=64) is None
        assert "beyond 64 tokens" in str(shared_contexts_obstacle(model, longest=65))

    def test_small_models_on_the_cpu_gain_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(likelihoods, "MIN_CPU_PARAMETERS", 1 << 30)
        assert shared_contexts_obstacle(tiny_models.llama(), longest=50) == ""


def _everything_before(self: Any, layer: Any, query: Any, key: Any, value: Any) -> list[Any]:
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    tokens = likelihoods.TokenGroups.one(query.shape[0], start=0, used=query.shape[0], device=query.device)
    return [likelihoods.KeyPart(keys=keys, values=values, tokens=tokens, causal=True)]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=5))
def test_shared_tokens_are_counted_as_a_plain_loop_does(rows: list[list[int]]) -> None:
    count = 0
    while all(len(row) > count for row in rows) and len({row[count] for row in rows}) == 1:
        count += 1
    assert shared_tokens(rows) == count


@settings(deadline=None)
@given(
    st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12),
    st.integers(1, 40),
)
def test_joined_rows_are_all_rows_once_and_read_less_within_the_limit(
    rows: set[tuple[int, ...]], most_tokens: int
) -> None:
    listed = [(9, 9, *row) for row in rows]
    groups = joined_by_context(listed, prefix=2, most_tokens=most_tokens)
    assert sorted(number for group in groups for number in group) == list(range(len(listed)))
    for group in groups:
        joined = OptionRows(rows=[[*listed[number], 0] for number in group], scored=[1] * len(group))
        if len(group) > 1:
            assert joined.shared > 2
            assert joined.tokens_to_read(2) <= most_tokens
            assert joined.tokens_to_read(2) < sum(len(listed[number]) - 2 for number in group)
