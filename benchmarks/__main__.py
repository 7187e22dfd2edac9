"""Every table of docs/measurements from one command, against the peers that are installed.

    python -m benchmarks                       # on a CPU three minutes, small models; with a CUDA device its tables
    python -m benchmarks --list                # what there is, and which table each one is
    python -m benchmarks --only find train     # some of them
    python -m benchmarks --full                # the commands of docs/measurements as they stand
    python -m benchmarks --full --before runs/before --only before-after     # beside an older source tree of brim

Each benchmark runs in processes of its own, one after the other, with a time limit; one that fails is a row of the
results. DIR (build/benchmarks) gets MACHINE.json, with hardware, versions, peers and rows, and MACHINE.md, with ratios,
tables and commands; both are written after every benchmark, so that Ctrl-C keeps what is done. Benchmarks that a call
leaves out keep their results of an earlier one. Exit code: 0, or 1 if a benchmark failed, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from benchmarks.machine_page import describe, docs_from, missing_peers, page, ratio_text, versions_of
from benchmarks.suite import PEERS, SUITE, Benchmark
from benchmarks.suite_run import ROOT, Run, run_benchmark, timed_out
from brim.diagnosis.installed import is_older

SCHEMA = "brim.benchmarks/1"
CPU_SECONDS = 180  # for everything
LIMITS = {"cpu": 45.0, "card": 900.0, "full": 3600.0}  # for one benchmark
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # two threads on cores that others use too are timed by their neighbours
PLACE_FLAGS = {"CHECKOUT": ("--before", "an older source tree of brim"), "WHEEL": ("--molsets", "the wheel of molsets")}


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    arguments = _parse(argv)
    if arguments.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` ends quietly
        print(listing())
        return 0
    machine = _machine()
    mode = "full" if arguments.full else "card" if machine["gpu"] and not arguments.cpu else "cpu"
    threads = ONE_THREAD if mode == "cpu" and "OMP_NUM_THREADS" not in os.environ else {}
    run = Run(mode=mode, out=arguments.out.resolve(), places=_places(arguments), environment=threads)
    whole = arguments.within or (CPU_SECONDS if mode == "cpu" and not arguments.only else None)
    ends = None if whole is None else started + whole
    suite = Suite(run, machine, chosen=arguments.only, command=_own_command(argv))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        suite.run(arguments.seconds or LIMITS[mode], ends, whole)
    except KeyboardInterrupt:
        _say("stopped; what is done is kept")
        suite.write()
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
        _summary(suite)
    return 1 if any(entry["status"] == "failed" for entry in suite.made.values()) else 0


class Suite:
    """The benchmarks of one call, and the results of this machine so far."""

    def __init__(self, run: Run, machine: dict[str, Any], *, chosen: Sequence[str], command: str) -> None:
        self._run = run
        self.machine = machine
        self.command = command
        self.peers = installed()
        self.chosen = [one for one in SUITE if not chosen or one.name in chosen]
        self.made: dict[str, dict[str, Any]] = {}
        self.files = [run.out / f"{slug(describe(machine))}.{ending}" for ending in ("json", "md")]
        self._earlier = _earlier(self.files[0], run.mode)

    def run(self, limit_seconds: float, ends: float | None, whole: float | None) -> None:
        """Each in turn; `ends` is when the last one has to be done."""
        for number, benchmark in enumerate(self.chosen, 1):
            head = f"[{number}/{len(self.chosen)}] {benchmark.name}"
            left = limit_seconds if ends is None else min(limit_seconds, ends - time.monotonic())
            reason = self._not_run(benchmark)
            if not reason and ends is not None and left < benchmark.seconds(self._run.mode):
                reason = f"the {whole:.0f} s are spent: --only {benchmark.name}"
            if reason:
                self._keep(benchmark, {"status": "skipped", "reason": reason})
                _say(f"{head}: not run, {reason}")
                continue
            _say(f"{head}: {_about(benchmark, self._run.mode)}…")
            self._keep(benchmark, {"status": "stopped", "reason": "stopped while it ran"})
            result = run_benchmark(benchmark, self._run, limit_seconds=left)
            if result["reason"] == timed_out(left) and left < limit_seconds:
                result |= {"status": "skipped", "reason": f"the {whole:.0f} s were spent while it ran"}
            self._keep(benchmark, result)
            _say(f"{head}: {_outcome(result)}")
            self.write()
        self.write()

    def document(self) -> dict[str, Any]:
        """All that is known of this machine; what this call has not run is taken from the file."""
        entries = []
        for benchmark in SUITE:
            made, earlier = self.made.get(benchmark.name), self._earlier.get(benchmark.name)
            ran = made is not None and made["status"] in ("done", "failed")
            if (entry := made if ran or earlier is None else earlier) is not None:
                entries.append(entry)
        return {
            "schema": SCHEMA, "mode": self._run.mode, "command": self.command, "machine": self.machine,
            "peers": self.peers, "missing": missing_peers(self.peers), "benchmarks": entries,
        }  # fmt: skip

    def write(self) -> None:
        """Both files, whole or not at all."""
        document = self.document()
        docs = docs_from(self._run.out, ROOT / "docs" / "measurements")
        texts = (json.dumps(document, indent=1, default=str) + "\n", page(document, docs=docs))
        self._run.out.mkdir(parents=True, exist_ok=True)
        for file, text in zip(self.files, texts, strict=True):
            part = file.with_name(f"{file.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(file)

    def _keep(self, benchmark: Benchmark, result: Mapping[str, Any]) -> None:
        empty: dict[str, Any] = {"seconds": 0.0, "ratios": [], "tables": [], "rows": [], "logs": []}
        self.made[benchmark.name] = {
            "name": benchmark.name,
            "table": benchmark.table,
            "answers": benchmark.answers,
            "mode": self._run.mode,
            "started": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "versions": versions_of(self.machine),
            "commands": [] if result["status"] == "skipped" else [
                self._run.text(command) for command in benchmark.commands(self._run.mode)
            ],
            "missing_peers": [PEERS[name] for name in benchmark.peers if self.peers[name] is None],
            **empty,
            **result,
        }  # fmt: skip

    def _not_run(self, benchmark: Benchmark) -> str:
        """Why a benchmark cannot run here, or nothing."""
        mode, commands = self._run.mode, benchmark.commands(self._run.mode)
        if not self.machine["gpu"] and mode == "full" and benchmark.full_needs_card:
            return "needs a CUDA device"
        if not commands:
            return "needs a CUDA device" if benchmark.full_needs_card else "no small form: --full"
        missing = [text for need in benchmark.needs if (text := self._missing(need))]
        if missing:
            return f"needs {', '.join(missing)}: {shlex.join(['pip', 'install', *missing])}"
        words = {word for command in commands for word in shlex.split(command)}
        absent = [f"{what}: {flag} PATH" for place, (flag, what) in PLACE_FLAGS.items()
                  if place in words and place not in self._run.places]  # fmt: skip
        return f"needs {absent[0]}" if absent else ""

    def _missing(self, need: str) -> str:
        """What to install for a need such as `transformers>=5.22`; nothing if it is there."""
        name, at_least, least = need.partition(">=")
        version = self.peers[name]
        return "" if version is not None and not is_older(version, at_least + least) else PEERS[name] + at_least + least


def installed() -> dict[str, str | None]:
    """The version of every library that a benchmark needs or compares with; None: it is missing."""
    found: dict[str, str | None] = {}
    for name, requirement in PEERS.items():
        if name == "lightning" and util.find_spec(name) is None:
            name, requirement = "pytorch_lightning", "pytorch-lightning"  # the same finder, under its older name
        try:
            version = metadata.version(requirement) if util.find_spec(name) is not None else None
        except metadata.PackageNotFoundError:
            version = "unknown"  # a source tree
        found["lightning" if name == "pytorch_lightning" else name] = version
    return found


def listing() -> str:
    """Names, tables and commands, for a reader who chooses."""
    lines = []
    for one in SUITE:
        lines.append(f"{one.name}: {one.answers}\n  table  docs/measurements/{one.table}")
        if one.peers:
            lines.append(f"  peers  {', '.join(PEERS[name] for name in one.peers)}")
        for mode in ("cpu", "card"):
            if command := getattr(one, mode):
                lines.append(f"  {mode:<6} python -m benchmarks.{command}  (about {one.seconds(mode):.0f} s)")
        lines += [f"  full   python -m benchmarks.{command}" for command in one.commands("full")]
    missing = missing_peers(installed())
    ending = f"missing: pip install {' '.join(missing)}" if missing else "no peer is missing"
    return "\n".join([*lines, "", f"{len(SUITE)} benchmarks; {ending}"])


def slug(text: str) -> str:
    """A file's name from the words of a machine."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _earlier(file: Path, mode: str) -> dict[str, dict[str, Any]]:
    """The results that a file has, of the same mode; a file that cannot be read has none, and is set aside."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] == SCHEMA and document["mode"] == mode:
            return {entry["name"]: entry for entry in document["benchmarks"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        pass
    aside = file.with_suffix(".before.json")
    file.replace(aside)
    _say(f"{file.name} is of another mode or version: kept as {aside.name}")
    return {}


def _machine() -> dict[str, Any]:
    """Asked in a process of its own: this one must not hold memory of the card."""
    code = "import json; from benchmarks.environment import machine; print(json.dumps(machine()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"this environment cannot run brim:\n{done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _places(arguments: argparse.Namespace) -> dict[str, str]:
    given = {"CHECKOUT": arguments.before, "WHEEL": arguments.molsets}
    return {place: str(path.resolve()) for place, path in given.items() if path is not None}


def _about(benchmark: Benchmark, mode: str) -> str:
    seconds = benchmark.seconds(mode)
    return f"about {seconds:.0f} s" if seconds else "running"


def _outcome(result: Mapping[str, Any]) -> str:
    if result["status"] != "done":
        return f"{'failed' if result['status'] == 'failed' else 'ended'}, {result['reason']}"
    first = "; ".join(f"{ratio['what']} {ratio_text(ratio)}" for ratio in result["ratios"][:2])
    return f"{result['seconds']:.0f} s" + (f"; {first}" if first else "")


def _summary(suite: Suite) -> None:
    states = [entry["status"] for entry in suite.made.values()]
    print(f"{states.count('done')} done, {states.count('failed')} failed, "
          f"{len(states) - states.count('done') - states.count('failed')} not run")  # fmt: skip
    missing = missing_peers(suite.peers)
    print(f"missing peers: pip install {' '.join(missing)}" if missing else "no peer is missing")
    for file in suite.files:
        if file.exists():
            print(_shown(file))


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _own_command(argv: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text}: give seconds above 0")
    return seconds


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [one.name for one in SUITE]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name every benchmark, its table and its commands")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these alone; see --list")
    parser.add_argument("--full", action="store_true", help="run the commands of docs/measurements as they stand")
    parser.add_argument("--cpu", action="store_true", help="the small forms, also where there is a CUDA device")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", metavar="DIR")
    parser.add_argument(
        "--seconds", type=_seconds, help="for each benchmark; default: 45 on a CPU, 900, with --full 3600"
    )
    parser.add_argument(
        "--within", type=_seconds, metavar="SECONDS", help="for all; default: 180 on a CPU, else no limit"
    )
    parser.add_argument("--before", type=Path, metavar="PATH", help="an older source tree of brim, to run beside")
    parser.add_argument("--molsets", type=Path, metavar="WHEEL", help="the wheel of molsets, for `molecules`")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(names)}")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: it is a file; give a folder")
    for flag, path in (("--before", arguments.before), ("--molsets", arguments.molsets)):
        if path is not None and not path.exists():
            parser.error(f"{flag} {path}: there is no such file or folder")
    tree = arguments.before
    if tree is not None and not all((tree / part).is_dir() for part in ("src/brim", "benchmarks")):
        parser.error(f"--before {tree}: make it by `git archive COMMIT src benchmarks | tar -x -C {tree}`")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
