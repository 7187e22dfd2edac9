"""Settings of a search are checked once, and what is wrong is said with its name, its value and a fix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from brim.errors import RequestError
from brim.settings.find_settings import DEFAULT_MAX_SIZE, SearchSettings


def test_the_defaults_are_those_of_the_interface() -> None:
    settings = SearchSettings()
    assert (settings.batch_size, settings.objective, settings.tolerance) == (None, "fastest", 0.02)
    assert settings.max_size == DEFAULT_MAX_SIZE
    assert settings.use_cache
    assert not settings.fixed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"objective": "biggest"}, "objective='biggest': it must be one of fastest, largest"),
        ({"batch_size": 0}, "batch_size=0: it must be auto or a whole number from 1 to 2147483647"),
        ({"batch_size": 2**31}, "batch_size=2147483648: it must be auto or a whole number from 1 to"),
        ({"max_size": 10**30}, "max_batch_size=1000000000000000000000000000000: it must be a whole number from 1 to"),
        ({"batch_size": -4}, "batch_size=-4"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"fixed": True}, "no_auto_batch_size= needs batch_size=N"),
        ({"memory_limit_bytes": 0}, "memory_limit=0"),
        ({"margin": 1.0}, "margin=1.0: it must be a fraction"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"tolerance": 1.5}, "tolerance=1.5"),
        ({"tolerance": -1}, "tolerance=-1"),
        ({"max_probes": 0}, "max_probes=0"),
        ({"probe_timeout_seconds": 0}, "probe_timeout=0"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"max_size": 0}, "max_batch_size=0"),
        ({"power_of_two": True, "multiple_of": 6}, "multiple_of=6: with power_of_two="),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_a_fix(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SearchSettings(**wrong)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["margin", "tolerance", "probe_timeout_seconds"])
def test_not_a_number_is_refused(name: str) -> None:
    with pytest.raises(RequestError):
        SearchSettings(**{name: float("nan")})


@pytest.mark.parametrize(
    "right",
    [
        {"batch_size": 1, "fixed": True, "fail_on_oom": True},
        {"margin": 0},
        {"margin": 0.5, "tolerance": 0},
        {"power_of_two": True, "multiple_of": 8},
        {"probe_timeout_seconds": 0.5, "max_probes": 1},
    ],
)
def test_the_edges_are_allowed(right: dict[str, Any]) -> None:
    settings = SearchSettings(**right)
    assert {name: getattr(settings, name) for name in right} == right


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SearchSettings().batch_size = 4
