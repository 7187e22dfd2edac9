"""What pages may find in their folder before they begin: `<!-- setup: NAME -->` names a function of this file.

A reader must be able to follow a page from an empty folder, so this is only for what a reader has and a page cannot
write: a model of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path


def molecules(folder: Path) -> None:
    """`in.csv` and `out.csv`: SMILES of two kinds of molecules, alcohols with a number of carbons and amines."""
    for name, end, label in (("in", "O", "alcohol"), ("out", "N", "amine")):
        rows = "".join(f"{'C' * length}{end},{label if length % 2 else 'other'}\n" for length in range(1, 65))
        (folder / f"{name}.csv").write_text(f"smiles,label\n{rows}", encoding="utf-8")


def my_model(folder: Path) -> None:
    """`my-model`, a small language model with random weights, and `questions.jsonl`."""
    from tests.saved_models import save_language_model

    save_language_model(folder / "my-model")
    rows = [
        {"question": f"what is {one} plus {other} ?", "answer": str(one + other)}
        for one in range(8)
        for other in range(4)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
