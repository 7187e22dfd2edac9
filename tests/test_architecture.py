"""The layer table of docs/architecture.md, held: who may import whom, and which file may touch which library."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import brim

SOURCE = Path(__file__).resolve().parents[1] / "src" / "brim"

# Top first: a file may import from its own layer and from those before it, never from those after it.
LAYERS = (
    "errors", "records", "settings", "storage", "ranks", "monitor", "memory", "generation", "workloads", "sizing",
    "forecasting", "running", "searching", "models", "data", "metrics", "advice", "evaluation", "planning",
    "profiling", "training",
    "sweeps", "demo", "reporting", "cli",
)  # fmt: skip

# Not layers: the package's front, which names what is public and calls it, and `python -m brim`.
FRONT = ("__init__.py", "__main__.py", "api.py", "calls.py")

# A vendor library and where it may be imported: under one folder, in one file, or in any single file.
QUARANTINE = {
    "pynvml": ("monitor/nvml.py",),
    "torch.distributed": ("ranks/",),
    "transformers": ("models/hf_", "generation/", "demo/model.py"),
    "PIL": ("data/images.py", "demo/digitboard.py"),
    "altair": ("reporting/drawing.py",),
}
ONE_FILE_EACH = (
    "torchvision", "timm", "sacrebleu", "rouge_score", "ray", "submitit", "av", "datasets", "pyarrow", "yaml",
    "vl_convert", "jinja2",
)  # fmt: skip
WITHOUT_TORCH = (
    "settings/", "storage/", "running/", "metrics/", "data/", "records.py", "errors.py",
    "sizing/", "forecasting/attention_rules.py",
    "forecasting/allocator.py", "forecasting/events.py", "forecasting/extrapolate.py", "forecasting/gpus.py",
    "forecasting/overheads.py", "__init__.py", "api.py", "calls.py", "cli/", "memory/failures.py", "reporting/",
)  # fmt: skip

# What a command may ask the library for when it runs: its one function, and what shows the answer.
ENTRIES = (
    "brim.cli.", "brim.settings.", "brim.errors", "brim.reporting.", "brim.storage.files", "brim.storage.run_lock",
    "brim.ranks.world", "brim.planning.", "brim.evaluation.api", "brim.evaluation.compare", "brim.profiling.api",
    "brim.profiling.explain_speed", "brim.training.api", "brim.training.compare", "brim.training.preference.run",
    "brim.training.preference.encode_file", "brim.sweeps.prepare", "brim.sweeps.preview", "brim.sweeps.summary",
    "brim.models.build", "brim.forecasting.gpus", "brim.sizing.plans", "brim.demo.shipped_profile",
)  # fmt: skip
MOST_STATEMENTS = 40  # of a function of the command line
COMMAND_FILES = (
    "find", "evaluate", "profile", "forecast", "train", "sweep", "ood", "encode", "knobs", "report", "demo", "cache",
)  # fmt: skip


def source_files() -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that the tree imports, also inside functions; `from a import b` counts as a and as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"), filename=file)


@functools.cache
def imports_of(file: str) -> frozenset[str]:
    return frozenset(imported_modules(parsed(file)))


def layer_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def forbidden_imports(file: str, tree: ast.AST) -> list[str]:
    """Imports of brim that point down the table."""
    own = LAYERS.index(layer_of(file))
    below = set(LAYERS[own + 1 :])
    names = (name.split(".") for name in imported_modules(tree))
    return [".".join(parts) for parts in names if parts[0] == "brim" and len(parts) > 1 and parts[1] in below]


def is_of(library: str, names: Iterable[str]) -> bool:
    return any(name == library or name.startswith(library + ".") for name in names)


def module_level(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without what only a type checker runs."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return Strip().visit(tree)


def test_every_file_of_the_package_stands_in_a_layer_of_the_table() -> None:
    strangers = [file for file in source_files() if file not in FRONT and layer_of(file) not in LAYERS]
    assert strangers == []


@pytest.mark.parametrize("file", [file for file in source_files() if file not in FRONT])
def test_a_file_imports_only_from_its_own_layer_and_those_above(file: str) -> None:
    assert forbidden_imports(file, parsed(file)) == []


def test_the_check_sees_imports_inside_functions_and_of_whole_modules() -> None:
    hidden = ast.parse("def late():\n    from brim.searching.find import find_plan\n")
    assert forbidden_imports("memory/devices.py", hidden) == ["brim.searching.find", "brim.searching.find.find_plan"]
    assert forbidden_imports("memory/devices.py", ast.parse("from brim import cli")) == ["brim.cli"]
    assert forbidden_imports("cli/find.py", hidden) == []


@pytest.mark.parametrize(("library", "home"), QUARANTINE.items())
def test_a_library_is_imported_only_where_the_table_says(library: str, home: tuple[str, ...]) -> None:
    users = [file for file in source_files() if is_of(library, imports_of(file))]
    assert users
    assert [file for file in users if not file.startswith(home)] == []


@pytest.mark.parametrize("library", ONE_FILE_EACH)
def test_a_model_library_is_imported_in_exactly_one_file(library: str) -> None:
    assert len([file for file in source_files() if is_of(library, imports_of(file))]) == 1


@pytest.mark.parametrize("file", [file for file in source_files() if file.startswith(WITHOUT_TORCH)])
def test_a_torch_free_file_imports_no_torch_when_it_is_imported(file: str) -> None:
    assert not is_of("torch", imported_modules(module_level(parsed(file))))


@pytest.mark.parametrize("file", source_files())
def test_what_one_file_takes_from_another_is_public(file: str) -> None:
    assert [name for name in imports_of(file) if re.search(r"^brim\b.*\._(?!_)", name)] == []


def test_no_import_is_relative() -> None:
    relative = [
        file
        for file in source_files()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


# ------------------------------------------------------------------------------------------------ settings


def calls_in(tree: ast.AST) -> Iterator[str]:
    """What is called in a tree, as it is written: `Setting`, `typer.Option`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("file", [file for file in source_files() if not file.startswith("settings/")])
