"""Printed output against what a page says: numbers, widths and paths may differ, words may not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

ANYTHING = "…"
_UNITS = r"(?:%|[KMGT]i?B\b|B\b|ms\b|µs\b|us\b|ns\b|min\b|s\b|h\b|d\b|×|x\b)"
_FIGURE = rf"\d[\d.,]*(?:e[+-]?\d+)?(?: ?{_UNITS})?"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+−])?{_FIGURE}(?: \d+ ?(?:min|s|ms|h)\b)*")
_DIGEST = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b")
_RULE = re.compile(r"[-─━═=_]{3,}|[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉░▒▓]+")


def masked(line: str) -> str:
    """The line with every number as `#`, every rule and bar as `~`, and single spaces."""
    line = _RULE.sub("~", line)
    line = _DIGEST.sub("#", line)
    line = _NUMBER.sub("#", line)
    return re.sub(r"#[.,]+(?=\s|$)", lambda found: "#" + found[0][-1], " ".join(line.split()))


def difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    """Nothing if they agree, else the lines of both as a diff."""
    wanted = [line for line in expected if line.strip()]
    got = [line for line in actual if line.strip()]
    patterns = [_pattern(line) for line in wanted]
    if re.fullmatch("".join(patterns), "".join(f"{masked(line)}\n" for line in got)):
        return ""
    alike = {}  # a printed line that the page has, as the page has it
    for line in got:
        match = next((one for one, pattern in zip(wanted, patterns, strict=True)
                      if one.strip() != ANYTHING and re.fullmatch(pattern, f"{masked(line)}\n")), None)  # fmt: skip
        alike[line] = line if match is None else match
    lines = difflib.unified_diff(
        wanted, [alike[line] for line in got], "on the page", "printed", lineterm="", n=len(wanted)
    )
    return "\n".join(lines)


def _pattern(line: str) -> str:
    if line.strip() == ANYTHING:
        return r"(?:[^\n]*\n)*"
    parts = [re.escape(masked(part)) for part in line.split(ANYTHING)]
    return r"[^\n]*".join(parts) + r"\n"
