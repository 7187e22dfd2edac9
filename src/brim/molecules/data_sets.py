"""Data sets of in- and out-of-distribution rows: six parts, to train, validate and test on.

They come as a DrugOOD-style file, two files of SMILES, or two files of features. Files are read and checked when a
source is opened, so that a wrong file is an error before anything is encoded. Rows without splits are divided at
random, in the same way every time.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from brim.errors import RequestError, plural
from brim.molecules.encoding import EncodedMolecules
from brim.molecules.files import Molecules, file_digest, read_arrays, read_metadata, read_smiles, read_splits
from brim.settings.caller import given

__all__ = [
    "FEATURES", "PARTS", "Encode", "FeatureSet", "FeatureSource", "MoleculeSource", "Part", "Source", "divided",
    "open_pair", "open_splits",
]  # fmt: skip

Part = Literal["train_in", "train_out", "val_in", "val_out", "test_in", "test_out"]
PARTS: tuple[Part, ...] = get_args(Part)
OWN_SHARES = (0.7, 0.1, 0.2)  # train, validation, test, of files that bring no splits
OUT_SHARES = (0.8, 0.2)  # of `ood_val`: to train on, to validate on
FEATURES = "features"

Encode = Callable[[str, Sequence[str]], EncodedMolecules]  # an encoder's name and SMILES → features


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features by part, `[rows, width]` in float32, and the names of their rows."""

    name: str
    encoder: str  # `features` where the files held features
    features: Mapping[Part, torch.Tensor]
    ids: Mapping[Part, Sequence[str]]
    labels: Mapping[Part, Sequence[Any]] | None = None  # classes of the in-distribution parts, where they are known

    def __post_init__(self) -> None:
        widths = {part: rows.shape[1] for part, rows in self.features.items()}
        if len(set(widths.values())) > 1:
            listed = ", ".join(f"{part} {width}" for part, width in widths.items())
            raise RequestError(f"{self.name}: features of different width ({listed}); encode both sides alike")
        for part, rows in self.features.items():
            if len(rows) == 0:
                raise RequestError(f"{self.name}: {part} is empty; detection needs rows of both kinds in every part")
            bad = ~rows.isfinite().all(1)
            if bool(bad.any()):
                first = self.ids[part][int(bad.nonzero()[0])]
                raise RequestError(
                    f"{self.name}: {plural(int(bad.sum()), 'row')} of {part} not finite, such as {first}"
                )

    @property
    def width(self) -> int:
        """Features of a row."""
        return int(self.features["train_in"].shape[1])

    def counts(self) -> dict[str, int]:
        """Rows of each part."""
        return {part: len(self.features[part]) for part in PARTS}


class Source(abc.ABC):
    """One data set whose features are yet to be made or read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[str] = []
        self.failures: dict[str, str] = {}  # molecules without features: file and line → reason

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the parts depend on, for fingerprints."""

    @abc.abstractmethod
    def encoders(self, asked: Sequence[str]) -> list[str]:
        """The names of the encoders to use on this data set."""

    @abc.abstractmethod
    def features(self, encoder: str, encode: Encode) -> FeatureSet:
        """The parts as features."""


