"""A fingerprint is stable, blind to order, and sees every value."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.storage.fingerprint import fingerprint

FACTS = {"model": "swin3d_t", "knobs": {"frames": 16, "size": 224}, "dtype": "bfloat16", "limit": None}


def test_it_is_the_same_in_every_process_and_on_every_day() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == "8baa73198470c7bb"  # sha256 of {"a":1,"b":[1,2]}


def test_order_does_not_matter() -> None:
    turned = dict(reversed(FACTS.items())) | {"knobs": {"size": 224, "frames": 16}}
    assert fingerprint(turned) == fingerprint(FACTS)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "swin3d_s"}, {"knobs": {"frames": 16, "size": 225}}, {"knobs": {"frames": 16}}, {"limit": 0},
        {"limit": "None"}, {"dtype": "float16"}, {"more": None},
    ],
)  # fmt: skip
def test_every_value_matters(change: dict[str, object]) -> None:
    assert fingerprint({**FACTS, **change}) != fingerprint(FACTS)


def test_values_that_json_does_not_know_are_taken_as_text() -> None:
    assert fingerprint({"path": Path("/a")}) != fingerprint({"path": Path("/b")})
    assert len(fingerprint({})) == 16
