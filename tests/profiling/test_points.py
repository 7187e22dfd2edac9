"""Which points a profile visits, in which order, and what it refuses before anything runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.profiling.points import plan_points, point_folder, point_label, whole_range
from brim.workloads.knobs import Knob
from tests.profiling.profile_runs import request


def values(folder: Path, **more: Any) -> list[Any]:
    return [point["reach"] for point in plan_points(request(folder, **more))]


def test_values_are_numbers_in_the_order_asked_for(tmp_path: Path) -> None:
    axes = {"reach": ("4", "2", "6")}
    assert values(tmp_path, axes=axes) == [4, 2, 6]
    assert values(tmp_path, axes=axes, order="ascending") == [2, 4, 6]
    assert values(tmp_path, axes=axes, order="descending") == [6, 4, 2]


def test_start_from_drops_what_is_below(tmp_path: Path) -> None:
    assert values(tmp_path, start_from="4") == [4, 6]
    with pytest.raises(RequestError, match="above every value"):
        values(tmp_path, start_from="7")
    with pytest.raises(RequestError, match="int values"):
        values(tmp_path, start_from="many")


def test_several_knobs_cross_or_pair(tmp_path: Path) -> None:
    axes = {"reach": ("2", "4"), "width": ("1", "2")}
    assert len(plan_points(request(tmp_path, axes=axes))) == 4
    assert plan_points(request(tmp_path, axes=axes, pairing="zip")) == [
        {"reach": 2, "width": 1},
        {"reach": 4, "width": 2},
    ]
    with pytest.raises(RequestError, match="differ in length"):
        plan_points(request(tmp_path, axes={"reach": ("2",), "width": ("1", "2")}, pairing="zip"))
    drawn = plan_points(request(tmp_path, axes={"reach": tuple("123456789"), "width": tuple("123456789")},
                                sample="lhs", num_points=9))  # fmt: skip
    assert len(drawn) == 9
    assert {point["reach"] for point in drawn} == set(range(1, 10))


def test_what_the_model_does_not_take_is_refused_now(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="whole number"):
        values(tmp_path, axes={"reach": ("2", "many")})
    with pytest.raises(RequestError, match="did you mean reach"):
        plan_points(request(tmp_path, axes={"reech": ("2",)}))
    with pytest.raises(RequestError, match="did you mean reach"):
        plan_points(request(tmp_path, axes={"reech": None}))
    with pytest.raises(RequestError, match="no point of this profile"):
        plan_points(request(tmp_path, batch_size_for=(({"": "3"}, 8),)))
    with pytest.raises(RequestError, match="float16"):
        plan_points(request(tmp_path, axes={"dtype": ("float12",)}))


@pytest.mark.parametrize(
    ("knob", "expected"),
    [
        (Knob(name="max_crops", default=12, minimum=1), tuple(range(1, 13))),
        (Knob(name="layers", default=3, minimum=1, maximum=3), (1, 2, 3)),
        (Knob(name="on", default=True), (False, True)),
        (Knob(name="size", default=224, minimum=32, maximum=96, multiple_of=32), (32, 64, 96)),
        (Knob(name="crops", default=0, minimum=0), (0,)),
    ],
)
def test_the_whole_range_of_a_small_knob_is_every_value(knob: Knob, expected: tuple[Any, ...]) -> None:
    assert whole_range(knob) == expected


def test_a_wide_knob_is_sampled_at_a_few_growing_values() -> None:
    spread = whole_range(Knob(name="max_pixels", default=12_845_056, minimum=3136))
    assert len(spread) == 8
    assert (spread[0], spread[-1]) == (3136, 12_845_056)
    steps = [later / earlier for earlier, later in itertools.pairwise(spread)]
    assert max(steps) / min(steps) < 1.1
    with pytest.raises(RequestError, match="no range"):
        whole_range(Knob(name="word", default="a"))


def test_a_points_folder_is_a_name_for_any_file_system() -> None:
    assert point_folder({"max_crops": 12, "dtype": "bfloat16"}) == "max_crops=12_dtype=bfloat16"
    assert set(point_folder({"a/b": "c:d e\\f"})) & set("/\\: ") == set()
    assert point_label({"max_crops": 12, "max_new_tokens": 8}) == "max_crops=12, max_new_tokens=8"
