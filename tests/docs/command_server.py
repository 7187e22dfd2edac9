"""A process that has imported torch once and forks for every `brim` or `python` command of a page.

A command that imports torch anew takes seconds; a fork of this process takes none, and is a process of its own all the
same: its own folder, environment, output and exit code. The programs `brim` and `python` that pages see are links to
this file, which pass their arguments, environment and open files on to the server and wait for the exit code.

    python command_server.py SOCKET      serve
    brim find …                          (a link to this file) ask the server of $BRIM_TEST_SERVER

Only the standard library is imported before the server loads torch, so that asking takes milliseconds.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def send(connection, message, files=()):
    """One message with open files: four bytes of length, then JSON."""
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([len(data).to_bytes(4, "big")], rights)
    connection.sendall(data)


def receive(connection):
    """A message and its open files; None when the other side has gone."""
    head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(4 * 4))
    if not head:
        return None, []
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    length, data = int.from_bytes(head, "big"), b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return json.loads(data), list(files)


def ask(path, program, arguments, files=(0, 1, 2), environment=None, folder=None):
    """Start a command; the connection has the number of its process first and its exit code last."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {
        "program": program, "arguments": arguments, "folder": folder or os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ) if environment is None else environment,
    }  # fmt: skip
    send(connection, request, files)
    return connection


def main_of_a_command():
    connection = ask(os.environ["BRIM_TEST_SERVER"], os.path.basename(sys.argv[0]), sys.argv[1:])  # noqa: PTH119
    started, _ = receive(connection)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(started["process"], number))
    ended, _ = receive(connection)
    sys.exit(1 if ended is None else ended["code"])


# The server.


def serve(path):
    """Fork for every connection until standard input, which the tests hold, is closed."""
    import gc
    import selectors
    import warnings

    preload()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    gc.collect()
    gc.freeze()  # every probe collects garbage: what is loaded is set aside
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    ended, wakeup = os.pipe()
    for end in (ended, wakeup):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup)
    waiting = {}  # connections by process
    selector = selectors.DefaultSelector()
    for source in (listener, sys.stdin, ended):
        selector.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for process in waiting:
                    end_group(process)
                os._exit(0)  # there is nothing to take down, and libraries print what they would
            if key.fileobj is listener:
                connection, _ = listener.accept()
                process = start(connection, [listener, connection, *waiting.values()], wakeup)
                waiting[process] = connection
                selector.register(connection, selectors.EVENT_READ)
                send(connection, {"process": process})
            elif key.fileobj is ended:
                os.read(ended, 4096)
                for process, code in finished(waiting):
                    connection = waiting.pop(process)
                    with contextlib.suppress(OSError):
                        send(connection, {"code": code})
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    connection.close()
            else:  # the command that asked was killed
                selector.unregister(key.fileobj)
                for process, connection in waiting.items():
                    if connection is key.fileobj:
                        end_group(process)


def finished(processes):
    """Those that have ended, with exit codes as a shell has them."""
    for process in list(processes):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            yield process, code if code >= 0 else 128 - code


def end_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def preload():
    """What most commands import."""
    import importlib

    for name in (
        "torch",
        "torch.utils.data",
        "torchvision",
        "transformers",
        "rich.table",
        "rich.live",
        "altair",
        "yaml",
    ):
        importlib.import_module(name)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer  # noqa: F401

    import brim.cli.main
    from brim.settings.commands import COMMANDS

    brim.cli.main.app  # noqa: B018
    for name in COMMANDS:
        module = brim.cli.main._FUNCTIONS.get(name, name).partition(":")[0]
        with contextlib.suppress(ImportError):
            importlib.import_module(f"brim.cli.{module}")
    for name in (
        "planning.find",
        "planning.forecast",
        "evaluation.run",
        "profiling.run",
        "training.run",
        "reporting.write",
    ):
        importlib.import_module(f"brim.{name}")


def start(connection, sockets, wakeup):
    """Fork: the child becomes the command, with the files, folder and environment that came with the request."""
    request, files = receive(connection)
    process = os.fork()
    if process:
        for file in files:
            os.close(file)
        return process
    code = 70
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in sockets:
            one.close()
        os.close(wakeup)
        for place, file in enumerate(files[:3]):
            os.dup2(file, place)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        code = session(files[3]) if request["program"] == "session" else run(request["program"], request["arguments"])
    finally:
        leave(code)
    return None


def run(program, arguments):
    """As `python -m brim …` or `python …`, to an exit code."""
    import runpy
    import traceback

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    if program == "brim":
        arguments = ["-m", "brim", *arguments]
    else:
        sys.path.insert(0, "")
    try:
        if arguments[:1] == ["-m"]:
            sys.argv = ["", *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[:1] == ["-c"]:
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments and not arguments[0].startswith("-"):
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            os.execv(sys.executable, [sys.executable, *arguments])
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def session(answers):
    """Python blocks of a page, one after the other in one namespace: JSON lines in, one line per block out."""
    import linecache
    import traceback
    import types

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(answers, "w")
    sys.stdout.reconfigure(line_buffering=True)
    sys.path.insert(0, "")
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    for line in requests:
        block = json.loads(line)
        linecache.cache[block["name"]] = (len(block["code"]), None, block["code"].splitlines(True), block["name"])
        error = ""
        try:
            exec(compile(block["code"], block["name"], "exec"), module.__dict__)
        except BaseException:
            error = traceback.format_exc()
        sys.stdout.flush()
        print(json.dumps({"error": error}), file=answers, flush=True)
    return 0


def leave(code):
    """End as Python ends, except that what the server holds is not taken down."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if os.path.basename(sys.argv[0]) in ("brim", "python"):  # noqa: PTH119
        main_of_a_command()
    else:
        serve(sys.argv[1])
