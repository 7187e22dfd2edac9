"""What tests of sweep files share: the files, a small list of models, problems in short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from brim.errors import RequestError
from brim.settings.problems import Problem

FILES = Path(__file__).parent / "sweep_files"
KNOWN = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_b", "swin3d_s", "swin3d_t")
GRID = "grid_search:\n  grid: {model.type: [a]}\n"
SHORT = "grid_search: {grid: {model.type: [a]}}\n"

Write = Callable[[str], Path]


def check_model(name: str) -> None:
    if name not in KNOWN:
        raise RequestError(f"MODEL {name!r}: no such model")


def errors(problems: Sequence[Problem]) -> list[tuple[int | None, str, str]]:
    return [(one.line, one.key, one.message) for one in problems if one.severity == "error"]


def messages(problems: Sequence[Problem], severity: str) -> dict[str, str]:
    return {one.key: one.message for one in problems if one.severity == severity}
