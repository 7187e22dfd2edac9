"""The layer table of docs/architecture.md, held: who may import whom, and which file may touch which library.

Each rule is one test over all files; its failure lists every offender.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import brim
from tests.conftest import LONGEST_FILES

SOURCE = Path(__file__).resolve().parents[1] / "src" / "brim"

# Top first: a file may import from its own layer and from those before it, never from those after it.
LAYERS = (
    "errors", "records", "settings", "units", "intervals", "storage", "ranks", "monitor", "memory", "diagnosis",
    "generation", "workloads", "sizing", "forecasting", "running", "searching", "models", "data", "metrics", "tasks",
    "comparing", "evaluation", "planning", "profiling", "training", "molecules",
    "sweeps", "demo", "advice", "reporting", "integrations", "cli",
)  # fmt: skip

# Not layers: the package's front, which names what is public and calls it, and `python -m brim`.
FRONT = ("__init__.py", "__main__.py", "api.py", "calls.py")

# A vendor library and where it may be imported: under one folder, in one file, or in any single file.
QUARANTINE = {
    "pynvml": ("monitor/nvml.py",),
    "torch.distributed": ("ranks/",),
    "transformers": ("models/hf_", "generation/", "demo/model.py", "integrations/transformers.py"),
    "PIL": ("data/images.py", "demo/digitboard.py"),
    "altair": ("reporting/drawing.py",),
    "tensorboard": ("monitor/loggers/tensorboard_logger.py",),
    "torch.utils.tensorboard": ("monitor/loggers/tensorboard_logger.py",),
    "mlflow": ("monitor/loggers/mlflow_logger.py",),
    "wandb": ("monitor/loggers/wandb_logger.py",),
    "lm_eval": ("integrations/lm_eval",),
    "lmms_eval": ("integrations/lmms_eval",),
}
ONE_FILE_EACH = (
    "torchvision", "timm", "sacrebleu", "rouge_score", "ray", "submitit", "av", "datasets", "pyarrow", "yaml",
    "vl_convert", "jinja2",
)  # fmt: skip
WITHOUT_TORCH = (
    "settings/", "storage/", "running/", "metrics/", "data/", "records.py", "errors.py",
    "sizing/", "forecasting/workspaces.py",
    "forecasting/allocator.py", "forecasting/events.py", "forecasting/extrapolate.py", "forecasting/gpus.py",
    "forecasting/overheads.py", "planning/forecast_base.py", "planning/forecast_check.py",
    "planning/forecast_markdown.py", "__init__.py", "api.py", "calls.py", "cli/", "memory/failures.py", "reporting/",
    "units.py", "intervals.py", "comparing/", "diagnosis/",
)  # fmt: skip

# What a command may ask the library for when it runs: its one function, and what shows the answer.
ENTRIES = (
    "brim.cli.", "brim.settings.", "brim.errors", "brim.records", "brim.units", "brim.reporting.", "brim.advice.",
    "brim.storage.files",
    "brim.storage.run_lock", "brim.ranks.world", "brim.planning.", "brim.evaluation.run", "brim.evaluation.compare",
    "brim.profiling.run",
    "brim.profiling.explain_speed", "brim.training.seeds.run", "brim.training.compare", "brim.molecules.run",
    "brim.molecules.encoding", "brim.sweeps.prepare", "brim.sweeps.preview", "brim.sweeps.results",
    "brim.monitor.snapshot", "brim.monitor.sampler", "brim.diagnosis.examine",
    "brim.integrations.lm_eval_run", "brim.integrations.harness_work",
    "brim.models.build", "brim.forecasting.gpus", "brim.sizing.plans", "brim.demo.model",
)  # fmt: skip
MOST_STATEMENTS = 40  # of a function of the command line
COMMAND_FILES = (
    "find", "evaluate", "lm_eval", "profile", "forecast", "train", "sweep", "ood", "encode", "knobs", "check", "advise",
    "report", "demo", "cache", "watch", "doctor",
)  # fmt: skip


@functools.cache
def source_files() -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that the tree imports, also inside functions; `from a import b` counts as a and as a.b."""
    for node in ast.walk(tree):
        yield from imported_modules_of(node)


