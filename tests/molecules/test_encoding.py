from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.errors import RequestError
from brim.molecules.encoders import MoleculeEncoder, MorganEncoder
from brim.molecules.encoding import encode, encode_molecules, feature_cache
from brim.molecules.files import read_arrays, read_metadata
from brim.settings.molecule_settings import EncodeRequest, EncodeSettings
from tests.molecules.molecule_files import csv_of

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Counting(MoleculeEncoder):
    """Gives the length of a SMILES, and counts how often each is encoded."""

    name = "counting"
    on_device = False

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.seen: list[str] = []
        self.breaks_at = breaks_at

    def encode(self, smiles: Sequence[str]) -> Any:
        self.seen += smiles
        if self.breaks_at is not None and len(self.seen) > self.breaks_at:
            raise KeyboardInterrupt
        if "CBr" in smiles:
            raise ValueError("bromine is not supported")
        return np.array([[len(text), -1.5] for text in smiles], dtype=np.float32)

    def identity(self) -> dict[str, Any]:
        return {"encoder": "counting"}


def test_every_molecule_is_encoded_once_and_in_order() -> None:
    smiles = ["C" * length for length in range(1, 50)]
    encoder = Counting()
    encoded = encode_molecules(smiles, encoder)
    assert sorted(encoder.seen) == sorted(smiles)
    assert encoded.features[:, 0].tolist() == [float(len(text)) for text in smiles]
    assert encoded.features.dtype == np.float32
    assert encoded.figures.batch_sizes is not None


def test_rejected_molecules_are_excluded_with_a_reason() -> None:
    encoded = encode_molecules(["CC", "not smiles", "CBr", "CCC"], Counting())
    assert encoded.kept == (0, 3)
    assert "cannot be read as SMILES" in encoded.failures[1]
    assert "bromine is not supported" in encoded.failures[2]
    assert encoded.features[:, 0].tolist() == [2.0, 3.0]


def test_the_same_list_is_read_from_the_cache_bit_for_bit() -> None:
    smiles = ["CCO", "bad!", "c1ccccc1"]
    first = encode_molecules(smiles, MorganEncoder())
    second = encode_molecules(smiles, MorganEncoder())
    assert (first.figures.cached, second.figures.cached) == (False, True)
    assert np.array_equal(first.features, second.features)
    assert second.features.dtype == np.uint8
    assert (second.kept, second.failures) == (first.kept, first.failures)
    assert not encode_molecules(smiles, MorganEncoder({"bits": 1024})).figures.cached
    assert not encode_molecules(smiles[:2], MorganEncoder()).figures.cached
    assert not encode_molecules(smiles, MorganEncoder(), use_cache=False).figures.cached


def test_a_damaged_cache_entry_is_no_entry() -> None:
    encode_molecules(["CCO"], Counting())
    (entry,) = feature_cache().iterdir()
    entry.write_bytes(b"half a fi")
    assert not encode_molecules(["CCO"], Counting()).figures.cached


def test_a_resumed_run_encodes_nothing_twice(tmp_path: Path) -> None:
    smiles = ["C" * length for length in range(1, 60)]
    journal = tmp_path / "partial.jsonl"
    first = Counting(breaks_at=20)
    with pytest.raises(KeyboardInterrupt):
        encode_molecules(smiles, first, journal=journal)
    kept = len(journal.read_text(encoding="utf-8").splitlines()) - 1
    assert 0 < kept < len(smiles)
    second = Counting()
    encoded = encode_molecules(smiles, second, journal=journal, resume=True)
    assert len(second.seen) == len(smiles) - kept
    assert encoded.figures.resumed == kept
    assert encoded.features[:, 0].tolist() == [float(len(text)) for text in smiles]


def test_a_file_of_features_knows_where_its_rows_come_from(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "in.csv", ["CCO", "c1ccc", "C", "CC(C)(C)(C)C"])
    result = encode(
        EncodeSettings(request=EncodeRequest(model="morgan", data=str(path), output=str(tmp_path / "f.safetensors")))
    )
    assert list(result.failures) == ["in.csv line 3", "in.csv line 5"]
    arrays, metadata = read_arrays(result.path), read_metadata(result.path)
    assert arrays["features"].shape == (2, 2048)
    assert json.loads(metadata["lines"]) == [2, 4]
    assert json.loads(metadata["ids"]) == ["in.csv line 2", "in.csv line 4"]
    assert json.loads(metadata["smiles"]) == ["CCO", "C"]
    assert json.loads(metadata["encoder"])["bits"] == 2048
    assert not list(tmp_path.glob("*.partial.jsonl"))


def test_impossible_requests_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "in.csv", ["not smiles", "neither"])
    with pytest.raises(RequestError, match=r"none of 2 molecules can be encoded; in\.csv line 2"):
        encode(
            EncodeSettings(
                request=EncodeRequest(model="morgan", data=str(path), output=str(tmp_path / "f.safetensors"))
            )
        )
    with pytest.raises(RequestError, match=r"--output features: features are written as FILE\.safetensors"):
        EncodeRequest(model="morgan", data=str(path), output="features")
    with pytest.raises(RequestError, match="nothing to resume"):
        encode(
            EncodeSettings(
                request=EncodeRequest(
                    model="morgan", data=str(path), output=str(tmp_path / "g.safetensors"), resume=True
                )
            )
        )
    with pytest.raises(RequestError, match="--limit 0"):
        EncodeRequest(model="morgan", data=str(path), output="f.safetensors", limit=0)
