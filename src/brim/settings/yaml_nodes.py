"""YAML text to nodes: every value with its line, every problem with its line. The only file that imports yaml.

Scalars mean what `yaml.safe_load` makes of them, with three differences: `1e-3` is a number, a date stays text, and so
does a lone equals sign. Reads parser events, never objects, so a tag cannot make anything; and counts as it goes,
so an alias bomb is found before it is expanded. Parsers differ on where a tab may stand: here nowhere between values.
Does not know paths, nor what a document is for. Why not another library: docs/decisions/0015-yaml-lines.md.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import ScalarNode
from yaml.reader import Reader, ReaderError
from yaml.resolver import Resolver

from brim.settings.nested_keys import MOST_LEVELS, MOST_VALUES
from brim.settings.problems import Problem, Severity

__all__ = ["Collection", "Node", "NodeReader", "Span", "tabs_outside"]

_PREFIX = "tag:yaml.org,2002:"
_LEFT_AS_TEXT = (f"{_PREFIX}timestamp", f"{_PREFIX}value")  # dates, and a lone equals sign
_PLAIN_TAGS = ("str", "int", "float", "bool", "null", "map", "seq")
_WORDS = ("yes", "no", "on", "off")  # truth values in YAML 1.1 alone
_Loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # the C one is ten times as fast


class _Resolver(Resolver):
    """Which plain scalar is a number, a truth value, nothing, or text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # yaml's own way of declaring it
        first: [(tag, pattern) for tag, pattern in pairs if tag not in _LEFT_AS_TEXT]
        for first, pairs in Resolver.yaml_implicit_resolvers.items()
    }


