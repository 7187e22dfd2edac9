"""Byte sizes as people write them: `24GiB`, `512MB`, `1.5g`."""

from __future__ import annotations

import re

from brim.errors import RequestError
from brim.settings.caller import given

__all__ = ["bytes_in", "format_bytes", "parse_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip

UNIT_FORGOTTEN = 400  # a number below it without a unit is meant in GiB, as a card's memory is
_PATTERN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, *, name: str = "memory_limit") -> int:
    """`24GiB` to bytes: GiB is 2³⁰, GB is 10⁹, and a bare letter (`24G`) means GiB as in nvidia-smi."""
    try:
        return bytes_in(text)
    except ValueError as error:
        raise RequestError(f"{given(name, text)}: {error}") from None


def bytes_in(text: str | int) -> int:
    """As `parse_bytes`; a `ValueError` says what to write, and leaves it to others to name the setting."""
    match = _PATTERN.fullmatch(str(text))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError("write a size such as 24GiB, 512MiB or 8GB")
    value = float(match.group(1)) * _UNITS[unit]
    if value > 2**63:
        raise ValueError("that is more than any device has; write a size such as 24GiB")
    if value < 1:
        raise ValueError("it must be more than zero bytes; write a size such as 24GiB")
    if not unit and value < UNIT_FORGOTTEN:
        raise ValueError(f"that is {int(value)} bytes; write the unit, such as {match.group(1)}GiB")
    return int(value)


def format_bytes(count: int | float | None) -> str:
    """Bytes for people: `17.3 GiB`, `512 B`; an em dash for an unknown figure."""
    if count is None:
        return "—"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
