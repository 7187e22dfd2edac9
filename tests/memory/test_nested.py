"""Everything of a kind, wherever a sample holds it."""

from __future__ import annotations

import collections
from typing import NamedTuple

from brim.memory.transfer import replaced


class Sample(NamedTuple):
    """As a data set of the user's own may give it."""

    clip: int
    label: str


def test_what_holds_a_value_keeps_its_form() -> None:
    value = {"a": [1, "x", (2, None)], "b": Sample(3, "y"), "c": collections.OrderedDict(d=4)}
    found = replaced(value, int, lambda number: number * 10)
    assert found == {"a": [10, "x", (20, None)], "b": Sample(30, "y"), "c": {"d": 40}}
    assert isinstance(found["b"], Sample)
    assert value["a"] == [1, "x", (2, None)]


def test_what_is_of_the_kind_is_not_looked_into() -> None:
    assert replaced([[1], 2], list, len) == 2
    assert replaced("text", str, len) == 4
