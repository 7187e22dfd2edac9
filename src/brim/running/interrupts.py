"""Ctrl-C that is not lost: Python drops one that arrives while a destructor or a weak reference's callback runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Self

__all__ = ["InterruptWatch"]


class InterruptWatch:
    """While open, an interrupt is raised as always, and once more at the next `check` if it went unnoticed.

    Outside the main thread, or where somebody else handles the signal, nothing is changed.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._ours = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        self._ours = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise the interrupt that was lost, if there was one."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        self._pressed = True
        raise KeyboardInterrupt
