"""What is written from the declarations is current, and the shipped schemas tell good files from bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from brim.settings.generated import generated_files

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "tests" / "settings" / "sweep_files"
SCHEMAS = ROOT / "src" / "brim" / "settings" / "schemas"
FILES = generated_files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_generated_file_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path], "run python -m brim.settings.generated"


def errors(kind: str, document: Any) -> list[str]:
    schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator(schema).iter_errors(document)]


@pytest.mark.parametrize(
    "file",
    [
        ROOT / "examples" / "ucf101_video_grid.yaml",
        *(SWEEPS / name for name in ("seed.yaml", "easytrain_grid.yaml", "easytrain_groups.yaml")),
    ],
    ids=lambda file: file.name,
)  # fmt: skip
def test_files_of_sweeps_that_run_are_valid(file: Path) -> None:
    assert errors("sweep", yaml.safe_load(file.read_text(encoding="utf-8"))) == []


def test_the_files_of_the_training_guide_are_valid() -> None:
    guide = (ROOT / "docs" / "commands" / "train.md").read_text(encoding="utf-8")
    documents = [yaml.safe_load(text) for text in re.findall(r"```yaml [^\n]*\n(.*?)```", guide, flags=re.DOTALL)]
    assert [document["model"]["type"] for document in documents] == ["mlp", "r3d_18"]
    assert [errors("train", document) for document in documents] == [[], []]
    assert errors("train", {"model.type": "mlp", "hp.epochs": 3, "optimizer.params.betas": [0.9, 0.99]}) == []


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        ("train", {"model": {"type": "mlp"}, "hp": {"batchsize": 8}}),
        ("train", {"model": {"type": "mlp"}, "hp": {"batch_size": 0}}),
        ("train", {"model": {"type": "mlp"}, "hp": {"epochs": "many"}}),
        ("train", {"model": {"type": 7}}),
        ("train", {"model": {"type": "mlp"}, "training": {"dtype": "float8"}}),
        ("train", {"model": {"type": "mlp"}, "trainig": {}}),
        ("train", {"model": {"type": "mlp"}, "grid_search": {}}),
        ("train", {"model": "mlp"}),
        ("sweep", {"grid_search": {"grid": {"hp.batch_size": [8, 0]}}}),
        ("sweep", {"grid_search": {"grid": {"hp.learningrate": [0.1]}}}),
        ("sweep", {"grid_search": {"pairing": "all"}}),
        ("sweep", {"grid_serch": {}}),
    ],
)
def test_typical_mistakes_are_not(kind: str, document: Any) -> None:
    assert errors(kind, document)
