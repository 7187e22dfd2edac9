"""`brim knobs`: what it lists for each source of models, as a table and as JSON, and how wrong requests end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.cli.knobs import values_text
from brim.workloads.knobs import Knob
from tests import saved_models

Brim = Callable[..., Any]


def listed(brim: Brim, model: str) -> dict[str, dict[str, Any]]:
    result = brim("knobs", model, "--json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["schema"] == "brim.knobs/1"
    return {knob["name"]: knob for knob in document["knobs"]}


def test_a_video_model_has_frames_and_size(brim: Brim) -> None:
    knobs = listed(brim, "torchvision:swin3d_t")
    assert [(name, knob["default"]) for name, knob in knobs.items()] == [("frames", 16), ("size", 224)]
    assert (knobs["size"]["minimum"], knobs["size"]["maximum"]) == (1, None)


def test_every_source_is_listed(brim: Brim, factories: str, tmp_path: Path) -> None:
    language = saved_models.save_language_model(tmp_path / "lm")
    reader = saved_models.save_vision_language_model(tmp_path / "vlm")
    assert list(listed(brim, "timm:resnet10t")) == ["size"]
    assert list(listed(brim, f"py:{factories}:rows")) == ["width"]
    assert list(listed(brim, str(language))) == ["tokens", "max_new_tokens", "layers"]
    assert list(listed(brim, f"hf:{reader}")) == ["max_new_tokens", "layers"]


def test_the_table_fits_eighty_columns(brim: Brim, tmp_path: Path) -> None:
    model = str(saved_models.save_language_model(tmp_path / "lm"))
    result = brim("knobs", model)
    assert (result.code, result.err) == (0, "")
    heading, *rows, any_model = result.out.splitlines()
    assert "dtype" in any_model
    assert heading.split() == ["knob", "default", "values", "meaning"]
    assert [row.split()[:3] for row in rows] == [
        ["tokens", "288", "1…320"],
        ["max_new_tokens", "32", "1…320"],
        ["layers", "2", "1…2"],
    ]
    assert all(len(line) <= 80 for line in result.out.splitlines())


def test_a_model_without_knobs_says_so(brim: Brim, factories: str) -> None:
    assert brim("knobs", f"py:{factories}:nothing").out == f"py:{factories}:nothing has no knobs\n"


@pytest.mark.parametrize(
    ("model", "words"), [("squeezenet1_2", "squeezenet1_1"), ("hf:FOLDER", "has no config.json"), ("py:no", "py:")]
)
def test_a_model_that_is_not_there_ends_with_two(brim: Brim, tmp_path: Path, model: str, words: str) -> None:
    result = brim("knobs", model.replace("FOLDER", str(tmp_path)))
    assert result.code == 2
    assert words in " ".join(result.err.split())


def test_a_vision_language_folder_without_processor_is_refused(brim: Brim, tmp_path: Path) -> None:
    folder = saved_models.save_vision_language_model(tmp_path / "vlm")
    for file in folder.glob("*processor*"):
        file.unlink()
    result = brim("knobs", str(folder))
    assert result.code == 2
    assert "processor cannot be loaded" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (Knob(name="a", default=3, minimum=1), "1…"),
        (Knob(name="a", default=3, minimum=1, maximum=9), "1…9"),
        (Knob(name="a", default=3, minimum=3, maximum=3), "3"),
        (Knob(name="a", default=32, minimum=32, multiple_of=32), "32…, multiples of 32"),
        (Knob(name="a", default=3), "any"),
        (Knob(name="a", default=True), "true, false"),
        (Knob(name="a", default=0.5), "a number"),
        (Knob(name="a", default="x"), "any"),
    ],
)
def test_values_are_shown_in_a_few_characters(knob: Knob, text: str) -> None:
    assert values_text(knob) == text


def test_help_has_an_example_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom brim.cli.main import run\n"
        "try: run(['knobs', '--help'])\nfinally: assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Example: brim knobs" in result.stdout