class MoleculeSource(Source):
    """Molecules by part."""

    def __init__(self, name: str, parts: Mapping[Part, Molecules], *, digest: str, notes: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.parts = parts
        self.notes += [*notes, *_shared_molecules(parts)]
        self._digest = digest

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "content": self._digest, "rows": {part: len(self.parts[part]) for part in PARTS}}

    def encoders(self, asked: Sequence[str]) -> list[str]:
        return list(asked)

    def features(self, encoder: str, encode: Encode) -> FeatureSet:
        everything = [text for part in PARTS for text in self.parts[part].smiles]
        encoded = encode(encoder, everything)
        where = {place: row for row, place in enumerate(encoded.kept)}
        rows = torch.from_numpy(encoded.features).float()
        features: dict[Part, torch.Tensor] = {}
        ids: dict[Part, list[str]] = {}
        labels: dict[Part, list[Any]] = {}
        start = 0
        for part in PARTS:
            molecules = self.parts[part]
            kept = [place for place in range(len(molecules)) if start + place in where]
            features[part] = rows[[where[start + place] for place in kept]]
            ids[part] = [molecules.places[place] for place in kept]
            if molecules.labels is not None:
                labels[part] = [molecules.labels[place] for place in kept]
            self.failures |= {
                molecules.places[place]: encoded.failures[start + place]
                for place in range(len(molecules))
                if start + place not in where
            }
            start += len(molecules)
        known = labels if "train_in" in labels and "val_in" in labels else None
        return FeatureSet(name=self.name, encoder=encoder, features=features, ids=ids, labels=known)


class FeatureSource(Source):
    """Rows of features, which no encoder has to make."""

    def __init__(self, name: str, found: FeatureSet, *, digest: str) -> None:
        super().__init__(name)
        self._found = found
        self._digest = digest

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "content": self._digest, "rows": self._found.counts()}

    def encoders(self, asked: Sequence[str]) -> list[str]:
        del asked
        return [FEATURES]

    def features(self, encoder: str, encode: Encode) -> FeatureSet:
        del encoder, encode
        return self._found


def open_splits(path: Path, *, seed: int, limit: int | None) -> MoleculeSource:
    """A DrugOOD-style file; what is trained on as out-of-distribution is a part of `ood_val`, never of `ood_test`."""
    file = read_splits(path)
    out = file.splits["ood_val"]
    notes = []
    if "ood_train" in file.splits and len(file.splits["ood_train"]):
        train_out, val_out = file.splits["ood_train"], out
    else:
        first, second = divided(len(out), OUT_SHARES, seed=seed, name=f"{path}: ood_val")
        train_out, val_out = out.chosen(first), out.chosen(second)
        notes.append(f"{path.name} has no ood_train: {len(first)} of ood_val are trained on, {len(second)} validate")
    parts: dict[Part, Molecules] = {
        "train_in": file.splits["train"],
        "train_out": train_out,
        "val_in": file.splits["iid_val"],
        "val_out": val_out,
        "test_in": file.splits["iid_test"],
        "test_out": file.splits["ood_test"],
    }
    source = MoleculeSource(path.stem, _limited(parts, limit, seed), digest=file.digest, notes=notes)
    for molecules in file.splits.values():
        source.failures |= {record.place: record.reason for record in molecules.bad}
    return source


def open_pair(
    inner: Path, outer: Path, *, seed: int, limit: int | None, mapping: Mapping[str, str] | None = None
) -> Source:
    """One file of in- and one of out-of-distribution rows, divided here: 70 % to train on, 10 % validate, 20 % test."""
    name = f"{_stem(inner)}-vs-{_stem(outer)}"
    kinds = {path.suffix == ".safetensors" for path in (inner, outer)}
    for side, path in (("id", inner), ("ood", outer)):
        if not path.exists():
            raise RequestError(f"{given(side, path)}: there is no such file")
    if len(kinds) > 1:
        raise RequestError(f"{given('id', inner)} and {given('ood', outer)}: give SMILES for both or features for both")
    if kinds == {True}:
        return _open_features(name, inner, outer, seed=seed, limit=limit)
    parts: dict[Part, Molecules] = {}
    failures: dict[str, str] = {}
    digests = []
    for side, path in (("in", inner), ("out", outer)):
        molecules = read_smiles(path, mapping)
        failures |= {record.place: record.reason for record in molecules.bad}
        digests.append(molecules.digest)
        shares = divided(len(molecules), OWN_SHARES, seed=seed, name=str(path))
        for stage, rows in zip(("train", "val", "test"), shares, strict=True):
            parts[f"{stage}_{side}"] = molecules.chosen(rows)  # type: ignore[index]
    source = MoleculeSource(name, _limited(parts, limit, seed), digest=" ".join(digests))
    source.failures |= failures
    return source


