"""One examination of this installation and machine: the document of `brim doctor`, and the line of `brim --version`."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Mapping
from typing import Any

from brim import __version__
from brim.diagnosis.installed import read_extras, read_libraries, torch_build
from brim.diagnosis.machine import read_driver, read_folders, read_host, read_torch, read_variables
from brim.diagnosis.problems import Complaint, find_problems
from brim.errors import RequestError
from brim.ranks.world import current_world
from brim.settings.doctor_settings import DoctorSettings

__all__ = ["DOCTOR_SCHEMA", "DoctorResult", "examine_as", "version_line"]

DOCTOR_SCHEMA = "brim.doctor/1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """What was found here, and what is wrong with it."""

    document: Mapping[str, Any]  # of `brim doctor --json`
    problems: tuple[Complaint, ...]

    @property
    def errors(self) -> tuple[Complaint, ...]:
        """The problems that keep brim from working here, or from using a card that is there."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


def examine_as(settings: DoctorSettings) -> DoctorResult:
    """Read everything once; torch is imported, and each of its devices adds two numbers."""
    del settings  # which only says how the answer is shown
    document: dict[str, Any] = {
        "schema": DOCTOR_SCHEMA,
        "brim": __version__,
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "torch": read_torch(),
        "driver": read_driver(),
        "host": read_host(),
        "folders": read_folders(),
        "libraries": read_libraries(),
        "extras": read_extras(),
        "variables": read_variables(),
        "ranks_problem": _ranks_problem(),
    }
    problems = tuple(find_problems(document))
    document["problems"] = [dataclasses.asdict(problem) for problem in problems]
    return DoctorResult(document=document, problems=problems)


def version_line() -> str:
    """`brim 0.1.0, torch 2.6.0+cu124, CUDA 12.4, NVIDIA H200`; torch is not imported."""
    parts = [f"brim {__version__}"]
    build = torch_build()
    parts.append("no torch" if build is None else f"torch {build['version']}")
    if build is not None:
        kinds = {"CUDA": build["cuda"], "ROCm": build["hip"]}
        parts += [f"{kind} {version}" for kind, version in kinds.items() if version] or ["no CUDA"]
    names = [card["name"] or "unknown card" for card in read_driver()["cards"] if card["slice_of"] is None]
    counts = {name: names.count(name) for name in names}
    parts += [name if count == 1 else f"{count} × {name}" for name, count in counts.items()] or ["no NVIDIA GPU"]
    return ", ".join(parts)


def _ranks_problem() -> str | None:
    try:
        current_world()
    except RequestError as error:
        return str(error)
    return None
