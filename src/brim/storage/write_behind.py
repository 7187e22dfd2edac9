"""Writing that happens behind the work of its caller: one job at a time, in a thread, in the order given.

    writer = WriteBehind()
    writer.start(write)      # waits for the job before it, and raises what that one raised
    ...                      # work continues while `write` runs
    writer.failure()         # the error of a job that has ended, without waiting; None where there is none
    writer.wait()            # until nothing is being written; raises as `start` does

An error is raised once. Does not know what is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WriteBehind"]


class WriteBehind:
    """At most one job under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job behind the caller, once the job before it is done."""
        self.wait()
        thread = threading.Thread(target=self._run, args=(job,), name="brim-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            job()
            return
        self._thread = thread

    def wait(self) -> None:
        """Wait for the job under way; raises the error that it, or the one before, ended with."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait for the job under way; its error is kept for `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> Exception | None:
        """The error of a job that has ended, which counts as raised from here on; does not wait."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        error, self._error = self._error, None
        if error is None or isinstance(error, Exception):
            return error
        raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
