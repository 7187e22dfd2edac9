"""Which format a path holds: by the suffix of a file, by what lies in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from brim.data.class_folders import IMAGE_SUFFIXES, holds_any, subfolders
from brim.data.hf_folder import is_saved_folder
from brim.data.image_folder import is_image_folder
from brim.data.parquet import parquet_files
from brim.data.text_files import inner_suffix
from brim.data.ucf101 import is_video_folder
from brim.data.vqav2 import is_questions_file, question_files
from brim.errors import RequestError, nearest_names
from brim.settings.caller import given

__all__ = ["Found", "find_format"]

_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_RECORDS = (".jsonl", ".ndjson", ".csv", ".tsv")
_READ = (
    "brim reads .jsonl, .ndjson and .json (also .gz), .csv, .tsv, .parquet files or a folder of them, folders of the "
    "datasets library, VQAv2's files, folders of images or videos by class, and UCF101"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A format, and the file or folder that it was found in."""

    format: str
    path: Path


def find_format(path: Path) -> Found:
    """The format of what lies at the path; none, or two at once, is a `RequestError`."""
    if path.is_dir():
        return _folder_format(path)
    if not path.exists():
        raise _no_such(path)
    if is_questions_file(path):
        return Found(format="vqav2", path=path)
    name = _BY_SUFFIX.get(inner_suffix(path))
    if name is None or (name == "parquet" and path.suffix.lower() == ".gz"):
        raise RequestError(f"{path}: a {path.suffix or 'file without suffix'} is nothing that brim can read; {_READ}")
    return Found(format=name, path=path)


def _folder_format(folder: Path) -> Found:
    if is_saved_folder(folder):
        return Found(format="hf", path=folder)
    if question_files(folder):
        return Found(format="vqav2", path=folder)
    tables, classes = _tables(folder), _classes(folder)
    if tables and (len(subfolders(folder)) < 2 or tables[0].path.stem == "metadata"):
        classes = []  # the one folder beside a table holds its images
    found = tables + classes or _documents(folder)
    if len(found) > 1:
        formats = " or as ".join(each.format for each in found)
        raise RequestError(
            f"{folder} could be read as {formats}; give the file that is meant, or keep them in folders of their own"
        )
    if not found:
        raise RequestError(_nothing_in(folder))
    return found[0]


def _tables(folder: Path) -> list[Found]:
    """How the tables in a folder are read: at most one way."""
    files = _files(folder)
    records = [path for path in files if inner_suffix(path) in _RECORDS]
    if _is_hub_layout(folder) or len(records) > 1:
        return [Found(format="hf", path=folder)]
    if parquet_files(folder):
        return [Found(format="parquet", path=folder)]
    return [find_format(path) for path in records]


def _documents(folder: Path) -> list[Found]:
    """A JSON document that lies there alone; beside other data it more often describes them."""
    documents = [path for path in _files(folder) if inner_suffix(path) == ".json"]
    return [find_format(documents[0])] if len(documents) == 1 else []


def _classes(folder: Path) -> list[Found]:
    """How the class folders in a folder are read: as images, as videos, or both."""
    images = [Found(format="image_folder", path=folder)] if is_image_folder(folder) else []
    return images + ([Found(format="ucf101", path=folder)] if is_video_folder(folder) else [])


def _is_hub_layout(folder: Path) -> bool:
    """Whether parquet or other files carry their split, as the hub lays data sets out: `data/test-00000-of-00001`."""
    inside = [*_files(folder), *(_files(folder / "data") if (folder / "data").is_dir() else [])]
    readable = [path for path in inside if inner_suffix(path) in (*_RECORDS, ".parquet", ".arrow")]
    return any("-of-" in path.name or path.parent != folder for path in readable)


def _nothing_in(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir())[:5]]
    if not names:
        return f"{folder} is an empty folder; {_READ}"
    if holds_any(folder, IMAGE_SUFFIXES):
        return f"{folder} holds images, but no folder for each class and no table that names them; {_READ}"
    return f"{folder} holds no data that brim can read ({', '.join(names)} …); {_READ}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _no_such(path: Path) -> RequestError:
    if not path.parent.is_dir():
        hint = "brim downloads nothing: save the data set first and give its path"
        return RequestError(f"{given('data', path)}: there is no such file or folder; {hint}")
    near = nearest_names(path.name, (other.name for other in path.parent.iterdir()))
    return RequestError(f"{given('data', path)}: there is no such file or folder{near}")
