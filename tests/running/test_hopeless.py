"""When nothing fits: the run says so after a few items instead of failing every single one."""

from __future__ import annotations

import pytest

from brim.running.executor import HOPELESS_AFTER, Executor, Finished
from brim.sizing.live import LiveSizer


def run(fits: int, *, stop_if_hopeless: bool) -> tuple[list[Finished], list[int], list[str]]:
    """Items cost their number; those above `fits` do not fit, even alone."""
    tried: list[int] = []
    told: list[str] = []

    def work(batch: list[int]) -> list[int]:
        tried.extend(batch)
        if max(batch) > fits:
            raise MemoryError
        return batch

    executor = Executor(
        work,
        list(range(50)),
        sizer=LiveSizer(first=50),
        tell=told.append,
        stop_if_hopeless=stop_if_hopeless,
    )
    done = [one for some in executor.run(range(50)) for one in some]
    return done, tried, told


def test_it_ends_after_the_dearest_and_the_cheapest() -> None:
    done, tried, told = run(-1, stop_if_hopeless=True)
    assert [one.item for one in done] == [49, 48, 47, 0]
    assert len(done) == HOPELESS_AFTER + 1
    assert all(one.failure is not None and one.failure.reason == "out_of_memory" for one in done)
    assert set(tried) == {49, 48, 47, 0}
    assert "not even the cheapest" in told[-1]


@pytest.mark.parametrize("fits", [0, 5])
def test_it_goes_on_when_the_cheapest_fits(fits: int) -> None:
    done, _, _ = run(fits, stop_if_hopeless=True)
    assert sorted(one.item for one in done) == list(range(50))
    assert sorted(one.item for one in done if one.failure is None) == list(range(fits + 1))


def test_unless_asked_every_item_is_tried() -> None:
    done, _, _ = run(-1, stop_if_hopeless=False)
    assert sorted(one.item for one in done) == list(range(50))
