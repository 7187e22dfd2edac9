"""An interrupt that Python has dropped is raised all the same."""

from __future__ import annotations

import os
import signal
import weakref

import pytest

from brim.running.executor import BatchWork, Executor
from brim.running.interrupts import InterruptWatch
from brim.sizing.live import LiveSizer


class Thing:
    pass


def lose_an_interrupt() -> None:
    """Ctrl-C while a weak reference's callback runs: Python prints it and goes on."""
    thing = Thing()
    kept = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing
    assert kept() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_ends_at_the_next_batch_after_an_interrupt_that_was_dropped() -> None:
    done: list[int] = []

    def function(items: list[int]) -> list[int]:
        if not done:
            lose_an_interrupt()
        done.extend(items)
        return items

    executor = Executor(BatchWork(launch=function, costs=[1] * 10), sizer=LiveSizer(first=2, ceiling=2, grows=False))
    with pytest.raises(KeyboardInterrupt):
        list(executor.run(range(10)))
    assert len(done) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_the_handler_is_restored() -> None:
    with InterruptWatch() as watch:
        watch.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone() -> None:
    def own(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, own)
    try:
        with InterruptWatch():
            assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
