"""`brim check` and the line that ends every run: what people read, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import brim as package
from tests.advice.test_checks import GIB, evaluation

Brim = Callable[..., Any]
FUNCTION = """
import time

def answers(pause: float = 0.001):
    def answer(samples):
        time.sleep(pause * len(samples))
        return [sample.prompt.upper() for sample in samples]
    return answer
"""
CONFIG = """\
model: {{type: mlp, params: {{hidden: [8]}}}}
data: {{root: {root}}}
hp: {{epochs: 2, effective_batch: 16}}
training: {{device: cpu}}
"""


def evaluate(brim: Brim, tmp_path: Path, name: str, *flags: str) -> Any:
    (tmp_path / "functions.py").write_text(FUNCTION)
    rows = [{"id": str(n), "prompt": "x" * (n % 7 + 1), "reference": "X"} for n in range(96)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return brim(
        "eval", "-m", f"py:{tmp_path / 'functions.py'}:answers", "-d", str(tmp_path / "words.jsonl"), "-b", "4",
        "--no-auto-batch-size", "--num-workers", "0", "--device", "cpu", "--no-cache", "-o", str(tmp_path / name),
        *flags,
    )  # fmt: skip


def test_an_evaluation_ends_with_its_checks_and_a_slower_one_fails_against_it(brim: Brim, tmp_path: Path) -> None:
    result = evaluate(brim, tmp_path, "first")
    assert result.code == 0
    assert "check: " in result.out
    assert f"brim check {tmp_path / 'first'}" in result.out
    slow = evaluate(brim, tmp_path, "slow", "--knob", "pause=0.01", "--json")
    assert json.loads(slow.out)["summary"]["throughput"][-1][1] == 96, "with --json the document alone"
    first, second = str(tmp_path / "first"), str(tmp_path / "slow")
    shown = brim("check", second, "--against", first)
    assert shown.code == 1
    assert "FAIL  speed-up" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    faster = json.loads(brim("check", first, "--against", second, "--min-speed-up", "2", "--json").out)
    line = next(line for line in faster["lines"] if line["name"] == "speed_up")
    assert (line["verdict"], line["limit"]) == ("pass", 2)
    assert line["interval"][0] > 2


def test_a_training_ends_with_its_checks(brim: Brim, tmp_path: Path) -> None:
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((80, 4)).astype("float32")
    numpy.savez(tmp_path / "features.npz", features=rows, labels=(rows[:, 0] > 0).astype(int))
    (tmp_path / "config.yaml").write_text(CONFIG.format(root=tmp_path / "features.npz"))
    run = tmp_path / "run"
    result = brim("train", str(tmp_path / "config.yaml"), "-o", str(run))
    assert result.code == 0
    assert "check: " in result.out
    document = json.loads(brim("check", str(run), "--max-epoch-seconds", "600", "--json").out)
    verdicts = {line["name"]: line["verdict"] for line in document["lines"]}
    assert verdicts["epoch_seconds"] == "pass"
    assert verdicts["out_of_memory"] == "pass"
    assert verdicts["alloc_retries"] == verdicts["gpu_utilisation"] == "unknown", "a CPU has neither"
    assert brim("check", str(run), "--max-epoch-seconds", "1e-9").code == 1
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index(">Checks</h2>") < page.index('id="section-2"')


def test_exit_codes_follow_the_lines(brim: Brim, tmp_path: Path) -> None:
    good, bad = evaluation(tmp_path / "good"), evaluation(tmp_path / "bad", oom_events=1)
    assert (brim("check", str(good)).code, brim("check", str(bad)).code) == (0, 1)
    assert brim("check", str(good), "--memory-range", "25GiB-40GiB").code == 0
    assert brim("check", str(good), "--memory-range", "31GiB-40GiB").code == 1
    assert brim("check", str(tmp_path)).code == 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--memory-range", "25GiB"), ("--memory-range", "40GiB-25GiB"), ("--memory-range", "a-b"),
        ("--memory-range", "-40GiB"), ("--min-utilisation", "30"), ("--max-epoch-seconds", "0"),
        ("--min-speed-up", "2"), ("--max-total-seconds", "soon"),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_are_refused(brim: Brim, tmp_path: Path, flags: tuple[str, str]) -> None:
    result = brim("check", str(evaluation(tmp_path)), *flags)
    assert result.code == 2
    assert flags[0] in result.err


def test_the_call_gives_what_the_command_prints(brim: Brim, tmp_path: Path) -> None:
    folder = evaluation(tmp_path, gpu_utilisation_mean=0.1)
    result = package.check(folder, memory_range="25GiB-40GiB")
    assert [line.name for line in result.failed] == ["gpu_utilisation"]
    printed = brim("check", str(folder), "--memory-range", "25GiB-40GiB", "--json")
    assert printed.code == 1
    assert json.loads(printed.out) == json.loads(json.dumps(result.document))
    assert result.lines[6].limit == [25 * GIB, 40 * GIB]
