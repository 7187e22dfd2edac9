from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from brim.errors import RequestError
from brim.molecules.data_sets import PARTS, FeatureSet, divided, open_pair, open_splits
from brim.molecules.encoders import load_encoder
from brim.molecules.encoding import EncodedMolecules, encode_molecules
from tests.molecules.molecule_files import ALKANES, RINGS, csv_of, drugood, features_of


def encode(name: str, smiles: object) -> EncodedMolecules:
    return encode_molecules(list(smiles), load_encoder(name), use_cache=False)  # type: ignore[call-overload]


@given(st.integers(3, 200), st.integers(0, 9))
def test_rows_are_split_once_and_deterministically(count: int, seed: int) -> None:
    parts = divided(count, (0.7, 0.1, 0.2), seed=seed, name="x")
    assert sorted(row for part in parts for row in part) == list(range(count))
    assert all(parts)
    assert parts == divided(count, (0.7, 0.1, 0.2), seed=seed, name="x")


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(RequestError, match=r"in\.csv has 2 rows, too few to divide into 3 parts"):
        divided(2, (0.7, 0.1, 0.2), seed=0, name="in.csv")


def test_training_and_test_share_no_out_of_distribution_molecule(tmp_path: Path) -> None:
    source = open_splits(drugood(tmp_path / "a.json"), seed=0, limit=None)
    assert {part: len(source.parts[part]) for part in PARTS} == {
        "train_in": 40, "train_out": 36, "val_in": 10, "val_out": 9, "test_in": 10, "test_out": 15,
    }  # fmt: skip
    seen = {*source.parts["train_out"].smiles, *source.parts["val_out"].smiles}
    assert seen == set(RINGS[:45])
    assert source.parts["test_out"].smiles == tuple(RINGS[45:])
    assert source.notes == ["a.json has no ood_train: 36 of ood_val are trained on, 9 validate"]


def test_a_split_of_its_own_to_train_on_is_taken(tmp_path: Path) -> None:
    path = drugood(tmp_path / "a.json", ood_train=[{"smiles": "CN"}, {"smiles": "CCN"}])
    source = open_splits(path, seed=0, limit=None)
    assert source.parts["train_out"].smiles == ("CN", "CCN")
    assert len(source.parts["val_out"]) == 45


def test_features_follow_their_molecules_and_rejected_ones_are_named(tmp_path: Path) -> None:
    inner = csv_of(tmp_path / "in.csv", [*ALKANES[:20], "nonsense!"])
    outer = csv_of(tmp_path / "out.csv", RINGS[:20])
    source = open_pair(inner, outer, seed=0, limit=None)
    features = source.features("morgan", encode)
    assert sum(features.counts().values()) == 40
    assert list(source.failures) == ["in.csv line 22"]
    encoder = load_encoder("morgan")
    lines = inner.read_text(encoding="utf-8").splitlines()
    for name, row in zip(features.ids["test_in"], features.features["test_in"], strict=True):
        smiles = lines[int(name.rpartition(" ")[2]) - 1]
        assert torch.equal(row, torch.from_numpy(encoder.encode([smiles])[0]).float())


def test_molecules_on_both_sides_are_noted(tmp_path: Path) -> None:
    inner, outer = csv_of(tmp_path / "in.csv", ALKANES[:10]), csv_of(tmp_path / "out.csv", [*RINGS[:9], ALKANES[0]])
    assert "1 molecules are in- and out-of-distribution at once" in open_pair(inner, outer, seed=0, limit=None).notes
    leaky = csv_of(tmp_path / "leaky.csv", ["CC"] * 10)
    assert "1 molecules are trained on and tested on" in open_pair(leaky, outer, seed=0, limit=None).notes


def test_a_limit_holds_for_every_part(tmp_path: Path) -> None:
    source = open_splits(drugood(tmp_path / "a.json"), seed=0, limit=7)
    assert {len(source.parts[part]) for part in PARTS} == {7}
    pair = open_pair(
        features_of(tmp_path / "a.safetensors", 50, shift=0), features_of(tmp_path / "b.safetensors", 50, shift=1),
        seed=0, limit=4,
    )  # fmt: skip
    assert set(pair.features("features", encode).counts().values()) == {4}


def test_files_of_features_need_no_encoder(tmp_path: Path) -> None:
    source = open_pair(
        features_of(tmp_path / "a.safetensors", 20, shift=0), features_of(tmp_path / "b.safetensors", 30, shift=1),
        seed=0, limit=None,
    )  # fmt: skip
    assert source.encoders(["morgan", "minimol"]) == ["features"]
    features = source.features("features", encode)
    assert features.width == 16
    assert features.counts()["train_out"] == 21
    assert features.ids["train_in"][0].startswith("a.safetensors row ")


def test_wrong_feature_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    good = features_of(tmp_path / "good.safetensors", 20, shift=0)

    def refused(arrays: dict[str, np.ndarray], message: str) -> None:
        path = tmp_path / "bad.safetensors"
        save_file(arrays, path)
        with pytest.raises(RequestError, match=message):
            open_pair(good, path, seed=0, limit=None)

    rows = np.zeros((20, 16), dtype=np.float32)
    refused({"embeddings": rows}, "no tensor 'features'; it has embeddings")
    refused({"features": rows[0]}, "one row a sample is wanted")
    refused({"features": rows[:, :5]}, "features of different width")
    refused({"features": rows, "labels": np.zeros(3)}, "20 rows of features and 3 labels")
    refused({"features": np.where(np.eye(20, 16) > 0, np.nan, rows).astype(np.float32)}, "not finite, such as bad")
    (tmp_path / "text.safetensors").write_text("hello", encoding="utf-8")
    with pytest.raises(RequestError, match="is not a safetensors file"):
        open_pair(good, tmp_path / "text.safetensors", seed=0, limit=None)
    with pytest.raises(RequestError, match="there is no such file"):
        open_pair(good, tmp_path / "absent.safetensors", seed=0, limit=None)
    with pytest.raises(RequestError, match="SMILES for both or features for both"):
        open_pair(good, csv_of(tmp_path / "a.csv", ["C"]), seed=0, limit=None)


def test_a_part_whose_molecules_all_fail_is_empty_and_refused(tmp_path: Path) -> None:
    path = drugood(tmp_path / "a.json", iid_val=["bad!", "worse!"])
    with pytest.raises(RequestError, match="val_in is empty"):
        open_splits(path, seed=0, limit=None).features("morgan", encode)


def test_labels_go_with_their_molecules(tmp_path: Path) -> None:
    features = open_splits(drugood(tmp_path / "a.json", labels=True), seed=0, limit=None).features("morgan", encode)
    assert features.labels is not None
    assert list(features.labels["val_in"]) == [len(text) % 2 for text in ALKANES[40:50]]
    assert isinstance(features, FeatureSet)
