"""Folders that name a class each: `root/cat/1.jpg`, or with splits `root/val/cat/1.jpg`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from brim.errors import RequestError

__all__ = [
    "IMAGE_SUFFIXES", "VIDEO_SUFFIXES", "class_folders", "files_below", "has_class_folders", "holds_any",
    "split_folders", "subfolders",
]  # fmt: skip

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
VIDEO_SUFFIXES = (".avi", ".mp4", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg")


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by name; hidden ones are left out."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise RequestError(f"cannot read the folder {folder}: {error.strerror or error}") from error


def holds_any(folder: Path, suffixes: Sequence[str]) -> bool:
    """Whether such a file lies directly in the folder."""
    return any(_is_wanted(path, suffixes) for path in folder.iterdir())


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Such files in the folder and below it, by name."""
    return sorted(path for path in folder.rglob("*") if _is_wanted(path, suffixes) and path.is_file())


def has_class_folders(root: Path, suffixes: Sequence[str]) -> bool:
    """Whether one of the folders in it holds such files."""
    return any(holds_any(folder, suffixes) for folder in subfolders(root))


def split_folders(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """The folders in it that hold class folders in turn."""
    return [folder for folder in subfolders(root) if has_class_folders(folder, suffixes)]


def class_folders(roots: Iterable[Path], suffixes: Sequence[str]) -> list[str]:
    """The names of the classes over all splits: of folders with such files, and of empty ones, which keep the count."""
    names = {folder.name for root in roots for folder in subfolders(root) if _is_class(folder, suffixes)}
    return sorted(names)


def _is_class(folder: Path, suffixes: Sequence[str]) -> bool:
    return holds_any(folder, suffixes) or not any(folder.iterdir()) or bool(files_below(folder, suffixes))


def _is_wanted(path: Path, suffixes: Sequence[str]) -> bool:
    return path.suffix.lower() in suffixes and not path.name.startswith(".")
