"""Dotted keys and nested mappings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.nested_keys import conflicting_keys, flatten, leaves, nest, plain_value

NAMES = st.text(st.characters(blacklist_characters=".", blacklist_categories=("Cs",)), min_size=1, max_size=6)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=3))
NESTED = st.dictionaries(
    NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=12), max_size=4
)


@given(NESTED)
def test_flattening_is_undone_by_nesting(nested: dict[str, Any]) -> None:
    assert nest(flatten(nested)) == nested


@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=5).map(".".join), VALUES, max_size=8))
def test_nesting_is_undone_by_flattening_unless_a_value_is_a_section_too(flat: dict[str, Any]) -> None:
    if conflicting_keys(flat):
        with pytest.raises(RequestError, match="a value and a section"):
            nest(flat)
    else:
        assert flatten(nest(flat)) == flat


@given(NESTED, st.randoms())
def test_the_order_of_dotted_keys_does_not_matter(nested: dict[str, Any], draw: Any) -> None:
    pairs = list(flatten(nested).items())
    draw.shuffle(pairs)
    assert nest(dict(pairs)) == nested


def test_keys_may_be_dotted_and_nested_at_the_same_time() -> None:
    mixed = {"optimizer.params": {"betas": [0.9, 0.99]}, "optimizer": {"name": "adam"}, "hp.epochs": 3}
    assert nest(flatten(mixed)) == {
        "optimizer": {"params": {"betas": [0.9, 0.99]}, "name": "adam"},
        "hp": {"epochs": 3},
    }


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"a": 1, "a.b": 2}, "a: it is a value, and a.b makes it a section"),
        ({"a.b.c": 1, "a": {"b": 2}}, "a.b: it is a value, and a.b.c makes it a section"),
        ({"a": {"b": 1}, "a.b": 2}, "a.b: it is there twice"),
        ({"a..b": 1}, "a name on each side of a dot"),
        ({".a": 1}, "a name on each side of a dot"),
        ({"a": {"": 1}}, "a name on each side of a dot"),
        ({1: 2}, "1: a key must be a text, not int"),
    ],
)
def test_keys_that_cannot_be_nested_say_why(nested: dict[Any, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        flatten(nested)


def test_a_leaf_knows_the_keys_as_they_were_written() -> None:
    assert list(leaves({"grid": {"hp.batch_size": [1]}})) == [
        ("grid.hp.batch_size", [1], ("grid", "hp.batch_size")),
    ]


def test_nested_settings_share_no_list_with_what_they_were_made_of() -> None:
    flat = {"optimizer.params.betas": [0.9, [0.99]]}
    nest(flat)["optimizer"]["params"]["betas"][1].append(1)
    assert flat == {"optimizer.params.betas": [0.9, [0.99]]}


def test_a_mapping_without_end_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(RequestError, match="more than 64 levels"):
        flatten(endless)
    with pytest.raises(RequestError, match="more than 64 levels"):
        plain_value(endless, "grid")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"x", {"a": {2: 3}}, range(10**7)])
def test_what_json_cannot_hold_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^hp\.x"):
        plain_value(value, "hp.x")


def test_tuples_and_ranges_become_lists() -> None:
    assert plain_value({"a": (1, range(2))}, "") == {"a": [1, [0, 1]]}
