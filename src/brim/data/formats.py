"""Every format of data, and how the format of a file or folder is recognised.

To add a format, write a file in this folder that declares a `TableFormat` or a `SampleFormat`: it is found there, and
errors list it. `tests/data/test_formats.py` keeps the row of docs/interface.md current.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brim.data.base import SampleFormat, TableFormat
from brim.data.files import IMAGE_SUFFIXES, files_in, holds_any, inner_suffix, subfolders
from brim.data.hf_folder import HF_FOLDER
from brim.errors import RequestError, nearest_names
from brim.settings.caller import given
from brim.storage.python_files import submodules

__all__ = ["FORMATS", "DataSource", "find_format", "readable_formats"]


def _declared() -> Iterator[TableFormat | SampleFormat]:
    """The formats of this folder's files: tables in files first, then folders of tables, then folders of samples."""
    files = submodules("brim.data", without=("formats", "open"))
    values = {id(value): value for file in files for value in vars(file).values()}.values()
    found = [value for value in values if isinstance(value, TableFormat | SampleFormat)]
    ranks = {each.name: (isinstance(each, SampleFormat), not getattr(each, "suffixes", ())) for each in found}
    yield from sorted(found, key=lambda each: (ranks[each.name], each.title.lower()))


FORMATS = tuple(_declared())

_TABLES = [each for each in FORMATS if isinstance(each, TableFormat)]
_SAMPLES = [each for each in FORMATS if isinstance(each, SampleFormat)]
_DOCUMENT_SUFFIXES = {suffix for each in _TABLES for suffix in each.document_suffixes}
_TABLE_SUFFIXES = {suffix for each in _TABLES for suffix in each.suffixes}
_HUB_SUFFIXES = _TABLE_SUFFIXES | {".arrow"}  # of tables that the datasets library finds


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A file or folder, and the format it is read as."""

    format: TableFormat | SampleFormat
    path: Path


def readable_formats() -> str:
    """All formats in one line, with the suffixes of their files."""
    return ", ".join(each.title + _suffixes_of(each) for each in FORMATS)


def _suffixes_of(kind: TableFormat | SampleFormat) -> str:
    if isinstance(kind, SampleFormat) or not kind.suffixes:
        return ""
    also = ["also .gz"] if kind.compressible else []
    return f" ({', '.join([*kind.suffixes, *kind.document_suffixes, *also])})"


def find_format(path: Path) -> DataSource:
    """The format of a file or folder; none, or several that fit, is a `RequestError`."""
    if not path.exists():
        raise _no_such(path)
    for kind in FORMATS:
        if kind.owns(path):
            return DataSource(format=kind, path=path)
    return _folder_format(path) if path.is_dir() else _file_format(path)


def _file_format(path: Path) -> DataSource:
    suffix = inner_suffix(path)
    for table in _TABLES:
        known = suffix in (*table.suffixes, *table.document_suffixes)
        if known and (table.compressible or path.suffix.lower() == suffix):
            return DataSource(format=table, path=path)
    refused = path.suffix or "file without suffix"
    raise RequestError(f"{path}: brim does not read a {refused}; brim reads {readable_formats()}")


def _folder_format(folder: Path) -> DataSource:
    tables = _tables(folder)
    samples = [DataSource(format=kind, path=folder) for kind in _SAMPLES if kind.found_in(folder)]
    if tables and (len(subfolders(folder)) < 2 or tables[0].path.stem == "metadata"):
        samples = []  # the one folder beside a table holds its images
    found = tables + samples or _documents(folder)
    if len(found) > 1:
        formats = " or as ".join(each.format.name for each in found)
        raise RequestError(
            f"{folder} could be read as {formats}; give the file that is meant, or keep them in separate folders"
        )
    if not found:
        raise RequestError(f"{_nothing_in(folder)}; brim reads {readable_formats()}")
    return found[0]


def _tables(folder: Path) -> list[DataSource]:
    """The tables in a folder: one source at most for several files of one format."""
    whole = [each for each in _TABLES if each.reads_folders and holds_any(folder, each.suffixes)]
    single = {suffix for each in _TABLES if not each.reads_folders for suffix in each.suffixes}
    files = [path for path in files_in(folder) if inner_suffix(path) in single]
    if _is_hub_layout(folder) or len(files) > 1:
        return [DataSource(format=HF_FOLDER, path=folder)]
    return [DataSource(format=each, path=folder) for each in whole] or [_file_format(path) for path in files]


def _documents(folder: Path) -> list[DataSource]:
    """A single .json file; beside other data it usually describes them."""
    documents = [path for path in files_in(folder) if inner_suffix(path) in _DOCUMENT_SUFFIXES]
    return [_file_format(documents[0])] if len(documents) == 1 else []


def _is_hub_layout(folder: Path) -> bool:
    """Whether file names contain their split, as in data sets of the hub: `data/test-00000-of-00001.parquet`."""
    inside = [*files_in(folder), *(files_in(folder / "data") if (folder / "data").is_dir() else [])]
    readable = [path for path in inside if inner_suffix(path) in _HUB_SUFFIXES]
    return any("-of-" in path.name or path.parent != folder for path in readable)


def _nothing_in(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir())[:5]]
    if not names:
        return f"{folder} is an empty folder"
    if holds_any(folder, IMAGE_SUFFIXES):
        return f"{folder} holds images, but no folder for each class and no table that names them"
    return f"{folder} holds no data that brim can read ({', '.join(names)} …)"


def _no_such(path: Path) -> RequestError:
    if not path.parent.is_dir():
        hint = "brim downloads nothing: save the data set first and give its path"
        return RequestError(f"{given('data', path)}: there is no such file or folder; {hint}")
    near = nearest_names(path.name, (other.name for other in path.parent.iterdir()))
    return RequestError(f"{given('data', path)}: there is no such file or folder{near}")
