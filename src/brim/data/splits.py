"""Which split is read when a data set has several."""

from __future__ import annotations

import re
from collections.abc import Sequence

from brim.errors import RequestError, nearest_names
from brim.settings.caller import given, named, written

__all__ = ["choose_split", "refuse_split"]

_EVALUATED = (("validation", "val", "valid", "dev"), ("test",))  # best first; the names in a bracket mean the same


def choose_split(available: Sequence[str], asked: str | None, *, where: str) -> str:
    """The split asked for; else the only one, else the validation or test split by its name.

    `val` means `validation`, and also `val2014` where no other split starts like it. Anything else is a `RequestError`
    that names the splits present.
    """
    present = f"{where} has the splits {', '.join(available)}"
    if asked is None:
        if len(available) == 1:
            return available[0]
        for names in _EVALUATED:
            found = _meant(names, available)
            if found is not None:
                return found
        raise RequestError(f"{present}; say which with {written('split', 'NAME')}")
    names = next((names for names in _EVALUATED if asked.lower() in names), (asked.lower(),))
    found = asked if asked in available else _meant((asked.lower(), *names), available)
    if found is None:
        raise RequestError(f"{given('split', asked)}: {present}{nearest_names(asked, available)}")
    return found


def refuse_split(asked: str | None, *, where: str) -> None:
    """Say that a data set without splits has none."""
    if asked is not None:
        raise RequestError(
            f"{given('split', asked)}: {where} has no splits; leave {named('split')} out, or give that split's own path"
        )


def _meant(names: Sequence[str], available: Sequence[str]) -> str | None:
    for name in names:
        exact = [split for split in available if split.lower() == name]
        if exact:
            return exact[0]
    for name in names:
        numbered = [split for split in available if re.fullmatch(re.escape(name) + r"[-_]?\d+", split.lower())]
        if len(numbered) == 1:
            return numbered[0]
    return None
