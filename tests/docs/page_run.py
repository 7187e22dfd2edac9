"""Runs a page: its files written, its commands and Python blocks run in one folder, what is wrong listed.

Commands run in bash, with `brim` and `python` from `command_server.py`; the working folder and exported variables last
from one command to the next. A block that needs other hardware is only checked: flags and values must be accepted.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.docs import command_server, setups
from tests.docs.blocks import ROOT, Block, Page
from tests.docs.checked_commands import check_command, is_checked_only
from tests.docs.compared import difference

SECONDS = 120  # for one command
ASKED_FOR = ("?",)  # in place of output: `refresh` writes it


class Result(NamedTuple):
    """What one command or Python block printed, and what is wrong with it."""

    line: int  # of the command or block
    output_line: int  # where its output stands on the page
    expected: tuple[str, ...]
    printed: tuple[str, ...]
    problem: str
    indent: str = ""


class Server:
    """The process that forks for commands, and the folder with the programs that ask it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="brim-docs-")
        folder = Path(self._folder.name)
        self.socket = str(folder / "socket")
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("brim", "python"):
            program = self.programs / name
            source = Path(command_server.__file__).read_text(encoding="utf-8")
            program.write_text(f"#!{sys.executable} -SE\n{source}", encoding="utf-8")
            program.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, command_server.__file__, self.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT, env=plain_environment(folder, folder),
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the process that runs the commands of pages did not start")

    def close(self) -> None:
        """End it, and with it every command that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        self._folder.cleanup()


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """One for all pages."""
    made = Server()
    try:
        yield made
    finally:
        made.close()


def plain_environment(folder: Path, programs: Path) -> dict[str, str]:
    """No GPU, no network, one thread, 80 columns, no colours, and no folder of the user's."""
    home = folder.parent / f"{folder.name}-home"
    return {
        "PATH": os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "XDG_STATE_HOME": str(home / "state"),
        "TMPDIR": tempfile.gettempdir(), "LANG": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "80",
        "LINES": "24", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
    }  # fmt: skip


class PageRun:
    """One page in its folder."""

    def __init__(self, page: Page, folder: Path, server: Server) -> None:
        self._page = page
        self._folder = folder
        self._server = server
        self._environment = plain_environment(folder, server.programs) | {"BRIM_TEST_SERVER": server.socket}
        self._state = folder.parent / f"{folder.name}-shell"  # what `cd` and `export` left
        self._session: _Session | None = None
        for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
            Path(self._environment[name]).mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> Iterator[Result]:
        """Block after block; a result for each command and Python block."""
        for name in self._page.setups:
            getattr(setups, name)(self._folder)
        blocks = self._page.blocks
        try:
            for block, after in zip(blocks, (*blocks[1:], None), strict=True):
                if block.file:
                    path = self._folder / block.file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("".join(f"{line}\n" for line in block.lines), encoding="utf-8")
                elif block.language in ("console", "bash"):
                    yield from self._run_commands(block)
                elif block.language == "python":
                    yield self._run_python(block, after)
        finally:
            if self._session:
                self._session.close()

    def _run_commands(self, block: Block) -> Iterator[Result]:
        commands = block.commands()
        if block.run and len(commands) != 1:
            raise ValueError(f"{self._page.name}:{block.line}: 'run' stands before a block of one command")
        for place, command in enumerate(commands):
            if block.parse or is_checked_only(command.text):
                yield Result(command.line, 0, (), (), self._check(command.text))
                continue
            problem = ""
            if block.run:
                problem = self._check(command.text)
            code, printed = self._bash(block.run or command.text)
            wanted = block.exit if place == len(commands) - 1 else 0
            if code != wanted:
                shown = "\n".join(printed[-20:])
                problem = problem or f"exit status {code}, not {wanted}; it printed\n{shown}"
            elif command.output and block.language == "console":
                problem = problem or difference(command.output, printed)
            yield Result(command.line, command.output_line, command.output, printed, problem, block.indent)

    def _run_python(self, block: Block, after: Block | None) -> Result:
        if block.parse:
            ast.parse("\n".join(block.lines), f"{self._page.name}:{block.line}")
            return Result(block.line, 0, (), (), "")
        self._session = self._session or _Session(self._folder, self._server, self._environment)
        error, printed = self._session.run("\n" * (block.line - 1) + "\n".join(block.lines), self._page.name)
        printed = self._plain(printed)
        if error:
            return Result(block.line, 0, (), printed, error)
        if after is None or after.language != "text" or not after.follows:
            return Result(block.line, 0, (), printed, "")
        return Result(block.line, after.line, after.lines, printed, difference(after.lines, printed), after.indent)

    def _check(self, text: str) -> str:
        with contextlib.chdir(self._folder):  # where the files of the page are
            return check_command(text)

    def _bash(self, text: str) -> tuple[int, tuple[str, ...]]:
        state = shlex.quote(str(self._state))
        script = (
            f"[ -e {state} ] && . {state}\n{text}\ncode=$?\n"
            f"{{ printf 'cd %q\\n' \"$PWD\"; export -p; }} > {state}\nexit $code\n"
        )
        with tempfile.TemporaryFile() as file:
            process = subprocess.Popen(
                ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self._folder,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = 124
            file.seek(0)
            return code, self._plain(file.read().decode("utf-8", "replace"))

    def _plain(self, text: str) -> tuple[str, ...]:
        """Lines without the name of the scratch folder, which a page cannot know."""
        for folder in (self._folder, self._folder.resolve()):
            text = text.replace(f"{folder}-home", "…").replace(str(folder), "…")
        return tuple(line.rstrip() for line in text.splitlines())


class _Session:
    """Python blocks of one page, in one process."""

    def __init__(self, folder: Path, server: Server, environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the session
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        files = (requests, self._output.fileno(), self._errors.fileno(), answers)
        self._connection = command_server.ask(server.socket, "session", [], files, environment, str(folder))
        command_server.receive(self._connection)  # the files are there
        for file in (requests, answers):
            os.close(file)
        self._reader = os.fdopen(self._answers)

    def run(self, code: str, name: str) -> tuple[str, str]:
        """An error with its traceback, if there was one; what was printed."""
        start = os.fstat(self._output.fileno()).st_size
        os.write(self._requests, (json.dumps({"code": code, "name": name}) + "\n").encode())
        answer: dict[str, Any] = json.loads(self._reader.readline() or '{"error": "the process ended"}')
        printed = os.pread(self._output.fileno(), 1 << 24, start).decode("utf-8", "replace")
        return answer["error"], printed

    def close(self) -> None:
        os.close(self._requests)
        self._reader.close()
        command_server.receive(self._connection)
        self._connection.close()
        self._output.close()
        self._errors.close()
