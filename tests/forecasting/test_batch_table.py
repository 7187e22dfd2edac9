"""The table of batch sizes: computed from traces, two for each model and mode, and never larger on a smaller card."""

from __future__ import annotations

from typing import Any

import pytest

from brim.forecasting.table import BY_HAND_CARDS, CARD_GB, MODELS, ModelClass, batch_size_table, card_of
from tests.forecasting.synthetic_traces import MIB, TracedByHand

SMALL = ModelClass(label="small", stands_for_it="A", config={"weight": 40 * MIB}, parameters=10**8, by_hand="8-16")
LARGE = ModelClass(label="large", stands_for_it="B", config={"weight": 400 * MIB}, parameters=10**9, by_hand="1-2")
HUGE = ModelClass(label="huge", stands_for_it="C", config={"weight": 1}, parameters=10**12, by_hand="1-2")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TracedByHand]:
    """Workloads whose traces are written by hand, in the order in which they were asked for."""
    workloads: list[TracedByHand] = []
    monkeypatch.setattr("brim.forecasting.forecast._trace", lambda w, size, target, _: w.trace(w, size, target))
    return workloads


def make_into(workloads: list[TracedByHand]) -> Any:
    def make(config: Any, mode: str, knobs: Any) -> TracedByHand:
        assert knobs["tokens"] == 512
        assert ("max_new_tokens" in knobs) == (mode == "generate")
        workloads.append(TracedByHand(**config))
        return workloads[-1]

    return make


def test_every_card_has_a_size_for_every_model_and_mode(made: list[TracedByHand]) -> None:
    table = batch_size_table(make_into(made), models=(SMALL, LARGE))
    assert len(table.entries) == 2 * 2 * len(CARD_GB)
    for model in (SMALL, LARGE):
        for mode in ("generate", "train"):
            sizes = [table.batch_size(card, model.label, mode) for card in CARD_GB]
            assert sizes == sorted(sizes)
    assert all(table.batch_size(card, "small", "train") >= table.batch_size(card, "large", "train") for card in CARD_GB)


def test_a_table_costs_two_traces_for_each_model_and_mode(made: list[TracedByHand]) -> None:
    batch_size_table(make_into(made), models=(SMALL, LARGE))
    assert len(made) == 4
    assert all(len(workload.traced) == 2 for workload in made)


def test_a_model_whose_weights_exceed_every_card_is_not_built(made: list[TracedByHand]) -> None:
    table = batch_size_table(make_into(made), models=(HUGE,))
    assert made == []
    assert {entry.batch_size for entry in table.entries} == {0}


def test_hand_made_and_computed_ranges_are_shown_together(made: list[TracedByHand]) -> None:
    table = batch_size_table(make_into(made), models=(SMALL,), cards_gb=(4, 16, 48))
    assert [entry.by_hand_for_the_card for entry in table.entries[:3]] == ["1-2", "8-16", "8-16"]
    assert {entry.by_hand_for_the_model for entry in table.entries} == {"8-16"}


def test_the_default_axes_are_those_of_the_guide() -> None:
    assert CARD_GB == (4, 8, 12, 16, 24, 80)
    assert [model.label for model in MODELS] == ["< 1 B", "1-7 B", "7-13 B", "> 13 B"]
    assert set(BY_HAND_CARDS) == set(CARD_GB)
    bounds = [(0, 1e9), (1e9, 7e9), (7e9, 13e9), (13e9, 1e12)]
    assert all(low <= model.parameters < high for model, (low, high) in zip(MODELS, bounds, strict=True))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stands_for_it)
def test_a_shape_has_the_parameters_it_says(model: ModelClass) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(**{key: value for key, value in model.config.items() if key != "torch_dtype"})
    with torch.device("meta"):
        built = transformers.Qwen2ForCausalLM(config)
    count = sum(parameter.numel() for parameter in built.parameters())
    assert abs(count / model.parameters - 1) < 0.01


def test_a_card_has_a_little_less_than_its_advertised_gigabytes() -> None:
    card = card_of(24)
    assert 23 * 2**30 < card.memory_bytes < 24 * 2**30
    assert card.key == "24gb"


def test_a_table_says_how_it_was_made_and_goes_into_json(made: list[TracedByHand]) -> None:
    data = batch_size_table(make_into(made), models=(SMALL,)).to_json()
    assert data["schema"] == "brim.batch_table/1"
    assert any("AdamW" in line for line in data["method"])
    assert data["models"][0]["by_hand"] == "8-16"
