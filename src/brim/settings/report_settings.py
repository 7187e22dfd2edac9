"""What `brim report` and `brim.report` take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named
from brim.settings.declare import Setting
from brim.settings.setting_checks import Check, path, texts
from brim.settings.shared import OUTPUT

__all__ = ["COMPARISON", "REPORT", "ReportSettings"]

REPORT, COMPARISON = "report.html", "report-compare.html"  # in the run's folder, and in the current one


def _paths() -> Check:
    several = texts()
    return Check(several.takes, lambda value: tuple(Path(one) for one in several(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Runs, and where their page goes."""

    runs: Annotated[
        tuple[Path, ...],
        Setting(
            help="The folder of a run; with several, they are compared.", argument=True, many=True,
            metavar="RUN", check=_paths(), python="str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
        ),
    ]  # fmt: skip
    output: Annotated[
        Path | None,
        Setting(
            help="Where the page goes (RUN/report.html; of a comparison ./report-compare.html).",
            flags=("-o", "--output"), panel=OUTPUT, metavar="FILE", check=path(),
        ),
    ] = None  # fmt: skip
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        if not self.runs:
            raise RequestError(f"{named('runs')}: name the folder of a run")
        out = self.output
        if out is not None and not out.is_dir() and out.suffix.lower() not in (".html", ".htm"):
            raise RequestError(f"{given('output', str(out))}: give a file that ends in .html, or a folder that exists")

    @property
    def page(self) -> Path | None:
        """The file to write: in a folder, under the page's usual name; None: in the run's own."""
        if self.output is not None and self.output.is_dir():
            return self.output / (REPORT if len(self.runs) == 1 else COMPARISON)
        return self.output if self.output is not None or len(self.runs) == 1 else Path(COMPARISON)
