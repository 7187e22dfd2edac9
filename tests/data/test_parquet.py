from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.data.base import DataError
from brim.data.images import load_image
from brim.errors import RequestError
from tests.data.media_files import encoded, opened, write_image

STORED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, rows: list[dict[str, Any]], *, types: dict[str, Any] | None = None, group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    for column, kind in (types or {}).items():
        array = pa.array([row[column] for row in rows], kind)
        table = table.set_column(table.schema.get_field_index(column), column, array)
    pq.write_table(table, path, row_group_size=group)
    return path


def shades(sample: Any) -> list[int]:
    return [load_image(image).getpixel((0, 0))[0] for image in sample.images]


def test_rows_become_samples(tmp_path: Path) -> None:
    day = datetime.date(2024, 5, 1)
    rows = [{"question": "a", "answers": ["b", "c"], "day": day}, {"question": "d", "answers": ["e"], "day": None}]
    found = opened(write(tmp_path / "data.parquet", rows))
    assert (found.format, found.name) == ("parquet", "data.parquet")
    assert [(each.id, each.prompt, each.references) for each in found.samples] == [
        ("1", "a", ("b", "c")),
        ("2", "d", ("e",)),
    ]
    assert found.samples[0].original == {"question": "a", "answers": ["b", "c"], "day": "2024-05-01"}


def test_a_folder_of_files_is_one_set(tmp_path: Path) -> None:
    write(tmp_path / "part-2.parquet", [{"question": "c", "answer": "d"}])
    write(tmp_path / "part-1.parquet", [{"question": "a", "answer": "b"}])
    found = opened(tmp_path)
    assert (found.format, [each.prompt for each in found.samples]) == ("parquet", ["a", "c"])
    assert [each.id for each in found.samples] == ["1", "2"]


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        (STORED, lambda shade: {"bytes": encoded(shade), "path": "x.png"}),
        (STORED, lambda shade: {"bytes": encoded(shade), "path": None}),
        (pa.struct([("bytes", pa.large_binary())]), lambda shade: {"bytes": encoded(shade)}),
        (pa.binary(), encoded),
        (pa.large_binary(), encoded),
        (pa.list_(STORED), lambda shade: [{"bytes": encoded(shade), "path": "x.png"}]),
        (pa.list_(pa.binary()), lambda shade: [encoded(shade)]),
    ],
    ids=["with a path", "path missing", "large bytes", "binary", "large binary", "list of stored", "list of binary"],
)
def test_stored_images_are_read_when_they_are_needed(tmp_path: Path, kind: Any, cell: Any) -> None:
    rows = [{"question": f"{row}?", "image": None if row == 2 else cell(row * 10)} for row in range(5)]
    path = write(tmp_path / "data.parquet", rows, types={"image": kind})
    found = opened(path)
    assert found.suggested_task == "vqa"
    assert [shades(sample) for sample in found.samples] == [[0], [10], [], [30], [40]]
    assert found.samples[0].original["image"] in ("<stored image>", ["<stored image>"])
    assert all(image.data is None for sample in found.samples for image in sample.images)


def test_several_stored_images_of_a_row(tmp_path: Path) -> None:
    cells = [[10, 20], [], None, [30], [40, 50, 60]]
    rows: list[dict[str, Any]] = [
        {"question": "?", "images": cell and [{"bytes": encoded(shade), "path": None} for shade in cell]}
        for cell in cells
    ]
    path = write(tmp_path / "data.parquet", rows, types={"images": pa.list_(STORED)}, group=3)
    assert [shades(sample) for sample in opened(path).samples] == [[10, 20], [], [], [30], [40, 50, 60]]


def test_names_without_bytes_are_names_of_files(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 70)
    path = write(
        tmp_path / "data.parquet",
        [{"question": "?", "image": {"bytes": None, "path": "a.png"}}],
        types={"image": STORED},
    )
    found = opened(path)
    assert found.samples[0].images[0].path == tmp_path / "a.png"


def test_a_stored_image_can_be_sent_to_another_process(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"question": "?", "image": encoded(90)}])
    sample = pickle.loads(pickle.dumps(opened(path).samples[0]))
    assert shades(sample) == [90]


def test_a_deleted_file_fails_its_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"question": "?", "image": encoded(90)}] * 9, group=1)
    samples = opened(path).samples
    path.unlink()
    with pytest.raises(DataError, match=r"data.parquet row 9 image: .*No such file"):
        load_image(samples[8].images[0])


def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    for shade in (10, 20):
        path = write(tmp_path / "data.parquet", [{"question": "?", "image": encoded(shade)}])
        assert shades(opened(path).samples[0]) == [shade]


def test_class_names_in_the_metadata_are_used(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["zebra", "ant"])}
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    pq.write_table(data.with_format("arrow")[:], tmp_path / "data.parquet")
    found = opened(tmp_path / "data.parquet")
    assert (found.class_names, [each.references for each in found.samples]) == (("zebra", "ant"), [(1,), (0,)])
    assert [each.group for each in found.samples] == ["ant", "zebra"]


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"question": "a", "answer": "b"}, {"question": None, "answer": "c"}])
    with pytest.raises(RequestError, match=r"data.parquet row 2: 'question' is empty"):
        opened(path)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(RequestError, match=r"cannot read .*data.parquet as parquet"):
        opened(tmp_path / "data.parquet")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "data.parquet")
    with pytest.raises(RequestError, match=r"data.parquet: it has no records"):
        opened(tmp_path / "data.parquet")


def test_an_embedded_video_is_a_bad_record(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"question": "?", "video": b"abc"}])
    with pytest.raises(RequestError, match="row 1: 'video' holds an embedded video"):
        opened(path)
