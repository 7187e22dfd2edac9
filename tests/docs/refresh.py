"""Write into pages what their commands print now.

    python -m tests.docs.refresh PAGE …          outputs that no longer agree, and those written as a single `?`
    python -m tests.docs.refresh --all PAGE …    every output that a page shows
    python -m tests.docs.refresh --check PAGE …  print the differences and change nothing

A command without output on the page stays without; put `?` below it to ask for it. Long outputs are shortened by hand
afterwards, with a line of `…` for lines left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import read_page
from tests.docs.page_run import ASKED_FOR, PageRun, Result, Server, server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="also outputs that agree with the page")
    parser.add_argument("--check", action="store_true", help="change nothing")
    asked = parser.parse_args()
    wrong = 0
    with server() as running:
        for path in asked.pages:
            wrong += refresh(path.resolve(), running, everything=asked.all, write=not asked.check)
    sys.exit(bool(wrong))


def refresh(path: Path, running: Server, *, everything: bool, write: bool) -> int:
    """Rewrite one page; how many problems are left that no output can mend."""
    with tempfile.TemporaryDirectory(prefix="brim-page-") as folder:
        results = list(PageRun(read_page(path), Path(folder) / "page", running).run())
    lines = path.read_text(encoding="utf-8").split("\n")
    left = 0
    for result in reversed(results):
        mendable = bool(result.expected) and not result.problem.startswith(("exit status", "Traceback"))
        if result.problem and not (mendable and write):
            print(f"{path}:{result.line}: {result.problem}\n")
            left += 1
        elif write and mendable and (result.problem or everything or result.expected == ASKED_FOR):
            _put(lines, result)
            print(f"{path}:{result.line}: written")
    if write:
        path.write_text("\n".join(lines), encoding="utf-8")
    return left


def _put(lines: list[str], result: Result) -> None:
    printed = list(result.printed)
    while printed and not printed[-1].strip():
        printed.pop()
    start = result.output_line - 1
    lines[start : start + len(result.expected)] = [f"{result.indent}{line}".rstrip() for line in printed]


if __name__ == "__main__":
    main()