def imported_modules_of(node: ast.AST) -> Iterator[str]:
    """What this statement itself imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
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


def without_empty(offences: dict[str, list[str]]) -> dict[str, list[str]]:
    """The files that break a rule, with what they do."""
    return {file: found for file, found in offences.items() if found}


def imported_on_import(tree: ast.AST) -> Iterator[str]:
    """What the tree imports when it is imported itself: not in functions, nor for a type checker alone."""
    for node in ast.iter_child_nodes(tree):
        yield from imported_modules_of(node)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not later and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported_on_import(node)


def users_of(library: str) -> list[str]:
    return [file for file in source_files() if is_of(library, imports_of(file))]


def test_every_file_of_the_package_stands_in_a_layer_of_the_table() -> None:
    strangers = [file for file in source_files() if file not in FRONT and layer_of(file) not in LAYERS]
    assert strangers == []


def test_a_file_imports_only_from_its_own_layer_and_those_above() -> None:
    layered = [file for file in source_files() if file not in FRONT]
    offenders = {file: forbidden_imports(file, parsed(file)) for file in layered}
    assert without_empty(offenders) == {}


def test_the_check_sees_imports_inside_functions_and_of_whole_modules() -> None:
    hidden = ast.parse("def late():\n    from brim.searching.find import find_plan\n")
    assert forbidden_imports("memory/devices.py", hidden) == ["brim.searching.find", "brim.searching.find.find_plan"]
    assert forbidden_imports("memory/devices.py", ast.parse("from brim import cli")) == ["brim.cli"]
    assert forbidden_imports("cli/find.py", hidden) == []


def test_a_library_is_imported_only_where_the_table_says() -> None:
    assert [library for library in QUARANTINE if not users_of(library)] == []
    strays = {
        library: [file for file in users_of(library) if not file.startswith(homes)]
        for library, homes in QUARANTINE.items()
    }
    assert without_empty(strays) == {}


def test_a_model_library_is_imported_in_exactly_one_file() -> None:
    users = {library: users_of(library) for library in ONE_FILE_EACH}
    assert {library: files for library, files in users.items() if len(files) != 1} == {}


def test_a_torch_free_file_imports_no_torch_when_it_is_imported() -> None:
    torch_free = [file for file in source_files() if file.startswith(WITHOUT_TORCH)]
    assert [file for file in torch_free if is_of("torch", imported_on_import(parsed(file)))] == []


def test_the_check_for_torch_passes_over_what_runs_later_and_sees_the_rest() -> None:
    later = ast.parse("if TYPE_CHECKING:\n    import torch\ndef late():\n    import torch\n")
    assert not is_of("torch", imported_on_import(later))
    assert is_of("torch", imported_on_import(ast.parse("try:\n    from torch import nn\nfinally:\n    pass")))
    assert not is_of("torch", imported_modules(ast.parse("import torchvision")))


def test_the_table_of_layers_has_every_folder_in_this_order() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| layer | ")[2].partition("\n\n")[0]
    assert tuple(name.removesuffix(".py").strip("/") for name in re.findall(r"^\| `(\S+)`", table, re.M)) == LAYERS
    folders = re.findall(r"^\| `([a-z/]+/)` \|", page.partition("| folder | ")[2].partition("\n\n")[0], re.M)
    assert [folder for folder in folders if not (SOURCE.parents[1] / folder).is_dir()] == []
    assert folders


def private_imports(names: Iterable[str]) -> list[str]:
    return [name for name in names if re.search(r"^brim\b.*\._(?!_)", name)]


def test_what_one_file_takes_from_another_is_public() -> None:
    assert without_empty({file: private_imports(imports_of(file)) for file in source_files()}) == {}
    assert private_imports(["brim.memory.devices._parse", "brim.__version__", "torch._C"]) == [
        "brim.memory.devices._parse"
    ]


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


def settings_declared(file: str, tree: ast.AST) -> list[str]:
    """What only settings/ may use: the classes that declare one, and those of typer, which one file of cli/ makes."""
    declaring = {"brim.settings.declare.Setting", "brim.settings.declare.Key"}.intersection(imported_modules(tree))
    by_hand = {"typer.Option", "typer.Argument"}.intersection(calls_in(tree))
    return sorted(declaring | (set() if file in ("cli/adapter.py", "cli/main.py") else by_hand))  # main has --version


def test_a_setting_is_declared_in_settings_only() -> None:
    others = [file for file in source_files() if not file.startswith("settings/")]
    assert without_empty({file: settings_declared(file, parsed(file)) for file in others}) == {}


def test_what_a_command_takes_is_a_class_of_settings() -> None:
    """A dataclass whose fields a caller fills in, for a command or for the function of the same name."""
    taken = ("EvalRequest", "ProfileRequest", "TrainRequest", "SweepRequest", "OodRequest", "EncodeRequest")
    homes = class_homes((file, parsed(file)) for file in source_files())
    elsewhere = {name: [file for file in homes[name] if not file.startswith("settings/")] for name in taken}
    assert without_empty(elsewhere) == {}


def test_the_check_sees_a_setting_that_is_declared_elsewhere() -> None:
    by_hand = ast.parse("x = Annotated[int, typer.Option('--x')]")
    assert settings_declared("cli/find.py", by_hand) == ["typer.Option"]
    assert settings_declared("cli/adapter.py", by_hand) == []
    declaring = ast.parse("from brim.settings.declare import Setting")
    assert settings_declared("cli/adapter.py", declaring) == ["brim.settings.declare.Setting"]


def beyond_its_entries(tree: ast.AST) -> list[str]:
    """What a command asks the library for beside its one function, and what it does beside parsing and printing.

    From the rest of the library it takes classes alone: the listener that it draws with, records that it shows.
    """
    functions = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("brim.")
        for alias in node.names
        if not f"{node.module}.".startswith(ENTRIES) and not alias.name[0].isupper()
    ]
    work = [type(node).__name__ for node in ast.walk(tree) if isinstance(node, ast.While)]
    work += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    return sorted(functions + work)


def test_a_command_only_parses_and_prints() -> None:
    commands = [f"cli/{name}.py" for name in COMMAND_FILES]
    assert without_empty({file: beyond_its_entries(parsed(file)) for file in commands}) == {}


def test_the_check_sees_a_command_that_does_the_work_itself() -> None:
    working = ast.parse("def run():\n    from brim.memory import devices\n    while True:\n        pass\n")
    assert beyond_its_entries(working) == ["While", "brim.memory.devices"]


def test_functions_of_the_command_line_are_short() -> None:
    functions = {
        f"{file}: {node.name}": sum(isinstance(inner, ast.stmt) for inner in ast.walk(node))
        for file in source_files()
        if file.startswith("cli/")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: count for name, count in functions.items() if count > MOST_STATEMENTS} == {}


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


DECIDING = (
    "Evidence",
    "FastestSizer",
    "LargestSizer",
    "LiveSizer",
    "PoolSizer",
)  # made in sizing/ alone, by what it is asked for


def test_nothing_outside_sizing_decides_a_size() -> None:
    others = [file for file in source_files() if not file.startswith("sizing/")]
    offenders = {file: sorted({*DECIDING}.intersection(calls_in(parsed(file)))) for file in others}
    assert without_empty(offenders) == {}
    assert [file for file in others if "brim.sizing.constants" in imports_of(file)] == []


def test_files_of_tests_that_start_first_are_there() -> None:
    assert [file for file in LONGEST_FILES if not (SOURCE.parents[1] / file).is_file()] == []


# ------------------------------------------------------------------------------------------------ names


def class_homes(files: Iterable[tuple[str, ast.AST]]) -> dict[str, list[str]]:
    """Each class name, and the files that define a class of that name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file, tree in files:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    return homes


def shared_names(homes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Public class names that are defined more than once."""
    return {name: files for name, files in homes.items() if len(files) > 1 and not name.startswith("_")}


def test_a_class_name_means_one_thing() -> None:
    shared = shared_names(class_homes((file, parsed(file)) for file in source_files()))
    assert shared == {}


def test_the_check_sees_a_class_name_that_is_used_twice() -> None:
    one, two = ast.parse("class Found: ...\nclass _Run: ..."), ast.parse("class Found: ...\nclass _Run: ...")
    assert shared_names(class_homes([("a.py", one), ("b.py", two)])) == {"Found": ["a.py", "b.py"]}
