"""Python files that add tasks or metrics of their own."""

from __future__ import annotations

from collections.abc import Sequence

from brim.errors import RequestError
from brim.metrics.registry import add_metrics, import_file
from brim.settings.caller import given
from brim.tasks.registry import add_tasks

__all__ = ["load_plugins"]


def load_plugins(paths: Sequence[str]) -> list[str]:
    """Import the files and add what they define; a file that defines neither task nor metric is a `RequestError`."""
    added: list[str] = []
    for path in paths:
        try:
            module = import_file(path)
            found = [*add_metrics(module), *add_tasks(module)]
        except RequestError as error:
            raise RequestError(f"{given('plugin', path)}: {error}") from error
        if not found:
            raise RequestError(
                f"{given('plugin', path)}: it defines neither a metric nor a task; derive a class from "
                "brim.metrics.base.Metric or brim.tasks.base.Task"
            )
        added += found
    return added
