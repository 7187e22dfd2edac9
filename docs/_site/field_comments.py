"""For the Python reference: the comment behind a field of a class is the description of that field."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """`limit_bytes: int | None  # None: no limit could be read` is described by its comment."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Every field that has no docstring of its own."""
        if attr.docstring is None and attr.lineno is not None and attr.parent is not None and attr.parent.is_class:
            lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
            comment = re.search(r"  # (?!noqa|type:|fmt:)(.+)$", lines[-1]) if lines else None
            if comment is not None:
                text = comment[1].partition("  # ")[0]
                attr.docstring = griffe.Docstring(text[0].upper() + text[1:] + ".", parent=attr)
