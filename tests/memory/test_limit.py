"""Where a memory limit comes from: what was asked for, what is there, and the margin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.memory.devices import DEFAULT_MARGIN, DeviceMemory, resolve_limit

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

GIB = 2**30


class Card(DeviceMemory):
    """A card of 24 GiB of which some is free."""

    def __init__(self, available: int = 20 * GIB) -> None:
        super().__init__(torch.device("cuda", 0))
        self.available = available

    def total_bytes(self) -> int:
        return 24 * GIB

    def available_bytes(self) -> int:
        return self.available

    def limited(self, limit_bytes: int) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def metered(self, resident: Iterable[torch.Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError

    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        raise NotImplementedError

    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        raise NotImplementedError


def test_without_a_limit_what_is_free_is_used_less_a_margin() -> None:
    limit = resolve_limit(Card(), asked_bytes=None, margin=None)
    assert limit.usable_bytes == int(20 * GIB * (1 - DEFAULT_MARGIN))
    assert (limit.margin, limit.explicit) == (0.05, False)


def test_a_limit_asked_for_is_taken_at_its_word() -> None:
    limit = resolve_limit(Card(), asked_bytes=10 * GIB, margin=None)
    assert (limit.usable_bytes, limit.margin, limit.explicit) == (10 * GIB, 0.0, True)


@pytest.mark.parametrize(("asked", "usable"), [(None, 15 * GIB), (8 * GIB, 6 * GIB)])
def test_a_margin_asked_for_is_taken_off(asked: int | None, usable: int) -> None:
    assert resolve_limit(Card(), asked_bytes=asked, margin=0.25).usable_bytes == usable


def test_a_limit_above_what_is_free_shrinks_to_it() -> None:
    assert resolve_limit(Card(available=4 * GIB), asked_bytes=10 * GIB, margin=None).usable_bytes == 4 * GIB


def test_a_limit_above_the_card_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"--memory-limit 25.0 GiB: cuda:0 has 24.0 GiB; give a smaller limit"):
        resolve_limit(Card(), asked_bytes=25 * GIB, margin=None)
    assert resolve_limit(Card(available=24 * GIB), asked_bytes=24 * GIB, margin=None).usable_bytes == 24 * GIB
