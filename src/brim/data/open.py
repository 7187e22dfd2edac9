"""Open a data set of any format: what `-d/--data`, `--split`, `--limit` and `--map` mean.

A format is recognised by the suffix of a file or by the contents of a folder. A new one is a file in this folder that
declares a `TableFormat` or a `SampleFormat`, and its name in `TABLES` or `SAMPLE_SETS` below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from brim.data.base import TASKS, BadRecord, Sample, SampleFormat, SampleSet, TableFormat, TaskName
from brim.data.csv_files import CSV
from brim.data.fields import find_fields
from brim.data.files import IMAGE_SUFFIXES, files_digest, holds_any, inner_suffix, records_digest, subfolders
from brim.data.hf_folder import HF_FOLDER, is_saved_folder
from brim.data.image_folders import IMAGE_FOLDER
from brim.data.json_records import JSON_RECORDS
from brim.data.parquet import PARQUET, parquet_files
from brim.data.samples import check_media, media_paths, samples_of, with_unique_ids
from brim.data.selection import stratified
from brim.data.ucf101 import UCF101
from brim.data.vqav2 import VQAV2
from brim.errors import RequestError, nearest_names
from brim.memory.collector import without_collector
from brim.settings.caller import given, named

__all__ = ["SAMPLE_SETS", "TABLES", "DataRequest", "DataSource", "find_format", "open_data"]

TABLES: tuple[TableFormat, ...] = (JSON_RECORDS, CSV, PARQUET)
SAMPLE_SETS: tuple[SampleFormat, ...] = (VQAV2, IMAGE_FOLDER, UCF101)

_RECORD_SUFFIXES = {suffix for each in TABLES for suffix in each.suffixes} - {".json", ".parquet"}
_READABLE = (
    "brim reads .jsonl, .ndjson and .json (also .gz), .csv, .tsv, .parquet files or a folder of them, folders of the "
    "datasets library, VQAv2's files, folders of images or videos by class, and UCF101"
)


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data set and how to read it.

    open_data(DataRequest(path="questions.jsonl", limit=200, mapping={"prompt": "query"}))
    """

    path: str
    split: str | None = None
    limit: int | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)  # field to column
    skip_bad: bool = False
    may_skip: bool = True  # False: no records are left out, as in training
    images: str | None = None  # the folder that relative names of images and videos start from
    task: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A file or folder, and the format it is read as."""

    format: TableFormat | SampleFormat
    path: Path


def open_data(request: DataRequest) -> SampleSet:
    """Read the data set. Records that cannot be read are a `RequestError`, or with `skip_bad` are counted in `bad`."""
    if request.limit is not None and request.limit < 1:
        raise RequestError(f"{given('limit', request.limit)}: it must be at least 1")
    with without_collector():
        whole = _read_whole(request)
        check_media(whole.samples, whole.name)
        chosen = whole.samples if request.limit is None else stratified(whole.samples, request.limit)
        facts = {
            "format": whole.format,
            **whole.facts,
            "samples": len(chosen),
            "selection": _samples_digest(chosen, whole.class_names),
            "files": files_digest(media_paths(chosen)),
        }
    return replace(whole, samples=chosen, facts=facts)


def _samples_digest(samples: Sequence[Sample], class_names: Sequence[str]) -> str:
    """A digest of what models read and what their answers are compared with."""
    asked = ([each.id, each.prompt, each.choices, each.references, len(each.images)] for each in samples)
    return records_digest([list(class_names), *asked])


def _read_whole(request: DataRequest) -> SampleSet:
    """Every sample, before the limit."""
    task, images = _checked_task(request.task), _images_folder(request.images)
    source = find_format(Path(request.path).expanduser())
    if isinstance(source.format, TableFormat):
        table = source.format.read(source.path, request.split)
        _refuse_bad(table.bad, table.name, request)
        _refuse_empty(len(table.rows), table.bad, table.name)
        whole = samples_of(table, find_fields(table, request.mapping, task), images=images, task=task)
    else:
        whole = _read_samples(source.format, source.path, request, images, task)
    _refuse_bad(whole.bad, whole.name, request)
    _refuse_empty(len(whole.samples), whole.bad, whole.name)
    return whole


def _read_samples(
    kind: SampleFormat, path: Path, request: DataRequest, images: Path | None, task: TaskName | None
) -> SampleSet:
    """The samples of a format without columns."""
    if request.mapping:
        raise RequestError(f"{named('map')}: {path} is of the format {kind.name}, which has no columns; leave it out")
    read = kind.read(path, request.split, images)
    if task is not None and task not in kind.tasks:
        raise RequestError(f"{given('task', task)}: {read.name} ({read.format}) is for {' or '.join(kind.tasks)}")
    return replace(read, samples=with_unique_ids(read.samples), suggested_task=task or read.suggested_task)


def _checked_task(task: str | None) -> TaskName | None:
    for known in TASKS:
        if task == known:
            return known
    if task is not None:
        raise RequestError(f"{given('task', task)}: there are {', '.join(TASKS)}{nearest_names(task, TASKS)}")
    return None


def _images_folder(images: str | None) -> Path | None:
    if images is None:
        return None
    folder = Path(images).expanduser()
    if not folder.is_dir():
        raise RequestError(f"{given('images', images)}: there is no such folder")
    return folder


def _refuse_bad(bad: Sequence[BadRecord], name: str, request: DataRequest) -> None:
    if bad and not request.skip_bad:
        more = f"; {len(bad)} records of {name} cannot be read" if len(bad) > 1 else ""
        raise RequestError(
            f"{bad[0].place}: {bad[0].reason}{more}; correct the data"
            + (f", or add {named('skip_bad')} to leave such records out" if request.may_skip else "")
        )


def _refuse_empty(count: int, bad: Sequence[BadRecord], name: str) -> None:
    if count == 0:
        why = f"none of its {len(bad)} records can be read; the first, {bad[0].place}: {bad[0].reason}" if bad else ""
        raise RequestError(f"{name}: {why or 'it has no records'}")


# ------------------------------------------------------------------------------------------ which format


def find_format(path: Path) -> DataSource:
    """The format of a file or folder; none, or several that fit, is a `RequestError`."""
    if path.is_dir():
        return _folder_format(path)
    if not path.exists():
        raise _no_such(path)
    for kind in SAMPLE_SETS:
        if kind.holds_all and kind.found_in(path):
            return DataSource(format=kind, path=path)
    suffix = inner_suffix(path)
    for table in TABLES:
        if suffix in table.suffixes and (table.compressible or path.suffix.lower() == suffix):
            return DataSource(format=table, path=path)
    raise RequestError(f"{path}: brim does not read a {path.suffix or 'file without suffix'}; {_READABLE}")


def _folder_format(folder: Path) -> DataSource:
    if is_saved_folder(folder):
        return DataSource(format=HF_FOLDER, path=folder)
    for kind in SAMPLE_SETS:
        if kind.holds_all and kind.found_in(folder):
            return DataSource(format=kind, path=folder)
    tables = _tables(folder)
    samples = [DataSource(format=kind, path=folder) for kind in SAMPLE_SETS if kind.found_in(folder)]
    if tables and (len(subfolders(folder)) < 2 or tables[0].path.stem == "metadata"):
        samples = []  # the one folder beside a table holds its images
    found = tables + samples or _documents(folder)
    if len(found) > 1:
        formats = " or as ".join(each.format.name for each in found)
        raise RequestError(
            f"{folder} could be read as {formats}; give the file that is meant, or keep them in separate folders"
        )
    if not found:
        raise RequestError(_nothing_in(folder))
    return found[0]


def _tables(folder: Path) -> list[DataSource]:
    """The tables in a folder: one source at most for several files of one kind."""
    records = [path for path in _files(folder) if inner_suffix(path) in _RECORD_SUFFIXES]
    if _is_hub_layout(folder) or len(records) > 1:
        return [DataSource(format=HF_FOLDER, path=folder)]
    if parquet_files(folder):
        return [DataSource(format=PARQUET, path=folder)]
    return [find_format(path) for path in records]


def _documents(folder: Path) -> list[DataSource]:
    """A single .json file; beside other data it usually describes them."""
    documents = [path for path in _files(folder) if inner_suffix(path) == ".json"]
    return [find_format(documents[0])] if len(documents) == 1 else []


def _is_hub_layout(folder: Path) -> bool:
    """Whether file names contain their split, as in data sets of the hub: `data/test-00000-of-00001.parquet`."""
    inside = [*_files(folder), *(_files(folder / "data") if (folder / "data").is_dir() else [])]
    readable = [path for path in inside if inner_suffix(path) in _RECORD_SUFFIXES | {".parquet", ".arrow"}]
    return any("-of-" in path.name or path.parent != folder for path in readable)


def _nothing_in(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir())[:5]]
    if not names:
        return f"{folder} is an empty folder; {_READABLE}"
    if holds_any(folder, IMAGE_SUFFIXES):
        return f"{folder} holds images, but no folder for each class and no table that names them; {_READABLE}"
    return f"{folder} holds no data that brim can read ({', '.join(names)} …); {_READABLE}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _no_such(path: Path) -> RequestError:
    if not path.parent.is_dir():
        hint = "brim downloads nothing: save the data set first and give its path"
        return RequestError(f"{given('data', path)}: there is no such file or folder; {hint}")
    near = nearest_names(path.name, (other.name for other in path.parent.iterdir()))
    return RequestError(f"{given('data', path)}: there is no such file or folder{near}")
