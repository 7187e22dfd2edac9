from __future__ import annotations

import torch

from brim.models.token_batches import plain_token_range, special_token_ids, token_batch, token_knobs


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