# 1e-3 and 1E5: text in YAML 1.1, which wants 1.0e-3; whoever writes them means a number.
_Resolver.add_implicit_resolver(
    f"{_PREFIX}float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+\Z"), list("-+.0123456789")
)
_RESOLVER: Any = _Resolver()
_CONSTRUCT = SafeConstructor()


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A scalar, and what every node has: where it begins, how large it is with aliases expanded."""

    line: int  # from 1
    column: int  # from 1
    text: str = ""  # as it is written
    value: Any = None  # as Python has it
    is_merge: bool = False  # the key <<
    weight: int = 1  # values in it, itself included
    levels: int = 1


@dataclasses.dataclass(eq=False, slots=True)
class Collection(Node):
    """A list or a mapping."""

    kind: Literal["list", "mapping"] = "list"
    items: list[Node] = dataclasses.field(default_factory=list)  # of a list
    pairs: list[tuple[Node, Node]] = dataclasses.field(default_factory=list)  # of a mapping
    key: Node | None = None  # of a mapping: the key whose value comes next
    seen: dict[str, int] = dataclasses.field(default_factory=dict)  # of a mapping: the line of each key

    def add_size(self, child: Node) -> None:
        """Count a child, with all that is in it."""
        self.weight += child.weight
        self.levels = max(self.levels, child.levels + 1)


class NodeReader:
    """Turns parser events into nodes; collects problems instead of stopping at the first."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._open: list[Collection] = []
        self._names: list[str] = []  # the keys on the way to the node that is being read
        self._anchors: dict[str, Node] = {}
        self._values = 0
        self._spans: list[Span] = []

    def add_problem(
        self,
        severity: Severity,
        line: int | None,
        message: str,
        *,
        fix: str = "",
        column: int | None = None,
        key: str | None = None,
    ) -> None:
        """Note a problem, with the key that is being read unless another is given."""
        found = ".".join(self._names) if key is None else key
        self.problems.append(
            Problem(severity=severity, message=message, fix=fix, file=self.file, line=line, column=column, key=found)
        )

    def read(self, text: str) -> Node | None:
        """The root node; None where there is none or the text could not be read to its end."""
        strange = Reader.NON_PRINTABLE.search(text)
        if strange is not None:
            line = text.count("\n", 0, strange.start()) + 1
            self.add_problem("error", line, f"the character U+{ord(strange.group()):04X} is not allowed")
            return None
        root: Node | None = None
        broken_at: int | None = None
        try:
            for node in self._roots(text):
                if root is not None:
                    self.add_problem("error", node.line, "a second document begins", fix="keep one document a file")
                    break
                root = node
        except _StopReadingError as error:
            self.add_problem("error", error.line, str(error))
            return None
        except ReaderError as error:
            self.add_problem("error", None, f"not YAML: {error.reason}")
            return None
        except yaml.MarkedYAMLError as error:
            broken_at = self._add_broken(error, text)
            root = None
        self._names.clear()
        for tab in tabs_outside(text, self._spans, until=broken_at):
            self.add_problem("error", tab + 1, "there is a tab", fix="use spaces")
        return root

    def _add_broken(self, error: yaml.MarkedYAMLError, text: str) -> int | None:
        """Report where the text stops being YAML, unless a tab is the reason: tabs are reported by themselves."""
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line
        if not tabs_outside(text, self._spans, until=line):
            reason = " ".join(part for part in (error.context, error.problem) if part)
            self.add_problem(
                "error", None if line is None else line + 1, f"not YAML: {reason}", fix="check indentation and quotes"
            )
        return line

    def _roots(self, text: str) -> Iterator[Node]:
        """The root node of each document."""
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                node: Node = self._open.pop()
            elif isinstance(event, yaml.NodeEvent):
                started = self._node(event)
                if started is None:
                    continue
                node = started
            else:
                continue
            if self._open:
                self._place(node, self._open[-1])
            else:
                yield node

    def _node(self, event: Any) -> Node | None:
        """The node of an event, once it is complete: a list or a mapping is only begun here."""
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), line)
        self._count(1, 1, line)
        tag = self._tag(event, line)
        if isinstance(event, yaml.ScalarEvent):
            start: Any = event.start_mark
            end: Any = event.end_mark
            self._spans.append(((start.line, start.column), (end.line, end.column)))
            node = Node(line, column, text=event.value)
            self._read_scalar(node, tag, event.implicit)
            if event.anchor:
                self._anchors[event.anchor] = node
            return node
        begun = Collection(line, column, kind="list" if isinstance(event, yaml.SequenceStartEvent) else "mapping")
        if tag is not None and tag != f"{_PREFIX}{'seq' if begun.kind == 'list' else 'map'}":
            self.add_problem("error", line, f"the tag {_written(tag)} does not fit a {begun.kind}", fix="leave it out")
        self._open.append(begun)
        if event.anchor:
            self._anchors[event.anchor] = begun
        return None

    def _alias(self, name: str, line: int) -> Node:
        target = self._anchors.get(name)
        if target is None:
            raise _StopReadingError(f"the alias *{name} has no anchor &{name} before it", line)
        if target in self._open:
            raise _StopReadingError(f"the alias *{name} refers to itself", line)
        self._count(target.weight, target.levels, line)
        return target

    def _count(self, values: int, levels: int, line: int) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise _StopReadingError(f"more than {MOST_VALUES:,} values, with its aliases expanded", line)
        if len(self._open) + levels > MOST_LEVELS:
            raise _StopReadingError(f"more than {MOST_LEVELS} levels of nesting", line)

    def _tag(self, event: Any, line: int) -> str | None:
        """An explicit tag of a plain value; any other is a problem."""
        tag: str | None = event.tag
        if tag is None or tag == "!":
            return None
        if tag.startswith(_PREFIX) and tag.removeprefix(_PREFIX) in _PLAIN_TAGS:
            return tag
        self.add_problem("error", line, f"the tag {_written(tag)} is not allowed", fix="a file holds plain values only")
        return None

    def _read_scalar(self, node: Node, tag: str | None, implicit: tuple[bool, bool]) -> None:
        """Find the value of a scalar; where it stands as a key, only whether it is a text."""
        found: str = _RESOLVER.resolve(ScalarNode, node.text, implicit) if tag is None else tag
        kind = found.removeprefix(_PREFIX)
        parent = self._open[-1] if self._open else None
        if parent is not None and parent.kind == "mapping" and parent.key is None:
            node.is_merge = kind == "merge"
            node.value = node.text if kind in ("str", "merge") or node.text.lower() in _WORDS else None
            if kind == "bool" and node.value is not None:
                message = f"the key {node.text}: YAML 1.1 reads it as a truth value; it is taken as text"
                self.add_problem("warning", node.line, message, fix="put it into quotes", column=node.column)
            return
        try:
            node.value = _scalar_value(kind, node.text)
        except ValueError:
            shown = node.text if len(node.text) < 40 else f"{node.text[:36]}…"
            self.add_problem("error", node.line, f"{shown!r} cannot be read as {kind}", column=node.column)
        else:
            surprise = _surprise(kind, node.text, node.value) if implicit[0] else ""
            if surprise:
                self.add_problem("warning", node.line, surprise, column=node.column)

    def _place(self, node: Node, parent: Collection) -> None:
        parent.add_size(node)
        if parent.kind == "list":
            parent.items.append(node)
        elif parent.key is None:
            parent.key = node
            self._take_key(node, parent)
        else:
            parent.pairs.append((parent.key, node))
            parent.key = None
            self._names.pop()

    def _take_key(self, node: Node, parent: Collection) -> None:
        """Check a key as soon as it is read, so that it is reported even where the rest of the file is broken."""
        if isinstance(node, Collection):
            self.add_problem("error", node.line, f"a {node.kind} is used as a key", fix="a key is a text")
            self._names.append("?")
            return
        if not isinstance(node.value, str):
            message = f"the key {node.text or 'null'} is read as a number, a truth value or nothing"
            self.add_problem("error", node.line, message, fix="put it into quotes", column=node.column)
        elif not node.text:
            self.add_problem("error", node.line, "a key is empty", column=node.column)
        self._names.append(node.text)
        if node.text in parent.seen:
            message = f"the key is there twice, first on line {parent.seen[node.text]}"
            self.add_problem("error", node.line, message, fix="keep one of them", column=node.column)
        parent.seen.setdefault(node.text, node.line)


