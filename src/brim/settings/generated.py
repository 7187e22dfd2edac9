"""Every file that is written from the declarations.

    python -m brim.settings.generated       # in a clone of the repository

`brim/api.py`, the JSON Schemas and the tables of the docs; a test keeps each of them current.
"""

from __future__ import annotations

from pathlib import Path

from brim.settings.python_functions import python_module
from brim.settings.schemas import schemas
from brim.settings.tables import settings_page, with_keys

__all__ = ["generated_files"]

_PACKAGE = Path(__file__).parents[1]


def generated_files(package: Path = _PACKAGE) -> dict[Path, str]:
    """What each file should hold; those of the docs where there is a clone around the package."""
    files = {package / "api.py": python_module()}
    files |= {package / "settings" / "schemas" / name: text for name, text in schemas().items()}
    docs = package.parents[1] / "docs"
    if docs.is_dir():
        files[docs / "settings.md"] = settings_page()
        training = docs / "training.md"
        files[training] = with_keys(training.read_text(encoding="utf-8"))
    return files


if __name__ == "__main__":
    for _path, _text in generated_files().items():
        _path.parent.mkdir(exist_ok=True)
        _path.write_text(_text, encoding="utf-8")
