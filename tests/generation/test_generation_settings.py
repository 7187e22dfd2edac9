from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from brim.errors import RequestError
from brim.generation.settings import GenerationSettings, TokenIds

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: the smallest is 1"),
        ({"temperature": -0.5}, "--temperature -0.5: it must be 0 .greedy. or more"),
        ({"top_p": 0.0}, "--top-p 0: it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "--top-p 1.5: it must be above 0 and at most 1"),
        ({"stop_strings": ("\n", "")}, "--stop '': a stop string must not be empty"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationSettings(**{"max_new_tokens": 8, **options})


def test_a_temperature_above_zero_samples() -> None:
    assert not GenerationSettings(max_new_tokens=1).samples
    assert GenerationSettings(max_new_tokens=1, temperature=0.1).samples


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 2, "pad_token_id": 0}, None, TokenIds(ends=(2,), pad=0)),
        ({"eos_token_id": [7, 9], "pad_token_id": None}, None, TokenIds(ends=(7, 9), pad=7)),
        ({"eos_token_id": None, "pad_token_id": None}, None, TokenIds(ends=(), pad=0)),
        ({}, None, TokenIds(ends=(), pad=0)),
        ({"eos_token_id": None}, {"eos_token_id": 5, "pad_token_id": 6}, TokenIds(ends=(5,), pad=6)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 5, "pad_token_id": 6}, TokenIds(ends=(7, 9), pad=6)),
        ({"eos_token_id": 2, "pad_token_id": 0}, {"eos_token_id": 5, "pad_token_id": 6}, TokenIds(ends=(2,), pad=0)),
        ({"eos_token_id": 2}, {"eos_token_id": 5, "pad_token_id": None}, TokenIds(ends=(2,), pad=2)),
    ],
    ids=["both", "list", "none", "bare", "tokenizer", "list-and-tokenizer", "model-before-tokenizer", "no-padding"],
)
def test_token_ids_come_from_the_model_then_from_the_tokenizer(
    config: dict[str, Any], tokenizer: dict[str, Any] | None, expected: TokenIds
) -> None:
    said = None if tokenizer is None else SimpleNamespace(**tokenizer)
    assert TokenIds.of(SimpleNamespace(**config), said) == expected