class _StopReadingError(Exception):
    """Reading stops here: the file is too large with its aliases expanded, or an alias refers to itself."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def _written(tag: str) -> str:
    return f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag


def _scalar_value(kind: str, text: str) -> Any:
    """The Python value of a scalar; a text that its tag cannot read is a `ValueError`."""
    scalar = ScalarNode(f"{_PREFIX}{kind}", text)
    try:
        match kind:
            case "int":
                return _CONSTRUCT.construct_yaml_int(scalar)
            case "float":
                return _CONSTRUCT.construct_yaml_float(scalar)
            case "bool":
                return _CONSTRUCT.construct_yaml_bool(scalar)
            case "null":
                return None
            case "map" | "seq":
                raise ValueError(text)
    except (KeyError, IndexError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(text) from error
    return text


def _surprise(kind: str, text: str, value: Any) -> str:
    """A warning where YAML 1.1 reads something else than most people mean; else nothing."""
    if kind == "bool" and text.lower() in _WORDS:
        return f"{text} is read as {str(value).lower()}; write {str(value).lower()}, or the word in quotes"
    if kind in ("int", "float") and ":" in text:
        return f"{text} is read to the base of 60, as {value}; write the number, or the text in quotes"
    if kind == "int" and value != 0 and re.fullmatch(r"[-+]?0[0-7_]+", text):
        return f"{text} is read to the base of 8, as {value}; write it without the leading 0"
    return ""


Span = tuple[tuple[int, int], tuple[int, int]]  # (line, column) of the first character and past the last, from 0

_BREAKS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def tabs_outside(text: str, scalars: Sequence[Span], *, until: int | None = None) -> list[int]:
    """Lines, from 0, with a tab outside of scalars (given in order) and comments; `until` is the last line to check."""
    if "\t" not in text:
        return []
    found = []
    passed = 0  # scalars that end before the line
    for number, line in enumerate(_BREAKS.split(text)):
        if until is not None and number > until:
            break
        if "\t" not in line:
            continue
        while passed < len(scalars) and scalars[passed][1][0] < number:
            passed += 1
        taken = []
        index = passed
        while index < len(scalars) and scalars[index][0][0] <= number:
            (first, start), (last, end) = scalars[index]
            taken.append((start if first == number else 0, end if last == number else len(line) + 1))
            index += 1
        if _has_tab_outside(line, taken):
            found.append(number)
    return found


def _has_tab_outside(line: str, taken: Sequence[tuple[int, int]]) -> bool:
    inside = 0  # the first of `taken` that does not end before the column
    for column, character in enumerate(line):
        while inside < len(taken) and taken[inside][1] <= column:
            inside += 1
        if inside < len(taken) and taken[inside][0] <= column:
            continue
        if character == "#" and (column == 0 or line[column - 1] in " \t"):
            return False  # the rest is a comment
        if character == "\t":
            return True
    return False
