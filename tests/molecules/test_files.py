from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.molecules.files import read_smiles, read_splits
from tests.molecules.molecule_files import csv_of, drugood

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def test_a_csv_keeps_lines_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("name,SMILES,label\nethanol,CCO,1\n\nno,,0\nmethane, C ,0\n", encoding="utf-8")
    molecules = read_smiles(path)
    assert molecules.smiles == ("CCO", "C")
    assert molecules.lines == (2, 5)
    assert molecules.places == ("in.csv line 2", "in.csv line 5")
    assert molecules.labels == ("1", "0")
    assert [(record.place, record.reason) for record in molecules.bad] == [("in.csv line 4", "there is no SMILES")]


def test_a_single_column_needs_no_name_and_others_can_be_mapped(tmp_path: Path) -> None:
    assert read_smiles(csv_of(tmp_path / "a.csv", ["CCO"], column="what")).smiles == ("CCO",)
    path = tmp_path / "b.tsv"
    path.write_text("id\tstructure\n1\tCCO\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"no column of SMILES among id, structure.*--map smiles=COLUMN"):
        read_smiles(path)
    assert read_smiles(path, {"smiles": "structure"}).smiles == ("CCO",)
    with pytest.raises(RequestError, match="did you mean structure"):
        read_smiles(path, {"smiles": "structur"})
    with pytest.raises(RequestError, match="smiles=COLUMN or label=COLUMN"):
        read_smiles(path, {"prompt": "id"})


def test_lines_of_a_smi_file_may_carry_names_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.smi.gz"
    path.write_bytes(gzip.compress(b"CCO ethanol\n\nC\tmethane\n"))
    molecules = read_smiles(path)
    assert (molecules.smiles, molecules.lines) == (("CCO", "C"), (1, 3))


def test_other_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"molecules come as \.csv"):
        read_smiles(tmp_path / "a.parquet")
    (tmp_path / "b.smi").write_text("\n", encoding="utf-8")
    with pytest.raises(RequestError, match="holds no molecules"):
        read_smiles(tmp_path / "b.smi")
    with pytest.raises(RequestError, match="cannot read"):
        read_smiles(tmp_path / "absent.csv")


def test_splits_come_with_their_places_and_labels(tmp_path: Path) -> None:
    file = read_splits(drugood(tmp_path / "a.json", labels=True, iid_val=["CC", {"smiles": ""}, {"x": 1}]))
    assert file.splits["train"].places[1] == "a.json train[1]"
    assert file.splits["train"].labels is not None
    assert file.splits["iid_val"].smiles == ("CC",)
    assert len(file.splits["iid_val"].bad) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "split"'),
        ('{"split": {"train": []}}', "'iid_val' is missing"),
        (
            '{"split": {"train": 3, "iid_val": [], "iid_test": [], "ood_val": [], "ood_test": []}}',
            "'train' is no list",
        ),
        (
            '{"split": {"train": ["C"], "iid_val": [], "iid_test": ["C"], "ood_val": ["C"], "ood_test": ["C"]}}',
            "'iid_val' is empty",
        ),
    ],
)
def test_wrong_split_files_are_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        read_splits(path)
