"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package, and tried there.

A block with a `title` is a file to write, or, in a `diff` block, an edit of one; a `bash` block is run. A recipe
that needs one more edit than it shows, or that shows code which has changed, fails here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from brim.storage.python_files import submodules
from tests import saved_models
from tests.reported_runs import write_run

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RECIPES = ("A setting", "A data format", "A metric", "A knob of a model family", "A kind of run in the report")

# One process for all that needs torch: each command as the `brim` script would run it.
COMMANDS = """
import contextlib, io, json, sys
from brim.cli.main import run
from brim.models.build import WorkloadRequest, build_workload

given, answers = json.load(sys.stdin), {}
for name, arguments in given["commands"].items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(arguments)
        except SystemExit as stop:
            answers[name] = [stop.code or 0, out.getvalue(), err.getvalue()]
request = WorkloadRequest(model=given["model"], mode="forward", knobs={"sliding_window": 4}, device="cpu")
workload, _ = build_workload(request)
answers["applied"] = [0, str([module.config.sliding_window for module in workload.modules()]), ""]
json.dump(answers, sys.__stdout__)
"""
FACTORY = "def first(samples):\n    return ['Yes, of course' for sample in samples]\n\ndef model():\n    return first\n"


class Block(NamedTuple):
    """One fenced block of a recipe."""

    language: str
    path: str
    text: str


def blocks_of(recipe: str) -> list[Block]:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### {recipe}\n")[2].partition("\n#")[0]
    return [Block(*found) for found in BLOCK.findall(section)]


