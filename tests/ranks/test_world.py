"""Who this process is: torchrun's variables, nothing at all, or nonsense."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from brim.errors import RequestError
from brim.ranks.world import World, current_world

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0)),
        ({"RANK": "3"}, World(0, 1, 0)),
        ({"WORLD_SIZE": "1"}, World(0, 1, 0)),
        ({"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}, World(5, 8, 1)),
        ({"WORLD_SIZE": "8", "RANK": "5"}, World(5, 8, 5)),
    ],
)
def test_world_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], world: World
) -> None:
    set_environment(monkeypatch, **environment)
    assert current_world() == world


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "ranks go from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_a_bad_environment_is_a_wrong_request(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    set_environment(monkeypatch, **environment)
    with pytest.raises(RequestError, match=message):
        current_world()


def test_asking_does_not_import_torch() -> None:
    code = (
        "import sys; from brim.ranks.world import current_world; from brim.ranks.agreement import Agreement\n"
        "with Agreement() as agreement:\n"
        "    with agreement.step(int) as step: step.value = 1\n"
        "    assert step.values == [1]\n"
        "assert current_world().size == 1 and 'torch' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
