"""YAML files as plain values, with the line of every key and item.

As `yaml.safe_load`, but every problem of a file is reported at once, with its line: a key that is there twice or is not
a text, a tag, a tab, a second document, a bomb of aliases. Does not know which keys there are.

    document = read_yaml("config.yaml")
    document.data["hp"]["epochs"], document.line("hp", "epochs")
    parse_overrides(["hp.learning_rate=0.01", "model.type=[r3d_18,s3d]"])
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.problems import Problem, has_errors, raise_errors
from brim.settings.yaml_nodes import Collection, Node, NodeReader

__all__ = ["MOST_BYTES", "Document", "inspect_yaml", "parse_overrides", "parse_value", "read_yaml"]

MOST_BYTES = 8 * 2**20

Place = tuple[str | int, ...]  # the keys and list positions on the way to a value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A file's values, and where each of them stands."""

    file: str
    data: dict[str, Any]
    marks: Mapping[Place, tuple[int, int]] = dataclasses.field(default_factory=dict)  # line and column, from 1
    problems: tuple[Problem, ...] = ()  # none is an error

    def line(self, *place: str | int) -> int | None:
        """The line of a key or of an item of a list; of what it stands in, where it is not in the file itself."""
        mark = self.mark(*place)
        return None if mark is None else mark[0]

    def line_of(self, key: str) -> int | None:
        """The line of a dotted key, however it is written: `hp.epochs: 3`, or `epochs` under `hp`."""
        for place, (line, _) in self.marks.items():
            if ".".join(map(str, place)) == key:
                return line
        return None

    def mark(self, *place: str | int) -> tuple[int, int] | None:
        """As `line`, with the column."""
        while place:
            if place in self.marks:
                return self.marks[place]
            place = place[:-1]
        return None


def read_yaml(path: str | os.PathLike[str]) -> Document:
    """The document in a file; a `RequestError` names everything that is wrong with it, line by line."""
    document, problems = inspect_yaml(path)
    raise_errors(problems)
    assert document is not None  # without an error there is one
    return document


def inspect_yaml(path: str | os.PathLike[str]) -> tuple[Document | None, tuple[Problem, ...]]:
    """The document and its problems; no document where one of them is an error. A file that cannot be opened raises."""
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        beside = [other.name for other in Path(file).parent.glob("*") if other.suffix in (".yaml", ".yml")]
        raise RequestError(f"{file}: there is no such file{nearest_names(Path(file).name, beside)}") from error
    except IsADirectoryError as error:
        raise RequestError(f"{file}: it is a folder; give a YAML file") from error
    except OSError as error:
        raise RequestError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # a NUL in the name
        raise RequestError(f"{file!r}: cannot be read ({error})") from error
    if len(content) > MOST_BYTES:
        raise RequestError(f"{file}: larger than {MOST_BYTES // 2**20} MiB; a file of settings is not")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"byte {error.start} (0x{content[error.start]:02x}) is not UTF-8"
        return None, (Problem(severity="error", file=file, line=line, message=message, fix="save the file as UTF-8"),)
    return _inspect_text(text, file)


def parse_value(text: str, *, argument: str) -> Any:
    """A value as people type it after `KEY=`, read as it would be in a file: `0.01`, `auto`, `[1, 2]`, `null`."""
    reader = NodeReader(argument)
    root = reader.read(text) if len(text) <= MOST_BYTES else None
    value = _Builder(reader).build(root, ()) if root is not None else None
    errors = [problem for problem in reader.problems if problem.severity == "error"]
    if errors:
        raise RequestError(f"{argument}: {errors[0].message}; put a text with special characters into quotes")
    if root is None:
        raise RequestError(f"{argument}: there is no value; write null for none")
    return value


def _inspect_text(text: str, file: str) -> tuple[Document | None, tuple[Problem, ...]]:
    reader = NodeReader(file)
    root = reader.read(text)
    if not has_errors(reader.problems):
        if root is None or (root.value is None and not isinstance(root, Collection)):
            reader.add_problem("error", 1, "the file is empty")
        elif not isinstance(root, Collection) or root.kind != "mapping":
            what = "a list" if isinstance(root, Collection) else "a single value"
            reader.add_problem("error", root.line, f"the file is {what}", fix="write KEY: VALUE lines")
    builder = _Builder(reader)
    data = builder.build(root, ()) if root is not None and not has_errors(reader.problems) else None
    problems = tuple(reader.problems)
    if data is None or has_errors(problems):
        return None, problems
    return Document(file=file, data=data, marks=builder.marks, problems=problems), problems


class _Builder:
    """Nodes to values; aliases are written out, so that no two places share a list or a mapping."""

    def __init__(self, reader: NodeReader) -> None:
        self.reader = reader
        self.marks: dict[Place, tuple[int, int]] = {}

    def build(self, node: Node, place: Place) -> Any:
        """The value of a node; recursion is as deep as the reader lets a file be."""
        if not isinstance(node, Collection):
            return node.value
        if node.kind == "list":
            for index, item in enumerate(node.items):
                self.marks[(*place, index)] = (item.line, item.column)
            return [self.build(item, (*place, index)) for index, item in enumerate(node.items)]
        values: dict[str, Any] = {}
        for key, item in self._pairs(node, place):
            self.marks[(*place, key.text)] = (key.line, key.column)
            values[key.text] = self.build(item, (*place, key.text))
        return values

    def _pairs(self, node: Collection, place: Place) -> list[tuple[Node, Node]]:
        """The pairs of a mapping: those of `<<: *base` first, its own over them."""
        merged: dict[str, tuple[Node, Node]] = {}
        for item in (item for key, item in node.pairs if key.is_merge):
            for source in reversed(item.items if isinstance(item, Collection) and item.kind == "list" else [item]):
                if isinstance(source, Collection) and source.kind == "mapping":
                    merged.update({key.text: (key, value) for key, value in self._pairs(source, place)})
                else:
                    key = ".".join(map(str, place))
                    self.reader.add_problem("error", source.line, "<< takes a mapping or a list of mappings", key=key)
        own = {key.text: (key, item) for key, item in node.pairs if not key.is_merge}
        return list({**merged, **own}.values())


def parse_overrides(texts: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """KEY=VALUE texts as dotted keys and values; a value is read as it would be in a file. A mapping is as it is.

    In a sweep a list is a list of values to try; `[[10, 20]]` is one value that is a list.
    """
    if isinstance(texts, Mapping):
        return dict(texts)
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RequestError(f"{text!r}: a setting is written KEY=VALUE, such as hp.learning_rate=0.01")
        if key.startswith("-"):
            raise RequestError(f"{text!r}: there is no such option, and a setting is written without dashes")
        if key in found:
            raise RequestError(f"{key}: it is given twice; keep one")
        found[key] = parse_value(value, argument=text)
    return found
