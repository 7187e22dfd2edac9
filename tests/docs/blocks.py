"""A page of Markdown as its fenced blocks, with the comments before them that say how the tests treat one.

| block | what the tests do |
|---|---|
| `console` | run each line that begins with `$ `; the lines below it are what it prints (none: it is only run) |
| `bash` | run each line; a line that ends in a backslash continues, here and above |
| `python` | run it, in one namespace for the page; a `text` block directly after it is what it prints |
| any language with a title that is a file's name (`yaml title="config.yaml"`) | write that file |
| others | nothing |

In printed text numbers may differ, `…` matches anything within a line, and a line of `…` any number of lines.

| comment, on a line before the block | meaning |
|---|---|
| `<!-- exit: 2 -->` | the exit status of the block's last command, otherwise 0 |
| `<!-- run: COMMAND -->` | run this instead of the block's one command, which is checked as with `parse` |
| `<!-- parse: REASON -->` | only check that flags and values are accepted: it needs a GPU, ranks or a cluster |
| `<!-- setup: NAME -->` | anywhere on the page: a function of `setups.py` prepares its folder |

Pages of `CHECKED_ONLY` are treated as if every block had `parse`. Knows nothing of how a command is run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ("console", "bash", "python")
CHECKED_ONLY = ("docs/measurements/", "docs/decisions/")  # commands of benchmarks, which need a card or an hour

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>```+|~~~+)\s*(?P<language>[\w+-]*)(?P<rest>.*)$")
_COMMENT = re.compile(r"^\s*<!--\s*(?P<name>run|parse|exit|setup)\s*(?::\s*(?P<value>.*?))?\s*-->\s*$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a block and the lines below it; lines are counted from 1 in the page."""

    text: str
    line: int
    output: tuple[str, ...] = ()
    output_line: int = 0  # where the output stands, or would stand


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: its lines without the indent of its fence, and where the first of them stands."""

    language: str
    lines: tuple[str, ...]
    line: int
    indent: str = ""
    title: str = ""
    run: str = ""  # what the tests run in place of the one command
    parse: str = ""  # why the tests only check the flags
    exit: int = 0  # of the last command
    follows: bool = False  # nothing but blank lines lies between it and the block before

    @property
    def file(self) -> str:
        """The file that the block is, by its title."""
        return self.title if re.fullmatch(r"[\w./-]+\.\w+", self.title) else ""

    def commands(self) -> list[Command]:
        """Of a `console` block the lines with `$ `, of a `bash` block all that are no comment."""
        found: list[Command] = []
        open_line = False  # the command goes over to the next line
        for number, line in enumerate(self.lines, self.line):
            starts = line.startswith("$ ") if self.language == "console" else bool(line.strip())
            if open_line:
                last = found.pop()
                found.append(dataclasses.replace(last, text=f"{last.text}\n{line.removeprefix('> ')}"))
            elif starts:
                text = line.removeprefix("$ ") if self.language == "console" else line
                if self.language == "bash" and text.lstrip().startswith("#"):
                    continue
                found.append(Command(text, number))
            elif self.language == "console":
                if not found:
                    raise ValueError(f"line {number}: output without a command; commands begin with '$ '")
                last = found.pop()
                found.append(dataclasses.replace(last, output=(*last.output, line)))
                continue
            else:
                continue
            open_line = found[-1].text.rstrip().endswith("\\")
            found[-1] = dataclasses.replace(found[-1], output_line=number + 1)
        return found


@dataclasses.dataclass(frozen=True)
class Page:
    """A page: its blocks in order, and the setups it names."""

    path: Path
    blocks: tuple[Block, ...]
    setups: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in `docs/commands/find.md`."""
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else str(self.path)

    @property
    def original(self) -> Page | None:
        """Of a page in Chinese the one that it is a translation of."""
        path = self.path.parents[1] / self.path.name
        return read_page(path) if self.path.parent.name == "zh" and path.exists() else None

    def says_the_same_as(self, other: Page | None) -> bool:
        """Whether both have the same files, commands and outputs, in the same order."""
        return other is not None and self._to_run() == other._to_run() and self.setups == other.setups

    def _to_run(self) -> list[Block]:
        found = [block for block in self.blocks if block.language in (*RUN, "text") or block.file]
        return [dataclasses.replace(block, line=0, follows=False) for block in found]

    @property
    def is_run(self) -> bool:
        """Whether there is anything to run or to check."""
        return any(block.language in RUN or block.file for block in self.blocks)


def read_page(path: Path) -> Page:
    """Raises `ValueError` with the line for a comment that stands before no block."""
    text = path.read_text(encoding="utf-8")
    relative = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    default = "commands of measurements and decisions" if relative.startswith(CHECKED_ONLY) else ""
    setups = re.findall(r"^<!--\s*setup:\s*(\w+)\s*-->\s*$", text, flags=re.MULTILINE)
    return Page(path, tuple(_blocks(text.splitlines(), default)), tuple(setups))


def _blocks(lines: list[str], default_parse: str) -> Iterator[Block]:
    comments: dict[str, str] = {}
    follows = False
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if comment := _COMMENT.match(line):
            if comment["name"] == "parse" and not comment["value"]:
                raise ValueError(f"line {place}: say why: <!-- parse: needs a GPU -->")
            comments[comment["name"]] = comment["value"] or ""
            continue
        fence = _FENCE.match(line)
        if fence is None:
            if line.strip():
                if comments.keys() - {"setup"}:
                    raise ValueError(f"line {place}: a comment for a block, and no block after it")
                comments, follows = {}, False
            continue
        end = next(
            (at for at in range(place, len(lines)) if lines[at].strip().startswith(fence["ticks"])
             and not lines[at].strip().strip("`~")), None,
        )  # fmt: skip
        if end is None:
            raise ValueError(f"line {place}: a fence that is never closed")
        indent = fence["indent"]
        title = _TITLE.search(fence["rest"])
        yield Block(
            language=fence["language"], lines=tuple(one.removeprefix(indent) for one in lines[place:end]),
            line=place + 1, indent=indent, title=title[1] if title else "", run=comments.get("run", ""),
            parse=comments.get("parse", default_parse), exit=int(comments.get("exit", "0")), follows=follows,
        )  # fmt: skip
        comments, follows = {}, True
        place = end + 1


def all_pages() -> list[Page]:
    """README, CONTRIBUTING and every page of the site."""
    return [
        read_page(path)
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    ]


def pages() -> list[Page]:
    """Those that have something to run or to check."""
    return [page for page in all_pages() if page.is_run]
