"""Folders of the Hugging Face `datasets` library: the only file that imports it. The network is never used.

A folder of `save_to_disk` is read in place. For any other folder that `load_dataset` understands, the library finds the
files of each split; Parquet, JSON and CSV files are then read by brim, other kinds by the library.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.data.arrow_cells import bytes_in, holds_files, image_cells, shapes_of
from brim.data.base import DataError, Row, Table, TableFormat, joined, plain_value
from brim.data.csv_files import read_csv
from brim.data.files import files_digest, records_digest
from brim.data.json_records import read_json_records
from brim.data.parquet import read_parquet
from brim.data.selection import choose_split, refuse_split
from brim.errors import RequestError, first_line

__all__ = ["HF_FOLDER", "HfCell", "is_saved_folder", "read_hf_folder"]

_DATASETS_KEPT = 4
_OWN_READERS = {"json": read_json_records, "csv": read_csv}  # by the library's name for the kind of file
_ADDRESS = re.compile(r"^\s*(?:- )?(?:data_files|path|split)?:?\s*[\"']?((?:https?|hf|s3|gs)://\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HfCell:
    """Reads the bytes of one cell, or of one position in the cell's list."""

    folder: str
    split: str | None
    column: str
    row: int
    position: int | None

    def __str__(self) -> str:
        return f"{_named(Path(self.folder), self.split)} row {self.row + 1} {self.column}"

    def __call__(self) -> bytes:
        try:
            cell = _column_view(self.folder, self.split, self.column)[self.row].column(0)[0].as_py()
        except (OSError, ValueError, IndexError) as error:  # Arrow's errors are subclasses
            raise DataError(f"{self}: {error}") from error
        return bytes_in(cell, self.position, place=self)


def is_saved_folder(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return _is_saved_dict(folder) or ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file())


def read_hf_folder(folder: Path, split: str | None) -> Table:
    """The rows of one split; by default the only one, else the validation or test split."""
    if _is_saved_dict(folder):
        chosen = choose_split(_saved_splits(folder), split, where=str(folder))
        return _library_table(folder, chosen, files=sorted((folder / chosen).glob("*.arrow")))
    if is_saved_folder(folder):
        refuse_split(split, where=str(folder))
        return _library_table(folder, None, files=sorted(folder.glob("*.arrow")))
    _refuse_addresses(folder)
    with _readable(folder):
        builder = _datasets().load_dataset_builder(str(folder), download_config=_local_only())
    by_split = {str(name): [Path(file) for file in files] for name, files in (builder.config.data_files or {}).items()}
    chosen = choose_split(list(by_split), split, where=str(folder))
    files, name = by_split[chosen], _named(folder, chosen)
    if builder.name == "parquet":
        return read_parquet(files, name=name, folder=folder, format_name="hf", split=chosen)
    if builder.name in _OWN_READERS:
        tables = [_OWN_READERS[builder.name](file) for file in files]
        return joined(tables, name=name, format_name="hf", split=chosen)
    return _library_table(folder, chosen, files=files)


def _refuse_addresses(folder: Path) -> None:
    """Refuse a data set whose card says that its files are on the network: the library would download them."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = text.split("---")[1] if text.startswith("---") else ""
    address = _ADDRESS.search(header)
    if address:
        raise RequestError(f"{card}: the data are at {address[1]}; brim downloads nothing, save them first")


def _library_table(folder: Path, split: str | None, *, files: Sequence[Path]) -> Table:
    _opened.cache_clear()  # the folder may have been rewritten
    _column_view.cache_clear()
    with _readable(folder):
        dataset = _opened(str(folder), split)
        arrow = dataset.with_format("arrow")[:]  # memory-mapped files
        columns = {}
        for field in arrow.schema:
            if holds_files(str(field.type)):
                reader = functools.partial(HfCell, str(folder), split, field.name)
                columns[field.name] = image_cells(shapes_of(arrow.column(field.name).chunks), reader)
            else:
                columns[field.name] = arrow.column(field.name).to_pylist()
    name = _named(folder, split)
    records = ({column: values[row] for column, values in columns.items()} for row in range(arrow.num_rows))
    rows = tuple(
        Row(place=f"{name} row {number}", number=number, values=record) for number, record in enumerate(records, 1)
    )
    return Table(
        name=name,
        format="hf",
        folder=folder,
        columns=tuple(columns),
        rows=rows,
        content={"records": records_digest(plain_value(row.values) for row in rows), "files": files_digest(files)},
        class_names={column: tuple(kind.names) for column, kind in dataset.features.items() if hasattr(kind, "names")},
        split=split,
    )


@functools.lru_cache(maxsize=_DATASETS_KEPT)
def _opened(folder: str, split: str | None) -> Any:
    library = _datasets()
    if split is None:
        return library.load_from_disk(folder)
    if _is_saved_dict(Path(folder)):
        return library.load_from_disk(str(Path(folder) / split))
    return library.load_dataset(folder, split=split, download_config=_local_only())


@functools.lru_cache(maxsize=_DATASETS_KEPT)
def _column_view(folder: str, split: str | None, column: str) -> Any:
    return _opened(folder, split).select_columns([column]).with_format("arrow")


def _is_saved_dict(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file()


def _saved_splits(folder: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{folder}: its dataset_dict.json cannot be read ({error}); save the data set again"
        ) from error


def _named(folder: Path, split: str | None) -> str:
    return folder.name if split is None else f"{folder.name}/{split}"


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn any error of the library into a `RequestError`, and turn its progress bars off."""
    library = _datasets()
    quiet = library.are_progress_bars_disabled()
    try:
        if not quiet:
            library.disable_progress_bars()
        yield
    except RequestError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise RequestError(f"{folder}: the datasets library cannot read it: {reason}") from error
    finally:
        if not quiet:
            library.enable_progress_bars()


def _local_only() -> Any:
    return _datasets().DownloadConfig(local_files_only=True)


def _datasets() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError(
            f"Hugging Face data sets need the library datasets ({error}): pip install datasets"
        ) from error
    return datasets


HF_FOLDER = TableFormat(name="hf", title="a data set folder", read=read_hf_folder, owns=is_saved_folder)
