"""What is installed: brim's own requirements and extras, as the package's metadata has them, and torch's build.

Nothing here imports what it asks about: versions come from metadata, torch's build from the file that torch keeps it
in. So `brim --version` answers without torch, and a library that cannot be imported still has a version.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["is_older", "read_extras", "read_libraries", "torch_build"]

PACKAGE = "brim"
# As in metadata: `altair[save]>=5.5; extra == "report"`, of older tools `altair[save] (>=5.5) ; extra == 'report'`.
REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?", re.DOTALL)
OF_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")

Library = dict[str, Any]


def read_libraries() -> list[Library] | None:
    """What brim always needs, each with the version that is here; None where brim is not installed.

    [{"name": "torch", "needs": ">=2.6", "version": "2.6.0"}]
    """
    found = _requirements()
    return None if found is None else [library for extra, library in found if extra == ""]


def read_extras() -> dict[str, Any]:
    """Each extra with what it installs; one that is made of others has their libraries too.

    {"vision": {"installed": True, "libraries": [{"name": "timm", "needs": ">=1.0.12", "version": "1.0.30"}]}}
    """
    requirements = _requirements() or []
    names = (
        [_normal(name) for name in (metadata.metadata(PACKAGE).get_all("Provides-Extra") or [])] if requirements else []
    )
    extras = {}
    for name in names:
        libraries = list({library["name"]: library for library in _libraries_of(name, requirements)}.values())
        complete = all(library["version"] is not None for library in libraries)
        extras[name] = {"installed": complete, "libraries": libraries}
    return extras


def is_older(version: str, needs: str) -> bool:
    """Whether a version is below the least one of a specifier; brim states nothing but least versions."""
    least = re.search(r">=\s*([\w.]+)", needs)
    return least is not None and _release(version) < _release(least[1])


def torch_build() -> dict[str, Any] | None:
    """Torch's version and the CUDA or ROCm that it was built for, from its own file; None where there is no torch.

    {"version": "2.6.0+cu124", "cuda": "12.4", "hip": None}
    """
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    values: dict[str, Any] = {}
    for folder in spec.submodule_search_locations:
        values |= _constants(Path(folder) / "version.py")
    version = values.get("__version__") or _version("torch")
    return {"version": version, "cuda": values.get("cuda"), "hip": values.get("hip")}


def _constants(file: Path) -> dict[str, Any]:
    """The names of a Python file that are bound to texts, numbers or None; the file is not run."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


def _requirements() -> list[tuple[str, Library]] | None:
    """Every requirement, with the extra that it is of; a requirement of brim itself has the `extras` that it names."""
    try:
        texts = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = []
    for text in texts:
        parts = REQUIREMENT.fullmatch(text.strip())
        if parts is None:
            continue
        name, inner, needs, marker = (part or "" for part in parts.groups())
        of = OF_EXTRA.search(marker)
        library = {"name": name, "needs": needs.strip(), "version": _version(name)}
        if _normal(name) == PACKAGE:
            library["extras"] = [_normal(one) for one in inner.split(",")]
        found.append((_normal(of[1]) if of else "", library))
    return found


def _libraries_of(extra: str, requirements: list[tuple[str, Library]], above: tuple[str, ...] = ()) -> list[Library]:
    own = [library for name, library in requirements if name == extra]
    inner = itertools.chain.from_iterable(library.get("extras", ()) for library in own)
    others = [_libraries_of(name, requirements, (*above, extra)) for name in inner if name not in (*above, extra)]
    return [*itertools.chain.from_iterable(others), *(library for library in own if "extras" not in library)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _release(version: str) -> tuple[int, ...]:
    """`2.6.0+cu124` as (2, 6): the numbers in front, without zeros at the end."""
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
