"""`report.html` beside a run's documents, and a page that compares runs; both written whole or not at all.

A kind of run is declared by a file of `kinds/` (`RunKind`), where it is found; a kind that none declares is shown as
tables of what its record says.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.run_reader import Run, open_run
from brim.errors import RequestError
from brim.reporting.base import Page, RunKind, present
from brim.reporting.checked import check_section
from brim.reporting.kinds.search import compare_others, other_page
from brim.settings.report_settings import REPORT, ReportSettings
from brim.storage.files import write_atomic
from brim.storage.python_files import submodules

__all__ = [
    "KINDS", "ReportResult", "check_libraries", "comparison_of", "page_of", "report_as", "write_comparison",
    "write_report",
]  # fmt: skip

_LIBRARIES = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "jinja2"}
KINDS: Mapping[str, RunKind] = {
    value.name: value
    for file in submodules("brim.reporting.kinds")
    for value in vars(file).values()
    if isinstance(value, RunKind)
}
OTHER = RunKind(name="", page=other_page, compare=compare_others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportResult:
    """A page that was written; of a comparison, `document` has its figures."""

    path: Path
    document: dict[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What stands on top of the page."""
        return tuple(self.document.get("warnings", ()))


def report_as(settings: ReportSettings) -> ReportResult:
    """The page of a run, or one that compares several."""
    if len(settings.runs) == 1:
        path = write_report(settings.runs[0], output=settings.page)
        document = {"schema": "brim.report/1", "run": str(settings.runs[0]), "report": str(path)}
        return ReportResult(path=path, document=document)
    assert settings.page is not None  # a comparison has a page of its own
    return ReportResult(path=settings.page, document=write_comparison(settings.runs, settings.page))


def write_report(folder: Path, *, output: Path | None = None) -> Path:
    """Write the report of the run in this folder, into it or where `output` says, and give its path.

    The values of a profile are runs of their own, and get theirs as well.
    A folder that is no run's, or libraries that are not installed, are a `RequestError`.
    """
    run = open_run(folder)
    check_libraries()
    from brim.reporting.page import render

    warnings = _write_parts(run)
    page = page_of(run)
    path = run.folder / REPORT if output is None else output
    write_atomic(path, render(dataclasses.replace(page, warnings=(*page.warnings, *warnings))))
    return path


def _write_parts(run: Run) -> list[str]:
    """The reports of the runs inside a run (a profile's values), which its page leads to; warns of those without."""
    warnings = []
    for part in run.parts():
        try:
            write_report(part)
        except RequestError as error:
            warnings.append(f"no report of its own: {error}")
    return warnings


def write_comparison(folders: Sequence[Path], output: Path) -> dict[str, Any]:
    """Compare the runs in these folders, write the page, and give the comparison as a document.

    Runs of different kinds, or fewer than two, are a `RequestError`.
    """
    if len(folders) < 2:
        raise RequestError("a comparison needs two runs or more")
    runs = [open_run(folder) for folder in folders]
    check_libraries()
    from brim.reporting.page import render

    document, page = comparison_of(runs)
    write_atomic(output, render(page))
    return document


def page_of(run: Run) -> Page:
    """The page of a run; of a kind without one of its own, its summary as tables. The checklist is on top."""
    page = KINDS.get(run.kind, OTHER).page(run)
    return dataclasses.replace(page, sections=(*present(check_section(run)), *page.sections))


def comparison_of(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """The runs compared, as a document and as a page; of different kinds, or one twice, they are a `RequestError`."""
    folders = [run.folder.resolve() for run in runs]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise RequestError(f"{runs[place].folder}: it is given twice; give different runs to compare")
    for run in runs[1:]:
        if run.kind != runs[0].kind:
            raise RequestError(
                f"{runs[0].folder} is of the kind {runs[0].kind}, {run.folder} of the kind {run.kind}; "
                f"compare runs of one kind"
            )
    return (KINDS.get(runs[0].kind, OTHER).compare or compare_others)(runs)


def check_libraries() -> None:
    """Raise a `RequestError` that says what to install where a library of the `report` extra is missing."""
    missing = [name for module, name in _LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RequestError(f"a report needs {', '.join(missing)}: pip install 'brim[report]'")
