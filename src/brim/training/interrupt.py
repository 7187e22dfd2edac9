"""Ctrl-C during training: the step under way is finished and a checkpoint written, then the run ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["Interrupt", "interrupt_as_request"]


class Interrupt:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Where there is nothing to finish: stop here if asked."""
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_as_request(tell: Callable[[str], None]) -> Iterator[Interrupt]:
    """While inside, the first Ctrl-C only asks; the second one stops at once.

    Outside the main thread, or where somebody else handles the signal, nothing is changed.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupt
        return

    def handle(number: int, frame: object) -> None:
        del number, frame
        interrupt.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tell("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
