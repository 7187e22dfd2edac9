"""The Python reference: every public name is on a page, described, with an example that does what it says."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.settings.commands import COMMANDS
from tests.docs.blocks import ROOT
from tests.docs.compared import difference
from tests.docs.setups import my_model

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMES = [name for name in brim.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if name[0].islower()]
OLDER = {"fit": "train", "profile_knob": "profile"}  # the same function under its name of before
WITH_EXAMPLES = [name for name in NAMES if ">>>" in (inspect.getdoc(getattr(brim, name)) or "") and name not in OLDER]
SLOW = {"sweep"}  # two processes that import torch; tests/cli/test_sweep.py has a real sweep too
TRAINING = """\
model: {type: mlp, params: {hidden: [8]}}
data: {root: table.csv}
hp: {epochs: 1, effective_batch: 16, learning_rate: 0.01}
training: {device: cpu}
"""
HARNESS_TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
GRID = """\
grid_search:
  grid: {hp.learning_rate: [0.1, 0.01]}
"""


def described_on_pages() -> set[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return set(re.findall(r"^::: brim\.(\w+)$", text, flags=re.MULTILINE))


def test_every_public_name_has_its_place_on_a_page() -> None:
    assert described_on_pages() == set(NAMES) - OLDER.keys()
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in OLDER if f"`brim.{name}`" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_described(name: str) -> None:
    assert inspect.getdoc(getattr(brim, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_names_parameters_result_and_an_example(name: str) -> None:
    function = getattr(brim, name)
    text = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"^(\w+):\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE))
    described = re.findall(r"^    (\w+): ", sections.get("Args", ""), flags=re.MULTILINE)
    assert described == list(inspect.signature(function).parameters)
    assert sections["Returns"].strip()
    assert ">>> " in sections["Examples"]


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: a model, questions, tables, a training file, a grid, two runs."""
    folder = tmp_path_factory.mktemp("examples")
    my_model(folder)
    (folder / "table.csv").write_text("a,b,label\n" + "".join(f"{n},{n % 3},{n % 2}\n" for n in range(32)))
    (folder / "config.yaml").write_text(TRAINING)
    (folder / "grid.yaml").write_text(TRAINING + GRID)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(HARNESS_TASK)
    for name, atom in (("in", "C"), ("out", "N")):
        rows = "".join(f"{atom}{'C' * length}O\n" for length in range(1, 33))
        (folder / f"{name}.csv").write_text(f"smiles\n{rows}")
    for name in ("first", "second"):
        brim.evaluate(str(folder / "my-model"), folder / "questions.jsonl", output=folder / "runs" / name, device="cpu")
    return folder


class SameWords(doctest.OutputChecker):
    """Numbers may differ, as on every page."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return difference(want.splitlines(), got.splitlines()) == ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WITH_EXAMPLES]
)
def test_an_example_does_what_it_says(
    name: str, reader_folder: Path, monkeypatch: pytest.MonkeyPatch, short_probes: Callable[..., Any]
) -> None:
    monkeypatch.chdir(reader_folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed: list[str] = []
    found = doctest.DocTestFinder(recurse=False).find(
        inspect.unwrap(getattr(brim, name)), name, module=sys.modules[__name__], globs={"brim": brim, "torch": torch}
    )
    runner = doctest.DocTestRunner(checker=SameWords())
    results = [runner.run(test, out=printed.append) for test in found if test.examples]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0, "".join(printed)


def test_every_command_with_a_function_links_to_it() -> None:
    assert {command.python.name for command in COMMANDS.values() if command.python} <= set(FUNCTIONS)
