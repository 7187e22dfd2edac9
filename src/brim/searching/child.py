"""The other end of `IsolatedProber`: `python -m brim.searching.child`, JSON lines in and out.

Standard output belongs to the protocol; whatever the workload prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
from typing import Any, TextIO

from brim.errors import BrimError, LostError, RequestError

__all__ = ["main"]


def main() -> None:
    """Build the workload named in the first line, then probe every size asked for until the input ends."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    try:
        _serve(request, answers)
    except BrimError as error:
        _answer(answers, {"error": {"message": str(error), "exit_code": error.exit_code}})
    except Exception as error:
        from brim.memory.weights import load_failure

        full = load_failure(error, None, what="outside of any batch")
        if full is not None:
            _answer(answers, {"error": {"message": str(full), "exit_code": full.exit_code}})
            return
        message = f"building the workload raised {type(error).__name__}: {error}"
        _answer(answers, {"error": {"message": message, "exit_code": RequestError.exit_code}})


def _serve(request: dict[str, Any], answers: TextIO) -> None:
    from brim.searching.probe import DeviceProber, ProbeSettings

    module, _, function = request["factory"].partition(":")
    workload = getattr(importlib.import_module(module), function)(request["data"])
    with DeviceProber(workload, ProbeSettings(**request["settings"]), preserve_state=False) as prober:
        _answer(answers, {"context": dataclasses.asdict(prober.context)})
        for line in sys.stdin:
            try:
                probe = prober.probe(json.loads(line)["size"])
            except LostError as error:
                _answer(answers, {"fatal": str(error.__cause__ or error).splitlines()[0]})
                os._exit(LostError.exit_code)  # the device is unusable: even tearing down could hang
            except BrimError:
                raise
            except Exception as error:  # the workload's own, at this size; another size may run
                message = f"{prober.stage} raised {type(error).__name__}: {error}"
                answer = {"message": message, "exit_code": RequestError.exit_code, "by_workload": True}
                _answer(answers, {"error": answer})
                continue
            _answer(answers, {"probe": probe.to_json()})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _die_with_parent() -> None:
    """On Linux, have the kernel end this process when its parent is killed, so that no GPU stays occupied."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
