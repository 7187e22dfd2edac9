"""What a profile may be asked for, and what it refuses with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.profiling.points import scale_for
from brim.settings.declare import read_settings
from brim.settings.profile_settings import SEED_SCALE, ProfileRequest, ProfileSettings
from tests.profiling.profile_runs import request


def asked(**values: object) -> ProfileRequest:
    return read_settings(ProfileSettings, {"model": "m", "data": "d", "knob": "reach", **values}).request


def test_a_knob_has_its_range_a_list_or_the_list_of_values() -> None:
    assert asked(knob=["max_crops"]).axes == {"max_crops": None}
    assert asked(knob=["max_crops=2-4", "max_new_tokens=8,16"]).axes == {
        "max_crops": ("2", "3", "4"),
        "max_new_tokens": ("8", "16"),
    }
    assert asked(knob=["max_crops"], values="2-13:5").axes == {"max_crops": ("2", "7", "12")}
    assert asked(knob={"max_crops": range(2, 4), "tokens": None}).axes == {"max_crops": (2, 3), "tokens": None}


@pytest.mark.parametrize(
    ("flags", "values", "says"),
    [
        (["max_crops="], None, "whole range"),
        (["=4"], None, "whole range"),
        (["a=1", "a=2"], None, "twice"),
        (["max_crops=,"], None, "names no value"),
        (["max_crops=5-2"], None, "empty"),
        (["a", "b"], "2-3", "goes with one knob"),
        (["a=4"], "2-3", "goes with one knob"),
    ],
)
def test_an_empty_list_is_refused(flags: list[str], values: str | None, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        asked(knob=flags, **({} if values is None else {"values": values}))


def test_the_first_guess_follows_the_rule_of_thumb() -> None:
    assert [scale_for(SEED_SCALE, crops) for crops in (1, 4, 5, 8, 9, 12, 13, 40)] == [
        1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.4, 0.4,
    ]  # fmt: skip
    assert scale_for(SEED_SCALE, None) == scale_for(SEED_SCALE, "bfloat16") == 1.0
    assert asked(initial_scale="4=1,8=0.75,12=0.5,0.4").initial_scale == SEED_SCALE
    assert scale_for(asked(initial_scale="6=0.9").initial_scale, 100) == 0.9


@pytest.mark.parametrize("text", ["", "8=0.5,4=1", "4=2", "0.4,8=1", "4=x"])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="initial_scale="):
        asked(initial_scale=text)


def test_sizes_by_hand_name_a_point() -> None:
    sizes = asked(batch_size_for=["13=24", "max_crops=13,max_new_tokens=8=24"]).batch_size_for
    assert sizes == (({"": "13"}, 24), ({"max_crops": "13", "max_new_tokens": "8"}, 24))
    assert asked(batch_size_for={13: 24}).batch_size_for == (({"": "13"}, 24),)
    for text in ("13", "13=0", "=24", "13=many"):
        with pytest.raises(RequestError, match="batch_size_for="):
            asked(batch_size_for=[text])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"axes": {}}, "knob= is missing"),
        ({"order": "sideways"}, "order="),
        ({"sample": "lhs"}, "num_points="),
        ({"within": 1.5}, "within="),
        ({"latency_samples": -1}, "latency_samples="),
        ({"target_latency_ms": 0.0}, "target_latency_ms="),
        ({"batch_size_for": (({"": "2"}, 0),)}, "from 1"),
    ],
)
def test_a_wrong_request_says_which_flag(tmp_path: Path, more: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        request(tmp_path, **more)
