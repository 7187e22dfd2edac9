"""Printed output against what a page says: numbers, widths and paths may differ, words may not."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANYTHING = "…"
_UNITS = r"(?:%|[KMGT]i?B\b|B\b|ms\b|µs\b|us\b|ns\b|min\b|s\b|h\b|d\b|×|x\b)"
_FIGURE = rf"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?: ?{_UNITS})?"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+−])?{_FIGURE}(?: \d+ ?(?:min|s|ms|h)\b)*")
_DIGEST = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b")
_RULE = re.compile(r"[-─━═=_]{3,}|[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉░▒▓]+")


def masked(line: str) -> str:
    """The line with every number as `#`, every rule and bar as `~`, and single spaces."""
    for pattern, mask in ((_RULE, "~"), (_DIGEST, "#"), (_NUMBER, "#")):
        line = pattern.sub(mask, line)
    return " ".join(line.split())


def difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    """Nothing if they agree; else both, with `-` before a line that only the page has and `+` before one printed."""
    wanted = [line for line in expected if line.strip()]
    got = [line for line in actual if line.strip()]
    matches = _matches(wanted, got)
    costs = _costs([line.strip() == ANYTHING for line in wanted], matches)
    return "\n".join(_edits(wanted, got, matches, costs)) if costs[0][0] else ""


def _matches(wanted: Sequence[str], got: Sequence[str]) -> list[list[bool]]:
    """Whether a line of the page stands for a printed one."""
    plain = [masked(line) for line in got]
    patterns = [
        re.compile(r"\s*.*\s*".join(re.escape(masked(part)) for part in line.split(ANYTHING))) for line in wanted
    ]
    return [[pattern.fullmatch(line) is not None for line in plain] for pattern in patterns]


def _costs(anything: Sequence[bool], matches: Sequence[Sequence[bool]]) -> list[list[int]]:
    """How many lines differ from here on, by the next line of the page and the next one printed."""
    rows, columns = len(anything), len(matches[0]) if matches else 0
    costs = [[0] * (columns + 1) for _ in range(rows + 1)]
    costs[rows] = [columns - place for place in range(columns + 1)]
    for row in range(rows - 1, -1, -1):
        for column in range(columns, -1, -1):
            if anything[row]:
                ways = [costs[row + 1][column]]
                ways += [costs[row][column + 1]] if column < columns else []
            else:
                ways = [costs[row + 1][column] + 1]
                ways += [costs[row][column + 1] + 1] if column < columns else []
                ways += [costs[row + 1][column + 1]] if column < columns and matches[row][column] else []
            costs[row][column] = min(ways)
    return costs


def _edits(
    wanted: Sequence[str], got: Sequence[str], matches: Sequence[Sequence[bool]], costs: Sequence[Sequence[int]]
) -> list[str]:
    lines = ["--- on the page", "+++ printed"]
    row = column = 0
    while row < len(wanted) or column < len(got):
        here = costs[row][column]
        anything = row < len(wanted) and wanted[row].strip() == ANYTHING
        if anything and costs[row + 1][column] == here:
            lines.append(f" {wanted[row]}")
            row += 1
        elif anything:
            column += 1  # one of those it stands for
        elif row < len(wanted) and column < len(got) and matches[row][column] and costs[row + 1][column + 1] == here:
            lines.append(f" {wanted[row]}")
            row, column = row + 1, column + 1
        elif row < len(wanted) and costs[row + 1][column] + 1 == here:
            lines.append(f"-{wanted[row]}")
            row += 1
        else:
            lines.append(f"+{got[column]}")
            column += 1
    return lines