def edited(text: str, diff: str) -> str:
    """A text with one hunk applied, whose old lines must stand in it exactly once."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, before
    return text.replace(before, after)


def follow(recipe: str, copy: Path, environment: dict[str, str]) -> None:
    for block in blocks_of(recipe):
        file = copy / block.path
        if block.language == "diff":
            file.write_text(edited(file.read_text(encoding="utf-8"), block.text), encoding="utf-8")
        elif block.language == "python":
            assert not file.exists()
            file.write_text(block.text, encoding="utf-8")
        else:
            assert block.language == "bash"
            for command in block.text.splitlines():
                words = command.replace("python ", f"{sys.executable} ", 1).split()
                subprocess.run(words, cwd=copy, env=environment, check=True, timeout=60)


class Copy(NamedTuple):
    """A copy of the package, with the environment in which Python finds it."""

    folder: Path
    environment: dict[str, str]

    def python(self, code: str, given: Any = None) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(given), cwd=self.folder, env=self.environment,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The package with every recipe followed, one after the other."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.safetensors")
    shutil.copytree(ROOT / "src" / "brim", folder / "src" / "brim", ignore=ignored)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("measurements"))
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    for recipe in RECIPES:
        follow(recipe, folder, environment)
    return Copy(folder, environment)


@pytest.fixture(scope="module")
def answers(copy: Copy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What the commands of the copy answer to what the recipes added."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "reader.py").write_text(FACTORY)
    (folder / "questions.qa").write_text("Q: Is it?\nA: yes, it is\n\nQ: Was it?\nA: no\n")
    config = transformers.MistralConfig(
        **saved_models.IDS, **saved_models.SHAPE, num_key_value_heads=2, sliding_window=8
    )
    model = saved_models.save(folder / "mistral", transformers.MistralForCausalLM(config), saved_models.tokenizer())
    latency = {"model": "models/small"}, {"latency_seconds": {"p50": 0.25, "p99": 1.5}}
    write_run(folder / "run", kind="latency", request=latency[0], summary=latency[1])
    commands = {
        "eval": [
            "eval", f"py:{folder / 'reader.py'}:model", "-d", str(folder / "questions.qa"), "--metrics",
            "starts_alike", "-o", str(folder / "evaluated"), "--device", "cpu", "--no-cache", "--json",
        ],
        "knobs": ["knobs", str(model), "--json"],
        "too wide": ["find", str(model), "--knob", "sliding_window=9", "--device", "cpu"],
        "report": ["report", str(folder / "run")],
        "other": ["eval", "py:reader.py:model", "-d", str(folder / "reader.py")],
    }  # fmt: skip
    found = json.loads(copy.python(COMMANDS, {"commands": commands, "model": str(model)}))
    found["page"] = (0, (folder / "run" / "report.html").read_text(encoding="utf-8"), "")
    return {name: tuple(answer) for name, answer in found.items()}


def test_every_recipe_has_one_edit_or_one_file() -> None:
    for recipe in RECIPES:
        code = [block for block in blocks_of(recipe) if block.language != "bash"]
        assert len(code) == 1, recipe
        assert code[0].path.startswith("src/brim/"), recipe


def test_a_setting_is_a_flag_a_parameter_a_key_and_a_row_of_the_docs(copy: Copy) -> None:
    (copy.folder / "settings.yaml").write_text("style: other.css\n")
    checks = """
        import inspect, sys
        import brim
        from brim.settings.commands import COMMANDS
        from brim.settings.declare import declared, read_settings, read_settings_file

        kind = COMMANDS["report"].declaration()
        assert "style" in inspect.signature(brim.report).parameters
        assert "style: A style sheet in place of brim's own." in brim.report.__doc__
        assert str(read_settings(kind, {"runs": ["run"], "style": "own.css"}).style) == "own.css"
        assert read_settings_file("settings.yaml", declared(kind))[0] == {"style": "other.css"}
        sys.argv = ["brim", "report", "--help"]
        from brim.cli.main import run
        run()
    """
    shown = copy.python("\n".join(line[8:] for line in checks.splitlines()))
    assert re.search(r"--style +FILE +A style sheet in place of brim's own\.", shown)
    page = (copy.folder / "docs" / "settings.md").read_text(encoding="utf-8")
    assert "| `--style` | `style` |  | A style sheet in place of brim's own. |" in page


def test_a_format_is_read_and_listed(answers: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = answers["eval"]
    assert code == 0, err
    assert json.loads(out)["summary"]["num_samples"] == 2
    assert "questions in a text (.qa, also .gz)" in answers["other"][2]


def test_a_metric_is_found_by_its_alias_and_scores(answers: dict[str, tuple[int, str, str]]) -> None:
    assert json.loads(answers["eval"][1])["summary"]["metrics"]["first_word"]["value"] == 0.5


def test_a_knob_is_listed_applied_and_bounded(answers: dict[str, tuple[int, str, str]]) -> None:
    knobs = {knob["name"]: knob for knob in json.loads(answers["knobs"][1])["knobs"]}
    assert (knobs["sliding_window"]["default"], knobs["sliding_window"]["maximum"]) == (8, 8)
    assert answers["applied"][1] == "[4]"
    code, _, err = answers["too wide"]
    assert code == 2
    assert "sliding_window" in err


def test_a_kind_of_run_has_its_own_page(answers: dict[str, tuple[int, str, str]]) -> None:
    assert answers["report"][0] == 0, answers["report"][2]
    page = answers["page"][1]
    assert "Latency of small" in page
    assert "Percentiles" in page
    assert "1.50 s" in page or "1.5 s" in page


def test_an_edit_that_no_longer_fits_is_refused() -> None:
    assert edited("a\nb\nc\n", " a\n+x\n-b\n c\n") == "a\nx\nc\n"
    with pytest.raises(AssertionError):
        edited("a\nc\n", " a\n-b\n c\n")
    with pytest.raises(AssertionError):
        edited("a\na\n", " a\n+b\n")


def test_only_the_folders_files_are_found() -> None:
    names = {module.__name__ for module in submodules("brim.metrics", without=("registry",))}
    assert {"brim.metrics.text", "brim.metrics.vqa"} <= names
    assert "brim.metrics.registry" not in names
