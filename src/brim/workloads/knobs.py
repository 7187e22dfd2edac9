"""Knobs: named settings that change a workload's cost, parsed and checked in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.caller import given, pair

__all__ = ["Knob", "check_knobs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """One knob of a model: its default, the values it takes, and what it means."""

    name: str
    default: Any
    help: str = ""
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int = 1

    def parse(self, text: Any) -> Any:
        """A value from the command line or a call, of the default's type and within range."""
        if isinstance(self.default, bool):
            return self._parse_bool(text)
        if isinstance(self.default, int):
            return self._parse_int(text)
        if isinstance(self.default, float):
            return self._parse_float(text)
        return text

    def _parse_bool(self, text: Any) -> bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        value = words.get(str(text).lower())
        if value is None:
            raise self._refuse(text, "it must be true or false")
        return value

    def _parse_int(self, text: Any) -> int:
        try:
            value = int(text)
        except (TypeError, ValueError):
            raise self._refuse(text, "it must be a whole number") from None
        if self.minimum is not None and value < self.minimum:
            raise self._refuse(text, f"the smallest is {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise self._refuse(text, f"the largest is {self.maximum}")
        if value % self.multiple_of:
            raise self._refuse(text, f"it must be a multiple of {self.multiple_of}")
        return value

    def _parse_float(self, text: Any) -> float:
        try:
            return float(text)
        except (TypeError, ValueError):
            raise self._refuse(text, "it must be a number") from None

    def _refuse(self, value: Any, why: str) -> RequestError:
        return RequestError(f"{pair('knob', self.name, value)}: {why} (default {self.default})")


def check_knobs(asked: Mapping[str, Any], known: Sequence[Knob], *, owner: str) -> dict[str, Any]:
    """Every known knob with the value asked for or its default; an unknown name is a `RequestError`."""
    by_name = {knob.name: knob for knob in known}
    for name in asked:
        if name not in by_name:
            has = f"it has {', '.join(by_name)}" if by_name else "it has none"
            raise RequestError(f"{given('knob', name)}: {owner} has no such knob ({has}){nearest_names(name, by_name)}")
    return {name: knob.parse(asked[name]) if name in asked else knob.default for name, knob in by_name.items()}
