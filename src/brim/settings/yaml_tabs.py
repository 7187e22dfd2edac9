"""Where tabs stand between the values of a YAML text. Parsers differ on which of these they take; brim takes none."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Span", "tabs_outside"]

Span = tuple[tuple[int, int], tuple[int, int]]  # (line, column) of the first character and past the last, from 0

_BREAKS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def tabs_outside(text: str, scalars: Sequence[Span], *, until: int | None = None) -> list[int]:
    """Lines, from 0, with a tab outside of scalars (given in order) and comments; `until` is the last one looked at."""
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
