"""Files of features, and the model `mlp` on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from brim.errors import RequestError
from brim.training.features import read_feature_file
from brim.training.heads import FeatureHead
from tests.training.training_runs import run, settings_of, weights, write_features


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rows = numpy.arange(12, dtype="float32").reshape(4, 3)
    labels = numpy.array([0, 1, 1, 2])
    numpy.savez(tmp_path / "a.npz", features=rows, labels=labels)
    save_file({"features": rows, "labels": labels}, tmp_path / "a.safetensors")
    numpy.save(tmp_path / "a.npy", rows)
    numpy.save(tmp_path / "labels.npy", labels)
    lines = [
        "id,x,y,z,label",
        *(f"r{n},{a},{b},{c},{k}" for n, ((a, b, c), k) in enumerate(zip(rows, labels, strict=True))),
    ]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    found = [
        read_feature_file(str(tmp_path / "a.npz")),
        read_feature_file(str(tmp_path / "a.safetensors")),
        read_feature_file(str(tmp_path / "a.npy"), labels_file=str(tmp_path / "labels.npy")),
        read_feature_file(str(tmp_path / "a.csv")),
    ]
    for one in found:
        assert torch.equal(one.rows, torch.from_numpy(rows))
        assert list(one.labels) == [0, 1, 1, 2]
    assert found[3].ids == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: numpy.savez(p, features=numpy.ones((4, 3)), labels=numpy.ones(5)), "4 rows .* and 5 labels"),
        (lambda p: numpy.savez(p, features=numpy.ones(4), labels=numpy.ones(4)), r"the shape \(4,\)"),
        (lambda p: numpy.savez(p, features=numpy.ones((0, 3)), labels=numpy.ones(0)), "it has no rows"),
        (lambda p: numpy.savez(p, feature=numpy.ones((4, 3)), labels=numpy.ones(4)), "did you mean feature"),
        (lambda p: numpy.savez(p, features=numpy.full((4, 3), numpy.nan), labels=numpy.ones(4)), "4 rows have NaN"),
        (lambda p: p.write_bytes(b"no archive"), "cannot be read"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(tmp_path: Path, write: Any, words: str) -> None:
    write(tmp_path / "bad.npz")
    with pytest.raises(RequestError, match=words):
        read_feature_file(str(tmp_path / "bad.npz"))


def test_a_text_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,label\n" + "".join(f"{n},{'dog' if n % 2 else 'cat'}\n" for n in range(9)))
    (tmp_path / "val.csv").write_text("x,label\n1,owl\n")
    nested = settings_of(tmp_path / "train.csv", data__val_root=str(tmp_path / "val.csv"))
    with pytest.raises(RequestError, match="the class 'owl' is not among those"):
        run(nested, tmp_path / "run")


def test_a_column_of_texts_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,colour,label\n1,red,0\n2,blue,1\n")
    with pytest.raises(RequestError, match=r"line 2: 'colour' is 'red', not a number"):
        run(settings_of(tmp_path / "train.csv"), tmp_path / "run")


def test_weights_hold_the_mean_and_deviation_of_the_training_rows(tmp_path: Path) -> None:
    path = write_features(tmp_path / "features.npz", count=50)
    run(settings_of(path, hp__epochs=1), tmp_path / "run")
    stored = weights(tmp_path / "run")
    assert stored["mean"].shape == (6,)
    assert not torch.equal(stored["mean"], torch.zeros(6, dtype=torch.float64))


def test_a_constant_column_is_not_divided_by_zero() -> None:
    head = FeatureHead(2, [], 2)
    head.standardise(torch.tensor([[5.0, 1.0], [5.0, 3.0]]))
    assert torch.isfinite(head(torch.tensor([[5.0, 2.0]]))).all()