def _open_features(name: str, inner: Path, outer: Path, *, seed: int, limit: int | None) -> FeatureSource:
    features: dict[Part, torch.Tensor] = {}
    ids: dict[Part, Sequence[str]] = {}
    for side, path in (("in", inner), ("out", outer)):
        rows, names = _read_features(path)
        shares = divided(len(rows), OWN_SHARES, seed=seed, name=str(path))
        for stage, chosen in zip(("train", "val", "test"), shares, strict=True):
            part: Part = f"{stage}_{side}"  # type: ignore[assignment]
            kept = [chosen[place] for place in _sampled(len(chosen), limit, seed)]
            features[part], ids[part] = rows[kept], [names[row] for row in kept]
    found = FeatureSet(name=name, encoder=FEATURES, features=features, ids=ids)
    return FeatureSource(name, found, digest=f"{file_digest(inner)} {file_digest(outer)}")


def _read_features(path: Path) -> tuple[torch.Tensor, list[str]]:
    arrays = read_arrays(path)
    if FEATURES not in arrays:
        raise RequestError(f"{path} has no tensor {FEATURES!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    rows = torch.from_numpy(arrays[FEATURES])
    if rows.dim() != 2 or rows.shape[1] == 0:
        raise RequestError(f"{path}: features have the shape {tuple(rows.shape)}; one row a sample is wanted")
    if "labels" in arrays and len(arrays["labels"]) != len(rows):
        raise RequestError(
            f"{path}: {plural(len(rows), 'row')} of features and {plural(len(arrays['labels']), 'label')}; they "
            f"must agree"
        )
    ids = read_metadata(path).get("ids")
    names = json.loads(ids) if ids else [f"{path.name} row {row}" for row in range(len(rows))]
    if len(names) != len(rows):
        raise RequestError(
            f"{path}: {plural(len(rows), 'row')} of features and {plural(len(names), 'id')}; they must agree"
        )
    return rows.float(), names


def divided(count: int, shares: Sequence[float], *, seed: int, name: str) -> list[list[int]]:
    """`count` rows dealt at random, always in the same way, in these shares; every share has at least one row."""
    if count < len(shares):
        raise RequestError(f"{name} has {plural(count, 'row')}, too few to divide into {len(shares)} parts")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    sizes = [max(1, round(share * count)) for share in shares[1:]]
    while sum(sizes) > count - 1:
        sizes[sizes.index(max(sizes))] -= 1
    ends = [count - sum(sizes)]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [sorted(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _limited(parts: Mapping[Part, Molecules], limit: int | None, seed: int) -> dict[Part, Molecules]:
    """At most so many molecules of each part."""
    return {part: molecules.chosen(_sampled(len(molecules), limit, seed)) for part, molecules in parts.items()}


def _sampled(count: int, limit: int | None, seed: int) -> list[int]:
    """At most `limit` places of `count`, drawn at random: files are often sorted."""
    if limit is None or limit >= count:
        return list(range(count))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:limit].tolist())


def _shared_molecules(parts: Mapping[Part, Molecules]) -> list[str]:
    """Notes on molecules that are on both sides, or both in training and in test parts."""
    texts = {part: set(parts[part].smiles) for part in PARTS}
    inner, outer = (set().union(*(texts[part] for part in PARTS if part.endswith(side))) for side in ("_in", "_out"))
    notes = []
    if both := len(inner & outer):
        notes.append(f"{both} molecules are in- and out-of-distribution at once")
    leaked = len(texts["train_in"] & texts["test_in"]) + len(texts["train_out"] & texts["test_out"])
    if leaked:
        notes.append(f"{leaked} molecules are trained on and tested on")
    return notes


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
