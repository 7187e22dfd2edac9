"""Open a data set of any format: what `-d/--data`, `--split`, `--limit` and `--map` mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from brim.data.base import TASKS, BadRecord, Sample, SampleFormat, SampleSet, TableFormat, TaskName
from brim.data.fields import find_fields
from brim.data.files import files_digest, records_digest
from brim.data.formats import find_format
from brim.data.samples import check_media, media_paths, samples_of, with_unique_ids
from brim.data.selection import stratified
from brim.errors import RequestError, nearest_names
from brim.memory.collector import without_collector
from brim.settings.caller import given, named

__all__ = ["DataRequest", "open_data"]


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
