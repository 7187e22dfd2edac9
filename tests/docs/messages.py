"""Every error and note that brim can print, read from the source with `ast`: what test_troubleshooting.py compares.

A message is what is passed to an error class or as a note: to a call such as `listener.note(…)`, to a list called
`notes` or `warnings`, as `message=` of a `Problem`. Placeholders of f-strings become `…`. Where that leaves fewer than
two words (`f"{name}: {why}"`), the parameter or variable is followed to the texts that it can have: to the callers of
the function, to the assignments in it, to what a called function returns. What cannot be followed (the text of another
library's error) is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "brim"
ANY = "…"
_ERRORS_OF_PYTHON = {"AssertionError", "AttributeError", "ImportError", "NotImplementedError", "OSError", "TypeError"}
_NOTES = {"guesses", "notes", "warnings"}
_MESSAGES = {"Problem": "message", "OldFlag": "answer", "FirstForecast": "note"}  # the parameter that is printed


class Message(NamedTuple):
    """One text, `…` for what is filled in, and where it stands."""

    text: str
    place: str


class _Function(NamedTuple):
    file: str
    node: ast.FunctionDef
    is_method: bool

    @property
    def parameters(self) -> list[str]:
        named = [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]
        return named[1:] if self.is_method and named[:1] in (["self"], ["cls"]) else named

    @property
    def all_parameters(self) -> set[str]:
        return {*self.parameters, *(argument.arg for argument in self.node.args.kwonlyargs)}


class _Spot(NamedTuple):
    """An expression inside a function (None: at the top of its file)."""

    file: str
    node: ast.expr
    function: _Function | None


def says_enough(text: str) -> bool:
    """Whether a text is known by its own words: two or more."""
    return len(re.findall(r"(?<!\S)[A-Za-z']{2,}(?=[\s,;:.?]|$)", text)) >= 2


class Source:
    """The parsed files and what is looked up in them."""

    def __init__(self, folder: Path = SOURCE) -> None:
        self.trees = {
            str(path.relative_to(folder)): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*.py"))
        }
        self.functions: dict[str, list[_Function]] = {}
        self.spots: list[tuple[ast.AST, str, _Function | None]] = []
        self.constants: dict[str, list[_Spot]] = {}
        self._known: dict[int, list[str]] = {}  # by expression
        for file, tree in self.trees.items():
            self._read(file, tree, None, in_class=False)
        self.calls: dict[str, list[tuple[ast.Call, str, _Function | None]]] = {}
        for node, file, function in self.spots:
            if isinstance(node, ast.Call):
                self.calls.setdefault(called_name(node), []).append((node, file, function))

    def _read(self, file: str, node: ast.AST, function: _Function | None, *, in_class: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef):
                inner = _Function(file, child, in_class)
                self.functions.setdefault(child.name, []).append(inner)
            elif isinstance(child, ast.Assign) and function is None:
                for target in child.targets:
                    if isinstance(target, ast.Name):
                        self.constants.setdefault(target.id, []).append(_Spot(file, child.value, None))
            self.spots.append((child, file, inner))
            self._read(file, child, inner, in_class=isinstance(child, ast.ClassDef))

    def messages(self) -> list[Message]:
        """Each text once, in the order of the files."""
        found: dict[str, Message] = {}
        for spot in self._sinks():
            for text in self.texts(spot):
                line = " ".join(text.split())
                if says_enough(line):
                    found.setdefault(line, Message(line, f"{spot.file}:{spot.node.lineno}"))
        return list(found.values())

    def _sinks(self) -> Iterator[_Spot]:
        for node, file, function in self.spots:
            for expression in _printed(node, function):
                yield _Spot(file, expression, function)

    def texts(self, spot: _Spot) -> list[str]:
        """What an expression can be, `…` for what is filled in; nothing where it cannot be followed."""
        if id(spot.node) not in self._known:
            self._known[id(spot.node)] = []  # met again on the way: a text that contains itself
            self._known[id(spot.node)] = list(dict.fromkeys(self._texts(spot)))
        return self._known[id(spot.node)]

    def _texts(self, spot: _Spot) -> list[str]:
        node = spot.node
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return self._joined(spot)
        if isinstance(node, ast.IfExp):
            return [text for part in (node.body, node.orelse) for text in self.texts(spot._replace(node=part))]
        if isinstance(node, ast.BoolOp):
            return [text for part in node.values for text in self.texts(spot._replace(node=part))]
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.texts(spot._replace(node=node.value))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = (self.texts(spot._replace(node=part)) or [ANY] for part in (node.left, node.right))
            return [f"{first}{second}" for first in left for second in right]
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [text for part in node.elts for text in self.texts(spot._replace(node=part))]
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self.texts(spot._replace(node=node.elt))
        if isinstance(node, ast.Name):
            return self._named(spot, node.id)
        if isinstance(node, ast.Call):
            return self._returned(spot, node)
        return []

    def _joined(self, spot: _Spot) -> list[str]:
        assert isinstance(spot.node, ast.JoinedStr)
        parts = spot.node.values
        plain = "".join(part.value if isinstance(part, ast.Constant) else ANY for part in parts)
        if says_enough(plain):
            return [plain]
        texts = [""]
        for part in parts:
            options = [ANY]
            if isinstance(part, ast.Constant):
                options = [part.value]
            elif isinstance(part, ast.FormattedValue):
                options = [text for text in self.texts(spot._replace(node=part.value)) if says_enough(text)] or [ANY]
            texts = [f"{before}{option}" for before in texts for option in options]
        return texts

    def _named(self, spot: _Spot, name: str) -> list[str]:
        """What a variable can hold: by the assignments of its function, by its callers, or as a constant."""
        function = spot.function
        if function is None or not (assigned := [*_assigned(function.node, name)]):
            if function is not None and name in function.all_parameters:
                return self._passed(function, name)
            return [
                text
                for constant in self.constants.get(name, [])
                if constant.file == spot.file or not name.startswith("_")
                for text in self.texts(constant)
            ]
        return [text for node in assigned for text in self.texts(spot._replace(node=node))]

    def _passed(self, function: _Function, name: str) -> list[str]:
        texts = []
        for call, file, caller in self.calls.get(function.node.name, []):
            if function.node.name.startswith("_") and file != function.file:
                continue
            for argument in _arguments(call, function, name):
                texts += self.texts(_Spot(file, argument, caller))
        return texts

    def _returned(self, spot: _Spot, call: ast.Call) -> list[str]:
        name = called_name(call)
        if name == "join" and isinstance(call.func, ast.Attribute):
            return []
        known = [one for one in self.functions.get(name, []) if one.file == spot.file or not name.startswith("_")]
        if len(known) > 1:  # one name in several files: only that of this one is meant for certain
            known = [one for one in known if one.file == spot.file]
        return [
            text
            for function in known
            for node in ast.walk(function.node)
            if isinstance(node, ast.Return) and node.value is not None
            for text in self.texts(_Spot(function.file, node.value, function))
        ]


def called_name(call: ast.Call) -> str:
    """`note` of `listener.note(…)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _printed(node: ast.AST, function: _Function | None) -> Iterable[ast.expr]:
    """The expressions of a node that brim prints."""
    if isinstance(node, ast.Call):
        yield from _printed_by_call(node)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Assign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from [node.value] if any(map(_holds_notes, targets)) else []
    elif isinstance(node, ast.Return | ast.Yield) and node.value is not None and function is not None:
        makes_notes = re.search(r"(^|_)(notes?|warnings)(_|$)", function.node.name)
        yield from [node.value] if makes_notes else []


def _printed_by_call(call: ast.Call) -> Iterator[ast.expr]:
    name = called_name(call)
    first = call.args[:1]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name.endswith("Error") and name not in _ERRORS_OF_PYTHON:
        yield from first
    elif name in _MESSAGES and _MESSAGES[name] in keywords:
        yield keywords[_MESSAGES[name]]
    elif name in ("note", "_note", "on_note") or (
        name in ("append", "extend", "setdefault")
        and isinstance(call.func, ast.Attribute)
        and _holds_notes(call.func.value)
    ):
        yield from first
    yield from (keywords[kind] for kind in ("approximate", "notes", "warnings") if kind in keywords)


def _holds_notes(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lstrip("_") in _NOTES


def _assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
            if isinstance(node.target, ast.Name) and node.target.id == name and node.value is not None:
                yield node.value
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == name:
            yield node.iter


def _arguments(call: ast.Call, function: _Function, name: str) -> Iterator[ast.expr]:
    yield from (keyword.value for keyword in call.keywords if keyword.arg == name)
    if name in function.parameters and (place := function.parameters.index(name)) < len(call.args):
        yield call.args[place]
