"""Open a data set of any format: what `-d/--data`, `--split`, `--limit` and `--map` mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from brim.data.base import TASKS, BadRecord, SampleSet, Task
from brim.data.csv_files import read_csv
from brim.data.detect import Found, find_format
from brim.data.fields import find_fields
from brim.data.hf_folder import read_hf_folder
from brim.data.identity import files_digest, samples_digest
from brim.data.image_folder import read_image_folder
from brim.data.jsonl import read_json_records
from brim.data.limit import stratified
from brim.data.media import check_media, media_paths
from brim.data.parquet import parquet_files, read_parquet
from brim.data.samples import samples_of, with_unique_ids
from brim.data.splits import refuse_split
from brim.data.table import Table
from brim.data.ucf101 import read_ucf101
from brim.data.vqav2 import read_vqav2
from brim.errors import RequestError, nearest_names
from brim.memory.collector import without_collector
from brim.settings.caller import given, named

__all__ = ["DataRequest", "open_data"]


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data set as asked for.

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
            "selection": samples_digest(chosen, whole.class_names),
            "files": files_digest(media_paths(chosen)),
        }
    return replace(whole, samples=chosen, facts=facts)


def _read_whole(request: DataRequest) -> SampleSet:
    """Every sample, before the limit."""
    task, images = _checked_task(request.task), _images_folder(request.images)
    found = find_format(Path(request.path).expanduser())
    table = _read_table(found, request.split)
    if table is not None:
        _refuse_bad(table.bad, table.name, skip=request.skip_bad, may_skip=request.may_skip)
        _refuse_nothing(len(table.rows), table.bad, table.name)
        whole = samples_of(table, find_fields(table, request.mapping, task), images=images, task=task)
    else:
        whole = _read_samples(found, request, images, task)
    _refuse_bad(whole.bad, whole.name, skip=request.skip_bad, may_skip=request.may_skip)
    _refuse_nothing(len(whole.samples), whole.bad, whole.name)
    return whole


def _read_table(found: Found, split: str | None) -> Table | None:
    """The rows of a tabular format; None for the others."""
    path = found.path
    if found.format == "hf":
        return read_hf_folder(path, split=split)
    if found.format not in ("jsonl", "csv", "parquet"):
        return None
    refuse_split(split, where=str(path))
    if found.format == "jsonl":
        return read_json_records(path)
    if found.format == "csv":
        return read_csv(path)
    files = parquet_files(path) if path.is_dir() else [path]
    return read_parquet(files, name=path.name, folder=path if path.is_dir() else path.parent)


def _read_samples(found: Found, request: DataRequest, images: Path | None, task: Task | None) -> SampleSet:
    """The samples of a format that needs no columns to be found."""
    if request.mapping:
        raise RequestError(
            f"{named('map')}: {found.path} is of the format {found.format}, which has no columns; leave it out"
        )
    possible: tuple[Task, ...] = ("classify",)
    if found.format == "vqav2":
        read, possible = read_vqav2(found.path, split=request.split, images=images), ("vqa", "generate")
    elif found.format == "image_folder":
        read = read_image_folder(found.path, split=request.split)
    else:
        read = read_ucf101(found.path, split=request.split)
    if task is not None and task not in possible:
        raise RequestError(f"{given('task', task)}: {read.name} ({read.format}) is for {' or '.join(possible)}")
    return replace(read, samples=with_unique_ids(read.samples), suggested_task=task or read.suggested_task)


def _checked_task(task: str | None) -> Task | None:
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


def _refuse_bad(bad: Sequence[BadRecord], name: str, *, skip: bool, may_skip: bool) -> None:
    if bad and not skip:
        more = f"; {len(bad)} records of {name} cannot be read" if len(bad) > 1 else ""
        raise RequestError(
            f"{bad[0].place}: {bad[0].reason}{more}; correct the data"
            + (f", or add {named('skip_bad')} to leave such records out" if may_skip else "")
        )


def _refuse_nothing(count: int, bad: Sequence[BadRecord], name: str) -> None:
    if count == 0:
        why = f"none of its {len(bad)} records can be read; the first, {bad[0].place}: {bad[0].reason}" if bad else ""
        raise RequestError(f"{name}: {why or 'it has no records'}")
