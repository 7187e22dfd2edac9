"""Value lists and the points they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.profiling.points import make_points, sample_points, start_from
from brim.settings.profile_settings import parse_values

LISTS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), min_size=1
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2-5", ("2", "3", "4", "5")),
        ("12,13", ("12", "13")),
        ("2-8:3", ("2", "5", "8")),
        ("1, 4-5 ,8", ("1", "4", "5", "8")),
        ("bfloat16,float32", ("bfloat16", "float32")),
        ("-1", ("-1",)),
        ("7", ("7",)),
    ],
)
def test_lists_and_ranges_are_read(text: str, values: tuple[str, ...]) -> None:
    assert parse_values(text) == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "names no value"), (" , ", "names no value"), ("5-2", "from small to large"), ("1,2,1", "1 is there twice"),
     ("0-99999999", "more than"), ("1-4:0", "from small to large")],
)  # fmt: skip
def test_a_list_that_makes_no_sense_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_values(text)


def test_starting_from_a_value_drops_those_below_and_refuses_one_above_all() -> None:
    assert start_from((2, 4, 8, 12), 5) == (8, 12)
    with pytest.raises(RequestError, match="start_from=20: it is above every value"):
        start_from((2, 4), 20)


def test_points_are_crossed_or_paired() -> None:
    lists = {"crops": (2, 3), "tokens": (8, 16)}
    assert make_points(lists) == [
        {"crops": 2, "tokens": 8}, {"crops": 2, "tokens": 16}, {"crops": 3, "tokens": 8}, {"crops": 3, "tokens": 16}
    ]  # fmt: skip
    assert make_points(lists, pairing="zip") == [{"crops": 2, "tokens": 8}, {"crops": 3, "tokens": 16}]


def test_lists_of_different_length_cannot_be_paired() -> None:
    with pytest.raises(RequestError, match=r"crops has 2, tokens has 1\); give as many"):
        make_points({"crops": (2, 3), "tokens": (8,)}, pairing="zip")


@pytest.mark.parametrize("strategy", ["stratified", "lhs", "boundary"])
@given(lists=LISTS, count=st.integers(1, 40), seed=st.integers(0, 3))
def test_a_sample_is_a_part_of_the_space_of_the_size_asked_for(
    strategy: str, lists: dict[str, list[int]], count: int, seed: int
) -> None:
    whole = make_points(lists)
    chosen = sample_points(lists, count, strategy=strategy, seed=seed)  # type: ignore[arg-type]
    assert len(chosen) == min(count, len(whole))
    assert all(point in whole for point in chosen)
    assert len({tuple(point.items()) for point in chosen}) == len(chosen)
    assert chosen == sample_points(lists, count, strategy=strategy, seed=seed)  # type: ignore[arg-type]


def test_the_boundary_has_the_corners_first() -> None:
    lists = {"crops": tuple(range(2, 14)), "tokens": (8, 16, 32)}
    chosen = sample_points(lists, 6, strategy="boundary")
    corners = [{"crops": c, "tokens": t} for c in (2, 13) for t in (8, 32)]
    assert chosen[:4] == corners
    assert {"crops": 8, "tokens": 16} in chosen


def test_a_latin_hypercube_spreads_over_every_knob() -> None:
    lists = {"crops": tuple(range(12)), "tokens": tuple(range(12))}
    chosen = sample_points(lists, 12, strategy="lhs")
    assert sorted(point["crops"] for point in chosen) == list(range(12))
    assert sorted(point["tokens"] for point in chosen) == list(range(12))


@pytest.mark.parametrize(("count", "strategy"), [(0, "lhs"), (3, "random")])
def test_a_sample_that_cannot_be_made_is_refused(count: int, strategy: str) -> None:
    with pytest.raises(RequestError):
        sample_points({"a": (1, 2)}, count, strategy=strategy)  # type: ignore[arg-type]
