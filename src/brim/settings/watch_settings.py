"""What `brim watch` and `brim.watch` take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given
from brim.settings.declare import Setting
from brim.settings.setting_checks import number, path
from brim.settings.shared import OUTPUT

__all__ = ["WatchSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Which runs are shown, how often, and where."""

    run: Annotated[
        Path | None,
        Setting(
            help="The folder of a run: only it is shown, with the runs in its subfolders; by default all runs.",
            argument=True, metavar="RUN", check=path(),
        ),
    ] = None  # fmt: skip
    interval: Annotated[
        float,
        Setting(help="Seconds between two readings.", metavar="SECONDS", check=number(least=0.1), only="flags"),
    ] = 1.0
    once: Annotated[bool, Setting(help="Print one reading and end.", only="flags")] = False
    metrics: Annotated[
        Path | None,
        Setting(
            help="Write OpenMetrics text to this file at every reading, for a node exporter's textfile collector.",
            panel=OUTPUT, metavar="FILE", check=path(),
        ),
    ] = None  # fmt: skip
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        if self.metrics is not None and self.metrics.is_dir():
            raise RequestError(f"{given('metrics', str(self.metrics))}: it is a folder; give a file")
