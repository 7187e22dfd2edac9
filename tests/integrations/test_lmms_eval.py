"""lmms-eval with `--model brim`, in an environment of its own, whose Python is in BRIM_LMMS_PYTHON (make test-lmms)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from brim.errors import RequestError
from tests import saved_models
from tests.integrations.lmms_eval_program import CUT_AT, NEW_TOKENS

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("BRIM_LMMS_PYTHON", "")
PROGRAM = "tests.integrations.lmms_eval_program"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CODE = """
from PIL import Image

def shown(doc):
    return [Image.open(path) for path in doc["images"]]

def asked(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def scored(doc, results):
    return {"exact": float(results[0] == doc["answer"])}
"""
KILLED_AFTER = 2  # batches

in_its_environment = [
    pytest.mark.slow,  # lmms-eval is imported anew for each; test_harness_pictures.py is the cheap one
    pytest.mark.skipif(not PYTHON, reason="BRIM_LMMS_PYTHON does not name the Python of lmms-eval's environment"),
]


def write_task(folder: Path) -> Path:
    """Questions with no, one or two images of several kinds; the last is one that came before."""
    chance = random.Random(3)
    folder.mkdir(parents=True)
    records = []
    for number in range(14):
        images = []
        for place in range((1, 1, 2, 0)[number % 4]):
            path = folder / f"{number}-{place}.png"
            mode = ("RGB", "L", "RGBA")[(number + place) % 3]
            size = (chance.randint(6, 40), chance.randint(6, 40))
            Image.frombytes(mode, size, chance.randbytes(size[0] * size[1] * len(mode))).save(path)
            images.append(str(path))
        words = [chance.choice(saved_models.WORDS[:24]) for _ in range(chance.randint(1, 30))]
        records.append({"question": " ".join(words), "images": images, "answer": "w1"})
    records.append(records[4])
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (folder / "functions.py").write_text(CODE, encoding="utf-8")
    (folder / "pictured.yaml").write_text(
        f"""
task: pictured
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "questions.jsonl"}}}}}
output_type: generate_until
test_split: test
doc_to_visual: !function functions.shown
doc_to_text: !function functions.asked
doc_to_target: answer
process_results: !function functions.scored
generation_kwargs: {{max_new_tokens: {NEW_TOKENS}, temperature: 0, top_p: 1.0, num_beams: 1, do_sample: false}}
metric_list: [{{metric: exact, aggregation: mean, higher_is_better: true}}]
""",
        encoding="utf-8",
    )
    return folder


def save_model(folder: Path) -> Path:
    saved_models.save_vision_language_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def run(*words: object, code: int = 0) -> str:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    ended = subprocess.run(
        [PYTHON, *map(str, words)], capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT, check=False
    )
    assert ended.returncode == code, ended.stdout[-3000:] + ended.stderr[-6000:]
    return ended.stdout + ended.stderr


def flags(model: Path, task: Path, output: Path, *more: str) -> list[str]:
    arguments = [f"pretrained={model}", "dtype=float32", f"output={output}", "no_cache=True", *more]
    return ["--model", "brim", "--model_args", ",".join(arguments), "--tasks", "pictured", "--include_path", str(task),
            "--device", "cpu", "--log_samples", "--output_path", f"{output}-results"]  # fmt: skip


def answers_in(results: Path) -> list[str]:
    (logged,) = results.rglob("*samples*pictured*.jsonl")
    lines = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()]
    by_document = {line["doc_id"]: line["filtered_resps"] for line in lines}
    return [by_document[number] for number in sorted(by_document)]


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "vlm")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("tasks") / "made")


@pytest.fixture(scope="module")
def expected(model: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    answers = tmp_path_factory.mktemp("alone") / "answers.json"
    run("-m", PROGRAM, "alone", model, task / "questions.jsonl", answers)
    found: list[str] = json.loads(answers.read_text(encoding="utf-8"))
    assert len(set(found)) > 5  # it does not always say the same
    return found


class TestInItsEnvironment:
    pytestmark = in_its_environment

    def test_answers_are_those_of_the_model_by_itself(
        self, model: Path, task: Path, expected: list[str], tmp_path: Path
    ) -> None:
        run("-m", "lmms_eval", *flags(model, task, tmp_path / "run"))
        assert answers_in(Path(f"{tmp_path / 'run'}-results")) == expected
        lines = journal(tmp_path / "run")
        assert len(lines) == len({line["id"] for line in lines}) == 14  # of fifteen questions two are the same
        assert max(line["batch_size"] for line in lines) > 1

    def test_killed_in_the_middle_it_computes_only_what_is_missing(
        self, model: Path, task: Path, expected: list[str], tmp_path: Path
    ) -> None:
        asked = flags(model, task, tmp_path / "run", "cost_cap=80")
        run("-m", PROGRAM, "killed", KILLED_AFTER, *asked, code=-signal.SIGKILL)
        before = journal(tmp_path / "run")
        assert 0 < len(before) < 14
        said = run("-m", "lmms_eval", *flags(model, task, tmp_path / "run", "cost_cap=80", "resume=True"))
        after = journal(tmp_path / "run")
        assert after[: len(before)] == before
        assert len(after) == len({line["id"] for line in after}) == 14
        assert answers_in(Path(f"{tmp_path / 'run'}-results")) == expected
        assert "Traceback" not in said

    def test_as_an_object_it_refuses_what_it_cannot_do(
        self, model: Path, task: Path, expected: list[str], tmp_path: Path
    ) -> None:
        run("-m", PROGRAM, "object", model, task, tmp_path / "found.json")
        found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
        assert found["cut"] == [answer.split(CUT_AT)[0] for answer in expected[: len(found["cut"])]] != expected
        assert "scores none" in found["loglikelihood"]
        assert "in one round" in found["rounds"]
        assert "document 0 has videos" in found["video"]
        assert "which is no file here" in found["address"]
        assert "make another one" in found["again"]
        assert "name the run with output=DIR" in found["resume"]


@pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is not None, reason="lmms-eval is installed here")
def test_without_lmms_eval_an_error_says_what_to_install() -> None:
    with pytest.raises(RequestError, match="pip install 'lmms-eval"):
        importlib.import_module("brim.integrations.lmms_eval")


def test_the_entry_point_names_a_function_that_needs_nothing_but_lmms_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.ModuleType("lmms_eval.models.registry_v2")
    registry.ModelManifest = lambda **fields: fields  # type: ignore[attr-defined]
    for name in ("lmms_eval", "lmms_eval.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["lmms_eval.models"]["brim"].partition(":")
    manifest = getattr(importlib.import_module(module), function)()
    assert manifest == {"model_id": "brim", "chat_class_path": "brim.integrations.lmms_eval.BrimLMMS"}
