"""Files and folders: text plain or gzip, digests of content for fingerprints, folders that name a class each."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError

__all__ = [
    "BYTE_ORDER_MARK",
    "IMAGE_SUFFIXES",
    "VIDEO_SUFFIXES",
    "class_folders",
    "decoded",
    "files_below",
    "files_digest",
    "files_in",
    "has_class_folders",
    "holds_any",
    "inner_suffix",
    "lines_of",
    "read_content",
    "records_digest",
    "split_folders",
    "subfolders",
    "text_digest",
]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def inner_suffix(path: Path) -> str:
    """The suffix in lower case, without .gz: `.jsonl` for `a.jsonl` and for `a.jsonl.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def lines_of(path: Path) -> Iterator[bytes]:
    """The file's lines with their line ends. Only LF ends a line: U+2028 inside a text does not."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file):
                if number == 0 and line.startswith(_UTF_16):
                    raise RequestError(f"{path} is UTF-16; save it as UTF-8")
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RequestError(f"{path} is not a complete gzip file ({error}); copy it again") from error
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def read_content(path: Path) -> bytes:
    """The whole file."""
    return b"".join(lines_of(path))


def decoded(content: bytes, path: Path) -> str:
    """The file's text; bytes that are not UTF-8 are a `RequestError` that names the line."""
    try:
        return content.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def text_digest(parts: Iterable[bytes]) -> str:
    """The sha256 of some bytes, in parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def records_digest(records: Iterable[Any]) -> str:
    """The sha256 of JSON values, in order."""
    return text_digest(json.dumps(record, sort_keys=True).encode() + b"\n" for record in records)


def files_digest(files: Iterable[Path]) -> str:
    """A digest of the names and sizes of files, in order, each file once; a missing file has no size."""
    sizes: dict[Path, int | None] = {}
    for file in files:
        if file not in sizes:
            try:
                sizes[file] = file.stat().st_size
            except OSError:
                sizes[file] = None
    return records_digest([file.name, size] for file, size in sizes.items())


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
VIDEO_SUFFIXES = (".avi", ".mp4", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg")


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted; without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise RequestError(f"cannot read the folder {folder}: {error.strerror or error}") from error


def files_in(folder: Path) -> list[Path]:
    """The files directly in a folder, sorted; without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def holds_any(folder: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file with one of the suffixes is directly in the folder."""
    return any(_is_wanted(path, suffixes) for path in folder.iterdir())


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files with one of the suffixes in the folder and below it, sorted."""
    return sorted(path for path in folder.rglob("*") if _is_wanted(path, suffixes) and path.is_file())


def has_class_folders(root: Path, suffixes: Sequence[str]) -> bool:
    """Whether one of its folders holds files with one of the suffixes: `root/cat/1.jpg`."""
    return any(holds_any(folder, suffixes) for folder in subfolders(root))


def split_folders(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """The folders in it that hold class folders: `root/val/cat/1.jpg`."""
    return [folder for folder in subfolders(root) if has_class_folders(folder, suffixes)]


def class_folders(roots: Iterable[Path], suffixes: Sequence[str]) -> list[str]:
    """The names of the classes over all splits: folders with such files, and empty ones, which count as classes too."""
    names = {folder.name for root in roots for folder in subfolders(root) if _is_class(folder, suffixes)}
    return sorted(names)


def _is_class(folder: Path, suffixes: Sequence[str]) -> bool:
    return holds_any(folder, suffixes) or not any(folder.iterdir()) or bool(files_below(folder, suffixes))


def _is_wanted(path: Path, suffixes: Sequence[str]) -> bool:
    return path.suffix.lower() in suffixes and not path.name.startswith(".")
