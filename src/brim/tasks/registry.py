"""Tasks by name: the built-in ones, and those that a Python file adds."""

from __future__ import annotations

import inspect
from types import ModuleType

from brim.data.base import SampleSet
from brim.errors import RequestError, nearest_names
from brim.models.base import LoadedModel
from brim.settings.caller import given
from brim.tasks.base import Task, TaskSettings
from brim.tasks.choice import ChoiceTask
from brim.tasks.classify import ClassifyTask
from brim.tasks.function import FunctionTask
from brim.tasks.generate import GenerateTask, VqaTask

__all__ = ["add_tasks", "make_task", "task_names"]

_TASKS: dict[str, type[Task]] = {
    task.name: task for task in (GenerateTask, VqaTask, ChoiceTask, ClassifyTask, FunctionTask)
}
_BUILT_IN = tuple(_TASKS)


def task_names() -> list[str]:
    """The names of all tasks."""
    return list(_TASKS)


def make_task(name: str | None, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> Task:
    """The task of that name, or the one that suits the data and the model."""
    if name is None:
        name = "function" if model.kind == "function" else data.suggested_task
        if name in ("generate", "vqa") and model.kind.endswith("_classifier"):
            name = "classify"
    if name not in _TASKS:
        raise RequestError(
            f"{given('task', name)}: there is no such "
            f"task{nearest_names(name, _TASKS) or '; there are ' + ', '.join(_TASKS)}"
        )
    if model.kind == "function" and name in _BUILT_IN:
        name = "function"
    return _TASKS[name](model, data, settings)


def add_tasks(module: ModuleType) -> list[str]:
    """Add the tasks that a module defines; and return their names. A name that is taken is a `RequestError`."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Task) and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]  # fmt: skip
    for task in found:
        name = getattr(task, "name", None)
        if not isinstance(name, str) or not name:
            raise RequestError(f"{module.__file__}: the task {task.__name__} has no name")
        if name in _BUILT_IN:
            raise RequestError(f"{module.__file__}: a task is called {name}, which is one of brim's own; rename it")
        _TASKS[name] = task
    return [task.name for task in found]
