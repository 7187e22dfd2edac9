"""Small files of molecules and features for the tests of preference training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ALKANES = ["C" * length + "O" for length in range(1, 61)]  # in: chains
RINGS = ["c1ccccc1" + "C" * length + "N" for length in range(60)]  # out: aromatic rings


def csv_of(path: Path, smiles: list[str], column: str = "smiles") -> Path:
    path.write_text("\n".join([column, *smiles]) + "\n", encoding="utf-8")
    return path


def drugood(path: Path, *, labels: bool = False, **changed: list[object]) -> Path:
    """Chains in, rings out; every tenth of them in each of the smaller splits."""

    def records(smiles: list[str]) -> list[object]:
        return [{"smiles": text, **({"cls_label": len(text) % 2} if labels else {})} for text in smiles]

    splits: dict[str, list[object]] = {
        "train": records(ALKANES[:40]),
        "iid_val": records(ALKANES[40:50]),
        "iid_test": records(ALKANES[50:]),
        "ood_val": records(RINGS[:45]),
        "ood_test": records(RINGS[45:]),
    }
    path.write_text(json.dumps({"cfg": {}, "split": {**splits, **changed}}), encoding="utf-8")
    return path


def features_of(path: Path, rows: int, *, shift: float, width: int = 16, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(rows, width)).astype(np.float32)
    values[:, :4] += shift
    save_file({"features": values}, path)
    return path
