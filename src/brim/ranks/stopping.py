"""The signal with which a launcher stops the ranks, as an error that says why."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from brim.errors import RankError
from brim.ranks.agreement import Agreement

__all__ = ["stop_signal_as_error"]


class _Stopped(BaseException):
    """Not an `Exception`: what takes a sample's error for that sample's failure must not take this for one."""


@contextlib.contextmanager
def stop_signal_as_error(agreement: Agreement) -> Iterator[None]:
    """While inside, SIGTERM is a `RankError` that names the rank that was lost, as far as the agreement knows.

    torchrun sends it to every other rank as soon as one has ended. Alone, outside the main thread, or where somebody
    else handles the signal, nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if agreement.world.size == 1 or not ours:
        yield
        return
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    except _Stopped:
        raise _error(agreement) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: object) -> NoReturn:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what follows closes files
    raise _Stopped


def _error(agreement: Agreement) -> RankError:
    own = f"rank {agreement.world.rank} was stopped by the launcher (SIGTERM)"
    trouble = agreement.trouble()
    if trouble is None:
        return RankError(f"{own}, as torchrun does when a rank is lost; its report says which")
    return trouble.error(f"; {own}")
