"""What any child process does: answers, raises, prints, is killed, hangs, is interrupted, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.running.child_main import INTERRUPTED, PARENT_GONE
from brim.running.child_process import ChildLostError, ChildProcess, child_command, wait_for_messages

SECONDS = 60.0  # for an answer that comes at once, on a busy machine

# Serves whatever a request names.
SERVER = """
import os, signal, subprocess, sys, time
from brim.errors import DoesNotFitError, LostError, RequestError

KINDS = {"request": RequestError, "memory": DoesNotFitError, "lost": LostError, "own": KeyError}

def serve(requests, send):
    for request in requests:
        what = request["do"]
        if what == "echo":
            send({"echo": request["value"]})
        elif what == "noise":
            print("a line on standard output", flush=True)
            os.system("echo and one from a child of the child")
            send({"input": sys.stdin.read()})
        elif what == "send_error":
            send(KINDS[request["kind"]]("no such width: 7"))
        elif what == "raise":
            raise KINDS[request["kind"]]("no such width: 7")
        elif what == "signal":
            print("about to end", file=sys.stderr, flush=True)
            os.kill(os.getpid(), request["number"])
            time.sleep(60)
        elif what == "children":
            child = subprocess.Popen(["sleep", "600"])
            send({"child": child.pid})
        elif what == "fork_and_die":
            if os.fork() == 0:
                time.sleep(40)
            os._exit(7)
        elif what == "hang":
            send({"hanging": True})
            time.sleep(600)
        elif what == "exit":
            return request["code"]
        elif what == "events":
            for place in range(request["count"]):
                send({"place": place})
