"""The child's end of `ChildProcess`: `python -m brim.running.child_main MODULE:FUNCTION`, JSON lines in and out.

The function serves the parent: it is given the requests as they arrive and a way to send messages, and may return an
exit code. Standard output belongs to the messages; whatever is printed goes to standard error, and standard input is
empty for everyone else. The process ends at once when its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from brim.errors import BrimError, RequestError

__all__ = ["INTERRUPTED", "PARENT_GONE", "Send", "Serve", "serve_parent"]

INTERRUPTED = 130
PARENT_GONE = 86  # nobody is there to read it

Send = Callable[[Mapping[str, Any] | Exception], None]  # an exception is raised again by the parent, as its kind
Serve = Callable[[Iterator[dict[str, Any]], Send], int | None]


def serve_parent(serve: Serve) -> int:
    """Serve the process that started this one; gives the exit code. An error that escapes is sent as it is."""
    _die_with_parent()
    requests, send = _requests(), _sender()
    try:
        return serve(requests, send) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrimError as error:
        print(f"brim: {error}", file=sys.stderr)
        send(error)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        send(error)
        return RequestError.exit_code


def _requests() -> Iterator[dict[str, Any]]:
    """What the parent sends, read by a thread of its own: the end of the input ends the process, busy or not."""
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), "rb", buffering=0)  # without a lock that the end of the interpreter would wait for
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def read() -> None:
        for line in source:
            received.put(json.loads(line))
        os._exit(PARENT_GONE)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return iter(received.get, None)


def _sender() -> Send:
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: Mapping[str, Any] | Exception) -> None:
        if isinstance(message, Exception):
            message = {"error": _error_values(message)}
        with contextlib.suppress(BrokenPipeError):  # the parent is gone: this process is about to end as well
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    return send


def _error_values(error: Exception) -> dict[str, Any]:
    if isinstance(error, BrimError):
        return {"message": str(error), "exit_code": error.exit_code}
    return {"message": f"{type(error).__name__}: {error}", "exit_code": RequestError.exit_code}


def _die_with_parent() -> None:
    """On Linux the kernel ends this process with its parent, even where Python does not get to read the input's end."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def _named(requests: Iterator[dict[str, Any]], send: Send) -> int | None:
    """Serve with the function that the command line names."""
    module, _, function = sys.argv[1].partition(":")
    serve: Serve = getattr(importlib.import_module(module), function)
    return serve(requests, send)


if __name__ == "__main__":
    sys.exit(serve_parent(_named))
