"""Claims and their commands: README, docs/measurements and the suite of `python -m benchmarks` agree."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from benchmarks.suite import PEERS, SUITE, Benchmark
from tests.docs.blocks import ROOT
from tests.docs.checked_commands import check_command

PAGES = ROOT / "docs" / "measurements"
COMMAND = re.compile(r"python -m benchmarks\.[^`\n]+")
THEN = re.compile(r"`(python -m benchmarks\.[^`]+)`, then `(--[^`]+)`")
ANY = "…"  # a file, a folder or figures of the reader's own


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def is_there(target: str, folder: Path) -> bool:
    """Whether a page, and its anchor where one is named, exist."""
    name, _, anchor = target.partition("#")
    page = folder / name
    return page.is_file() and (not anchor or anchor in anchors(page))


def commands(text: str) -> list[str]:
    """Every command of a benchmark in a text; `A`, then `--b` stands for A with --b as well."""
    return [one.strip() for one in COMMAND.findall(text)] + [f"{a} {b}" for a, b in THEN.findall(text)]


def claims() -> list[str]:
    """The rows of README's table of measurements."""
    section = text_of(ROOT / "README.md").partition("\n## Measured\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and re.search(r"\d", line)]


def words(command: str) -> tuple[str, ...]:
    """Module and arguments, without where results go and which checkout is beside."""
    left = shlex.split(command.removeprefix("python -m benchmarks."))
    found: list[str] = []
    while left:
        word = left.pop(0)
        if word in ("--json", "--folder", "--before"):
            left.pop(0)
            continue
        own = word.startswith("OUT/") or word in ("CHECKOUT", "WHEEL", "DIR", ANY) or word.endswith((".whl", ".json"))
        found.append(ANY if own and not word.startswith(("benchmarks/", "docs/")) else word)
    return tuple(found)


def documented() -> set[tuple[str, ...]]:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page != PAGES / "README.md"]
    return {words(command) for page in [ROOT / "README.md", *pages] for command in commands(text_of(page))}


def agree(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(one) == len(other) and all(a == b or ANY in (a, b) for a, b in zip(one, other, strict=True))


def test_an_anchor_leads_to_one_table() -> None:
    """Of two headings alike, a link reaches the first."""
    for page in PAGES.glob("*.md"):
        headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
        assert len(set(headings)) == len(headings), page.name


def test_every_claim_of_the_readme_links_its_table_and_its_command() -> None:
    rows = claims()
    assert len(rows) >= 7
    for row in rows:
        first, last = row.split(" | ")[0], row.split(" | ")[-1]
        targets = re.findall(r"\]\((docs/measurements/[^)]+)\)", row)
        assert "](docs/measurements/" in first, row
        assert [one for one in targets if "#" not in one or not is_there(one, ROOT)] == [], row
        named = commands(last)
        assert named, row
        assert [problem for one in named if (problem := check_command(one))] == [], row
        pages = {one.partition("#")[0].rpartition("/")[2] for one in targets}
        modules = {
            command.split()[0]
            for one in SUITE
            if one.table.partition("#")[0] in pages
            for command in one.commands("full")
        }
        assert {words(one)[0] for one in named} <= modules, row


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_commands_of_a_page_have_a_module_that_takes_their_options(page: Path) -> None:
    found = commands(text_of(page))
    assert [problem for one in found if (problem := check_command(one))] == []
    declared = {command.split()[0] for one in SUITE for command in one.commands("full")}
    assert {words(one)[0] for one in found} <= declared, "benchmarks/suite.py lacks a module that this page names"


def test_the_suite_covers_every_page() -> None:
    covered = {one.table.partition("#")[0] for one in SUITE}
    assert covered == {page.name for page in PAGES.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("benchmark", SUITE, ids=lambda one: one.name)
def test_what_the_suite_declares_is_there(benchmark: Benchmark) -> None:
    assert is_there(benchmark.table, PAGES)
    assert imports_of(benchmark) <= set(PEERS)
    every = [command for command in (benchmark.cpu, benchmark.card, *benchmark.commands("full")) if command]
    assert [problem for one in every if (problem := check_command(f"python -m benchmarks.{one}"))] == []
    known = documented() | {words(f"python -m benchmarks.{one}") for one in _bare_modules()}
    missing = [one for one in benchmark.commands("full") if not any(agree(words(one), other) for other in known)]
    assert missing == [], "not a command of docs/"


def test_every_peer_is_one_of_some_table() -> None:
    assert set().union(*map(imports_of, SUITE)) == set(PEERS)


def imports_of(benchmark: Benchmark) -> set[str]:
    """What it needs or compares with, without the least versions."""
    return {name.partition(">=")[0] for name in (*benchmark.needs, *benchmark.peers)}


def _bare_modules() -> set[str]:
    """Those that the index of measurements names without arguments."""
    return {one.removeprefix("python -m benchmarks.") for one in commands(text_of(PAGES / "README.md"))}


def test_the_small_forms_fit_three_minutes_together() -> None:
    assert sum(one.cpu_seconds for one in SUITE) <= 170
    assert [one.name for one in SUITE if bool(one.cpu) != bool(one.cpu_seconds)] == []
    assert len({one.name for one in SUITE}) == len(SUITE)