"""

Start = Callable[..., ChildProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "served.py").write_text(SERVER, encoding="utf-8")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    started: list[ChildProcess] = []

    def begin(function: str = "served:serve", **settings: Any) -> ChildProcess:
        started.append(ChildProcess(child_command(function), name="the child", **settings))
        return started[-1]

    yield begin
    for child in started:
        child.end()


def gone(pid: int) -> bool:
    try:
        psutil.wait_procs([psutil.Process(pid)], timeout=10)
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_answers_one_request_after_the_other_and_ends_when_asked(start: Start) -> None:
    child = start()
    for value in (1, "zwei ✓", {"three": [None, 3.5]}):
        assert child.ask({"do": "echo", "value": value}, seconds=SECONDS) == {"echo": value}
    assert child.running
    child.end()
    assert not child.running
    assert gone(child.pid)


def test_printed_text_is_not_an_answer_and_stdin_is_empty_for_user_code(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("an earlier process\n")
    child = start(log=log)
    assert child.ask({"do": "noise"}, seconds=SECONDS) == {"input": ""}
    assert child.ask({"do": "echo", "value": 2}, seconds=SECONDS) == {"echo": 2}
    printed = ["an earlier process", "a line on standard output", "and one from a child of the child"]
    assert log.read_text().splitlines() == printed


@pytest.mark.parametrize(
    ("kind", "error"), [("request", RequestError), ("memory", DoesNotFitError), ("lost", LostError)]
)
def test_a_sent_error_is_raised_as_its_kind_and_keeps_the_child(
    start: Start, kind: str, error: type[BrimError]
) -> None:
    child = start()
    with pytest.raises(error, match=r"^no such width: 7$"):
        child.ask({"do": "send_error", "kind": kind}, seconds=SECONDS)
    assert child.ask({"do": "echo", "value": 1}, seconds=SECONDS) == {"echo": 1}


@pytest.mark.parametrize(("kind", "error"), [("memory", DoesNotFitError), ("own", RequestError)])
def test_an_error_that_escapes_is_raised_as_its_kind_and_is_the_exit_code(
    start: Start, kind: str, error: type[BrimError]
) -> None:
    child = start()
    with pytest.raises(error, match="no such width: 7"):
        child.ask({"do": "raise", "kind": kind}, seconds=SECONDS)
    with pytest.raises(ChildLostError, match="no such width: 7") as caught:
        child.ask({"do": "echo", "value": 1}, seconds=SECONDS)
    assert caught.value.ending.code == error.exit_code


def test_a_function_that_does_not_exist_is_an_error_and_not_a_silence(start: Start) -> None:
    with pytest.raises(RequestError, match="no attribute 'unserved'"):
        start("served:unserved").ask({}, seconds=SECONDS)


@pytest.mark.parametrize(
    ("number", "kind", "reason"),
    [
        (signal.SIGKILL, "out_of_memory", "killed by signal 9"),
        (signal.SIGSEGV, "killed", "segmentation fault"),
        (signal.SIGABRT, "killed", "aborted"),
        (signal.SIGTERM, "killed", "killed by signal 15"),
    ],
)
def test_a_kill_or_crash_is_reported_with_the_last_output(start: Start, number: int, kind: str, reason: str) -> None:
    with pytest.raises(
        ChildLostError, match=rf"^the child was lost: .*{reason}.*; it last wrote: about to end$"
    ) as caught:
        start().ask({"do": "signal", "number": number}, seconds=SECONDS)
    assert (caught.value.ending.code, caught.value.ending.kind) == (-number, kind)


def test_last_lines_are_its_own_and_not_those_of_an_earlier_process(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("an earlier process\n")
    with pytest.raises(ChildLostError) as caught:
        start(log=log).ask({"do": "exit", "code": 5}, seconds=SECONDS)
    assert (caught.value.ending.code, caught.value.ending.reason) == (5, "the process ended with exit code 5")


def test_a_hang_is_a_timeout_and_ends_with_the_child_and_its_children(start: Start) -> None:
    child = start()
    grandchild = child.ask({"do": "children"}, seconds=SECONDS)["child"]
    assert child.ask({"do": "hang"}, seconds=SECONDS) == {"hanging": True}
    with pytest.raises(ChildLostError, match=r"no answer within 0\.2 s") as caught:
        child.ask({"do": "echo", "value": 1}, seconds=0.2)
    assert caught.value.ending.kind == "timeout", "it was ended from here, not by the host"
    assert gone(child.pid)
    assert gone(grandchild)


def test_a_death_is_noticed_although_a_child_of_it_holds_its_output_open(start: Start) -> None:
    began = time.monotonic()
    with pytest.raises(ChildLostError, match="exit code 7"):
        start().ask({"do": "fork_and_die"}, seconds=SECONDS)
    assert time.monotonic() - began < 30


def test_events_are_read_without_waiting_for_the_end_of_output(start: Start) -> None:
    child = start()
    child.send({"do": "events", "count": 10_000})
    child.send({"do": "exit", "code": 0})
    heard = []
    while not child.silent:
        wait_for_messages([child], 1.0)
        heard += [message["place"] for message in child.messages()]
    assert heard == list(range(10_000))


def test_what_was_sent_before_the_end_can_be_read_after_it(start: Start) -> None:
    child = start()
    child.send({"do": "events", "count": 3})
    child.send({"do": "exit", "code": 0})
    while child.running:
        time.sleep(0.02)
    child.end()
    assert [message["place"] for message in child.messages()] == [0, 1, 2]


def test_lines_that_are_no_messages_are_left_out(tmp_path: Path) -> None:
    script = "import sys; sys.stdin.readline(); print('noise\\n[1]\\n{\"answer\": 1}', flush=True)"
    child = ChildProcess([sys.executable, "-c", script], name="the child")
    assert child.ask({}, seconds=SECONDS) == {"answer": 1}
    child.end()


def test_an_interrupt_ends_it_with_the_code_of_one(start: Start) -> None:
    child = start()
    child.ask({"do": "hang"}, seconds=SECONDS)
    child.interrupt()
    while child.running:
        time.sleep(0.02)
    assert child.end().code == INTERRUPTED


PARENT = """
import sys, time
from brim.running.child_process import ChildProcess, child_command
child = ChildProcess(child_command("served:serve"), name="the child")
child.ask({"do": "hang"}, seconds=60)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("start")
def test_it_ends_with_its_parent_even_one_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.communicate()
    assert gone(pid)


def test_the_end_of_its_input_ends_a_busy_child_where_the_kernel_does_not(start: Start) -> None:
    child = start()
    child.ask({"do": "hang"}, seconds=SECONDS)
    assert child._process.stdin is not None
    child._process.stdin.close()
    assert child._process.wait(10) == PARENT_GONE
