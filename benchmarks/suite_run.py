"""Runs the commands of one benchmark in processes of their own, with a time limit, and reads what they printed.

A command that fails or takes too long becomes a result, not an error. Its processes are in a session of their own, so
that ending it ends what it has started too, and Ctrl-C reaches only `python -m benchmarks`, which then ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import Benchmark
from benchmarks.tables import measured_ratios, read_tables

__all__ = ["ROOT", "Run", "run_benchmark", "timed_out"]

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 3  # between asking a process to end and ending it
PLACES = ("CHECKOUT", "WHEEL", "OUT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How the benchmarks of a call are run."""

    mode: str
    out: Path  # for logs and files of the benchmarks
    places: Mapping[str, str]  # what stands for CHECKOUT and WHEEL
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # on top of this process's own

    def words(self, command: str) -> list[str]:
        """A command of the suite as arguments of Python, with its places filled in."""
        module, *arguments = shlex.split(command)
        known = {**self.places, "OUT": str(self.out)}
        return ["-m", f"benchmarks.{module}", *(_placed(word, known) for word in arguments)]

    def text(self, command: str) -> str:
        """What a reader types to repeat it."""
        settings = "".join(f"{name}={value} " for name, value in self.environment.items())
        return f"{settings}python {shlex.join(self.words(command))}"


def run_benchmark(benchmark: Benchmark, run: Run, *, limit_seconds: float) -> dict[str, Any]:
    """All commands of a benchmark, one after the other; gives its result as JSON has it.

    KeyboardInterrupt ends the process at work and is raised again.
    """
    logs = run.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    printed, failure = "", ""
    commands = benchmark.commands(run.mode)
    rows: list[Any] = []
    for number, command in enumerate(commands):
        name = benchmark.name if len(commands) == 1 else f"{benchmark.name}-{number + 1}"
        words, results = _with_json(run.words(command), logs / f"{name}.json")
        left = limit_seconds - (time.monotonic() - started)
        failure = _run(words, logs / name, run.environment, left, limit_seconds)
        printed += (logs / f"{name}.out").read_text(encoding="utf-8", errors="replace") + "\n"
        rows += _rows(results)
        if failure:
            break
    tables = read_tables(printed)
    small = run.mode == "cpu"
    ratios = measured_ratios([ratio for ratio in benchmark.ratios if ratio.small or not small], tables)
    return {
        "status": "failed" if failure else "done",
        "reason": failure,
        "seconds": time.monotonic() - started,
        "ratios": ratios,
        "tables": [dataclasses.asdict(table) for table in tables],
        "rows": rows or [row for table in tables for row in table.rows],
        "logs": [f"logs/{path.name}" for path in sorted(logs.glob(f"{benchmark.name}*.err"))],
    }


def timed_out(limit_seconds: float) -> str:
    """The reason of a benchmark that was ended."""
    return f"ended after {limit_seconds:.0f} s"


def _placed(word: str, known: Mapping[str, str]) -> str:
    for place in PLACES:
        if word == place or word.startswith(f"{place}/"):
            return known[place] + word[len(place) :]
    return word


def _with_json(words: list[str], file: Path) -> tuple[list[str], Path]:
    """The command with `--json FILE`, if its module has that, and where its rows will be."""
    file.unlink(missing_ok=True)
    if "--json" in words:
        return words, Path(words[words.index("--json") + 1])
    if "--save" in words:
        return words, Path(words[words.index("--save") + 1])
    source = ROOT / (words[1].replace(".", "/") + ".py")
    takes_it = source.is_file() and '"--json"' in source.read_text(encoding="utf-8")
    return ([*words, "--json", str(file)] if takes_it else words), file


def _rows(file: Path) -> list[Any]:
    """The rows that a benchmark has written; what has no rows counts as one."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # it has none, or was ended while it wrote them
    if not isinstance(document, dict):
        return list(document)
    kept = {name: value for name, value in document.items() if name not in ("environment", "arguments", "schema")}
    rows = kept.get("rows")
    return rows if isinstance(rows, list) else [kept]


def _run(words: Sequence[str], log: Path, settings: Mapping[str, str], seconds: float, limit_seconds: float) -> str:
    """One command; gives why it failed, or nothing."""
    environment = {**os.environ, **settings, "PYTHONUNBUFFERED": "1"}
    with log.with_suffix(".out").open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            return timed_out(limit_seconds)
        finally:
            _end(process)
    return "" if code == 0 else f"exit {code}: {_last_line(log.with_suffix('.err'))}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a session: the process itself, and what it has started."""
    try:
        if process.poll() is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
    finally:  # also after a second Ctrl-C
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        os.killpg(group, number)


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed no error"
