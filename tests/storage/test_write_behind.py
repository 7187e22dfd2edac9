"""Jobs behind their caller: one at a time, in order, and no error lost."""

from __future__ import annotations

import threading

import pytest

from brim.storage.write_behind import WriteBehind


def test_the_caller_continues_while_a_job_runs_and_the_next_job_waits() -> None:
    writer, written, go = WriteBehind(), [], threading.Event()

    def slow() -> None:
        assert go.wait(60)
        written.append("first")

    writer.start(slow)
    assert written == []
    threading.Timer(0.05, go.set).start()
    writer.start(lambda: written.append("second"))
    writer.wait()
    assert written == ["first", "second"]


def failing() -> None:
    raise OSError(28, "No space left on device")


def test_an_error_is_raised_once_by_the_next_job_or_by_waiting() -> None:
    writer, written = WriteBehind(), []
    writer.start(failing)
    with pytest.raises(OSError, match="No space left"):
        writer.start(lambda: written.append("second"))
    assert written == []
    writer.start(failing)
    writer.settle()
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.wait()


def test_an_error_is_seen_without_waiting_once_its_job_has_ended() -> None:
    writer, go = WriteBehind(), threading.Event()

    def late() -> None:
        assert go.wait(60)
        failing()

    assert writer.failure() is None
    writer.start(late)
    assert writer.failure() is None  # it does not wait
    go.set()
    assert writer._thread is not None
    writer._thread.join()
    assert isinstance(writer.failure(), OSError)
    assert writer.failure() is None
    writer.wait()
