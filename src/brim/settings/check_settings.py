"""What `brim check` and `brim.check` take: a run, the limits it is held to, and a run to compare it with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import named
from brim.settings.declare import Setting
from brim.settings.setting_checks import Check, number, path
from brim.settings.sizes import bytes_in, format_bytes

__all__ = ["MIN_UTILISATION", "CheckLimits", "CheckSettings"]

MIN_UTILISATION = 0.3  # a card that is idle for more than two thirds of a run is worth a look


def _byte_range() -> Check:
    """`25GiB-40GiB` as two numbers of bytes."""

    def read(value: object) -> tuple[int, int]:
        low, dash, high = str(value).partition("-")
        if not isinstance(value, str) or not dash or not low.strip() or not high.strip():
            raise ValueError("write two sizes with a dash between them, such as 25GiB-40GiB")
        found = bytes_in(low), bytes_in(high)
        if found[0] > found[1]:
            raise ValueError(f"{format_bytes(found[0])} is more than {format_bytes(found[1])}: the smaller goes first")
        return found

    return Check("two sizes", read, python="str")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """What a run is held to; None: the figure is shown and not judged."""

    min_utilisation: Annotated[
        float,
        Setting(
            help="The least mean GPU utilisation, as a fraction.", metavar="FRACTION",
            check=number(least=0, most=1),
        ),
    ] = MIN_UTILISATION  # fmt: skip
    memory_range: Annotated[
        tuple[int, int] | None,
        Setting(
            help="Between which sizes the peak of reserved memory should lie, such as 25GiB-40GiB.",
            metavar="LOW-HIGH", check=_byte_range(),
        ),
    ] = None  # fmt: skip
    max_epoch_seconds: Annotated[
        float | None,
        Setting(
            help="The longest that the steps of an epoch may take.", metavar="SECONDS",
            check=number(above=0),
        ),
    ] = None  # fmt: skip
    max_total_seconds: Annotated[
        float | None,
        Setting(help="The longest that the run may take.", metavar="SECONDS", check=number(above=0)),
    ] = None
    min_speed_up: Annotated[
        float | None,
        Setting(
            help="With --against: how many times as fast as that run it must be (1: not slower).",
            metavar="FACTOR", check=number(above=0),
        ),
    ] = None  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """A run, its limits, and a run to compare it with."""

    run: Annotated[
        Path,
        Setting(help="The folder of a run.", argument=True, metavar="RUN", check=path()),
    ]
    limits: CheckLimits = dataclasses.field(default_factory=CheckLimits)
    against: Annotated[
        Path | None,
        Setting(help="An earlier run of its kind: how many times as fast RUN is.", metavar="RUN0", check=path()),
    ] = None
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        if self.limits.min_speed_up is not None and self.against is None:
            raise RequestError(f"{named('min_speed_up')}: name the run to compare with by {named('against')}")
