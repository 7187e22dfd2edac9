"""For the Python reference: the fields of a dataclass as one table, each described by the comment behind it."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """`limit_bytes: int | None  # None: no limit could be read` is a row of the class's table of attributes."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Move the fields of a dataclass into its docstring."""
        if cls.docstring is None or not any("dataclass" in str(one.value) for one in cls.decorators):
            return
        fields = [
            member
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and not name.startswith("_") and "property" not in member.labels
        ]
        rows = [f"    {one.name} ({_annotation(one)}): {_comment(one)}" for one in fields if one.annotation is not None]
        if rows:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *rows])
            for one in fields:
                cls.del_member(one.name)


def _annotation(field: griffe.Attribute) -> str:
    """Of `Annotated[float, Setting(…)]` the type alone."""
    text = str(field.annotation)
    return text.removeprefix("Annotated[").partition(", Setting(")[0] if text.startswith("Annotated[") else text


def _comment(field: griffe.Attribute) -> str:
    lines = field.lines_collection[field.filepath][field.lineno - 1 : field.endlineno]
    comment = re.search(r"  # (?!noqa|type:|fmt:)(.+)$", lines[-1]) if lines else None
    text = comment[1].partition("  # ")[0] if comment else field.name.replace("_", " ")
    return text[0].upper() + text[1:] + "."
