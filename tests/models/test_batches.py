"""Worst-case batches of random content."""

from __future__ import annotations

import torch

from brim.models.batches import (
    plain_token_range,
    random_floats,
    random_integers,
    special_token_ids,
    token_batch,
    token_knobs,
)


def test_special_ids_are_found_wherever_a_configuration_has_them() -> None:
    config = {
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "vocab_size": 50,
        "id2label": {0: "a"},
        "text_config": {"bos_token_id": 7},
    }
    assert special_token_ids(config) == {2, 3, 7}


def test_the_longest_run_without_a_special_id_is_taken() -> None:
    assert plain_token_range(100, {0, 1, 2}) == (3, 100)
    assert plain_token_range(100, {60}) == (0, 60)
    assert plain_token_range(100, {5000}) == (0, 100)
    assert plain_token_range(2, {0, 1}) == (0, 2)


def test_a_batch_is_full_length_without_padding_or_special_ids() -> None:
    batch = token_batch(3, 40, (5, 9), torch.device("cpu"))
    assert batch["input_ids"].shape == (3, 40)
    assert batch["attention_mask"].all()
    assert set(batch["input_ids"].unique().tolist()) == {5, 6, 7, 8}


def test_default_lengths_fit_together_in_the_positions() -> None:
    for limit in (2, 10, 64, 500, 4096):
        tokens, new_tokens = token_knobs(limit, generates=True)
        assert tokens.default + new_tokens.default <= limit
        assert tokens.maximum == limit
    assert [knob.default for knob in token_knobs(None, generates=True)] == [512, 32]
    assert [knob.default for knob in token_knobs(128, generates=False)] == [128]


def test_the_global_generator_is_not_used() -> None:
    before = torch.get_rng_state()
    random_floats((3, 4), device=torch.device("cpu"))
    random_integers(0, 5, (3, 4), device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_values_are_the_same_each_time_and_within_range() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(random_floats((8,), device=cpu), random_floats((8,), device=cpu))
    integers = random_integers(3, 5, (100,), device=cpu)
    assert set(integers.tolist()) == {3, 4}


def test_half_precision_and_devices_without_memory_work() -> None:
    assert random_floats((2,), device=torch.device("cpu"), dtype=torch.float16).dtype == torch.float16
    assert random_integers(0, 2, (2,), device=torch.device("meta")).is_meta