def test_a_setting_is_declared_in_settings_only(file: str) -> None:
    assert imports_of(file).isdisjoint({"brim.settings.declare.Setting", "brim.settings.declare.Key"})
    made = set(calls_in(parsed(file)))
    if file not in ("cli/adapter.py", "cli/main.py"):  # the last has --version
        assert made.isdisjoint({"typer.Option", "typer.Argument"})


@pytest.mark.parametrize("file", [file for file in source_files() if not file.startswith("settings/")])
def test_what_a_command_takes_is_a_class_of_settings(file: str) -> None:
    """A dataclass whose fields a caller fills in, for a command or for the function of the same name."""
    taken = ("EvalRequest", "ProfileRequest", "TrainRequest", "SweepRequest", "DpoRequest", "EncodeRequest")
    classes = [node.name for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef)]
    assert not set(classes).intersection(taken)


def test_the_check_sees_a_setting_that_is_declared_elsewhere() -> None:
    assert "typer.Option" in calls_in(ast.parse("x = Annotated[int, typer.Option('--x')]"))


@pytest.mark.parametrize("name", COMMAND_FILES)
def test_a_command_only_parses_and_prints(name: str) -> None:
    tree = parsed(f"cli/{name}.py")
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in imported_modules(node)
    }
    used = {module for module in imported_modules(tree) if module.startswith("brim.")} - typing_only
    assert [module for module in used if not module.startswith(ENTRIES)] == []
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.While))]


@pytest.mark.parametrize("file", [file for file in source_files() if file.startswith("cli/")])
def test_functions_of_the_command_line_are_short(file: str) -> None:
    functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    statements = {one.name: sum(isinstance(inner, ast.stmt) for inner in ast.walk(one)) for one in functions}
    long = {name: count for name, count in statements.items() if count > MOST_STATEMENTS}
    assert long == {}


def test_no_public_signature_takes_anything() -> None:
    """No `**settings: Any`, which neither an editor nor mypy can check."""
    loose = []
    for name in brim.__all__:
        value = getattr(brim, name)
        for owner, function in [(name, value), *vars(value).items()] if inspect.isclass(value) else [(name, value)]:
            if inspect.isfunction(function) and not str(owner).startswith("_"):
                kinds = inspect.signature(function).parameters.values()
                loose += [f"{name}.{owner}" for one in kinds if one.kind is one.VAR_KEYWORD]
    assert loose == []


DECIDING = ("Evidence", "FastestSizer", "LargestSizer", "LiveSizer")  # made in sizing/ alone, by what it is asked for


@pytest.mark.parametrize("file", [file for file in source_files() if not file.startswith("sizing/")])
def test_nothing_outside_sizing_decides_a_size(file: str) -> None:
    calls = (node.func for node in ast.walk(parsed(file)) if isinstance(node, ast.Call))
    assert {call.id for call in calls if isinstance(call, ast.Name)}.isdisjoint(DECIDING)
    assert "brim.sizing.constants" not in imports_of(file)
