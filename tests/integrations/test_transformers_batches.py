"""Collated batches taken apart and put together again: rows, pairs, labels, and what cannot be split."""

from __future__ import annotations

from typing import Any

import torch

from brim.integrations.transformers_batches import BatchLayout, joined_answers, label_weight
from brim.integrations.transformers_samples import CostliestSamples, item_cost


def preferences(pairs: int) -> dict[str, Any]:
    """Rows are 0, 1, … for the chosen and 100, 101, … for the rejected."""
    ids = torch.tensor([[number] for number in (*range(pairs), *range(100, 100 + pairs))])
    return {"input_ids": ids, "ref_chosen_logps": torch.arange(pairs), "use_cache": False}


def test_a_part_of_a_preference_batch_keeps_its_pairs() -> None:
    batch = preferences(5)
    layout = BatchLayout.of(batch, paired=True)
    part = layout.part(batch, 1, 3)
    assert layout.obstacle is None
    assert layout.samples == 5
    assert part["input_ids"].flatten().tolist() == [1, 2, 101, 102]
    assert part["ref_chosen_logps"].tolist() == [1, 2]
    assert part["use_cache"] is False


def test_parts_of_a_batch_are_its_rows_in_nested_values_too() -> None:
    batch = {"input_ids": torch.arange(8).view(4, 2), "names": ["a", "b", "c", "d"], "more": {"x": torch.arange(4)}}
    part = BatchLayout.of(batch, paired=False).part(batch, 2, 4)
    assert part["input_ids"].tolist() == [[4, 5], [6, 7]]
    assert part["names"] == ["c", "d"]
    assert part["more"]["x"].tolist() == [2, 3]


def test_what_does_not_lie_in_rows_cannot_be_split() -> None:
    flattened = {"input_ids": torch.zeros(1, 12), "cu_seq_lens_q": torch.tensor([0, 5, 12])}
    patches = {"input_ids": torch.zeros(2, 12), "pixel_values": torch.zeros(37, 8)}
    odd = {"input_ids": torch.zeros(3, 12)}
    assert "behind each other" in (BatchLayout.of(flattened, paired=False).obstacle or "")
    assert "pixel_values has 37 entries" in (BatchLayout.of(patches, paired=False).obstacle or "")
    assert "not a mapping" in (BatchLayout.of((torch.zeros(3, 2),), paired=False).obstacle or "")
    assert "no tensor" in (BatchLayout.of({"text": "a"}, paired=False).obstacle or "")
    assert "no pairs" in (BatchLayout.of(odd, paired=True).obstacle or "")


def test_a_part_weighs_as_many_labels_as_it_has() -> None:
    labels = torch.tensor([[1, 2, 3], [4, -100, -100]])
    assert label_weight({"labels": labels}, 2, shifted=False) == 4
    assert label_weight({"labels": labels}, 2, shifted=True) == 2
    assert label_weight({"labels": torch.tensor([0.5, 1.5])}, 2, shifted=True) == 2
    assert label_weight({}, 7, shifted=True) == 7


def test_answers_are_joined_in_the_order_of_the_batch() -> None:
    parts = [
        (torch.tensor(2.0), {"logits": torch.tensor([1, 2])}, None),
        (torch.tensor(4.0), {"logits": torch.tensor([3])}, None),
    ]
    loss, logits, labels = joined_answers(parts, [0.75, 0.25], paired=False)
    assert float(loss) == 2.5
    assert logits["logits"].tolist() == [1, 2, 3]
    assert labels is None
    nothing = joined_answers([torch.tensor(2.0), torch.tensor(float("nan"))], [1.0, 0.0], paired=False)
    assert float(nothing) == 2.0  # the mean over no labels
    answers = joined_answers([torch.tensor([[5, 6, 7]]), torch.tensor([[8], [9]])], [0.4, 0.6], paired=False)
    assert answers.tolist() == [[5, 6, 7], [8, -100, -100], [9, -100, -100]]  # generated, one part longer
    pairs = [torch.tensor([0, 1, 100, 101]), torch.tensor([2, 102])]
    assert joined_answers(pairs, [2 / 3, 1 / 3], paired=True).tolist() == [0, 1, 2, 100, 101, 102]


def test_a_sample_costs_what_it_will_be_padded_to() -> None:
    assert item_cost({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}) == 3
    assert item_cost({"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}) == 4
    assert item_cost({"pixel_values": torch.zeros(3, 4, 4), "label": 1}) == 49
    assert item_cost({"text": "abcd"}) == 4


def test_a_worst_case_batch_is_padded() -> None:
    samples = CostliestSamples([4, 2, 0], lambda number: number, lambda numbers: numbers)
    assert samples.batch(1) == [4]
    assert samples.batch(2) == [4, 0]
    assert samples.batch(4) == [4, 4, 4, 0]
