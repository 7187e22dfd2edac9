"""A type checker understands the Python calls: it passes the examples, and finds misspelt names and wrong types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOOD = """
from pathlib import Path
import brim

plan: brim.Plan = brim.find("resnet50", mode="train", batch_size=8, knob={"size": 224})
size: int = brim.forecast("resnet50", gpu=["h100", "a100"]).batch_size_max
result: brim.EvalResult = brim.evaluate("m", Path("d"), metrics=["bleu"], memory_limit="8GiB", output="runs/x")
brim.profile("m", "d", {"max_crops": range(2, 14)}, order="descending", batch_size_for={13: 24})
brim.profile_knob("m", "d", "max_crops")
brim.train({"model": {"type": "mlp"}}, {"hp.epochs": 3}, seeds=10, lr_scale="sqrt")
brim.fit("config.yaml", seeds=[1, 2])
brim.sweep("grid.yaml", on="slurm", slurm={"partition": "gpu"})
brim.report(["a", Path("b")], output="c.html")


@brim.find_executable_batch_size(starting_batch_size=64)
def train(batch_size: int, name: str, *, rate: float = 0.1) -> float:
    return batch_size * rate


@brim.find_executable_batch_size
def evaluate(batch_size: int) -> str:
    return str(batch_size)


trained: float = train("first", rate=0.2)
answer: str = evaluate()
verdicts: list[str] = [trial.verdict for trial in train.trials]
for batch in brim.batches([1, 2, 3], plan, device="cpu"):
    with batch as numbers:
        print(batch.indices, numbers)
"""
BAD = {
    'brim.find("resnet50", batchsize=8)': "batchsize",
    'brim.find("resnet50", batch_size="many")': "batch_size",
    'brim.find("resnet50", objective="biggest")': "objective",
    'brim.forecast("resnet50", memory=1.5)': "memory",
    'brim.evaluate("m", "d", limit="ten")': "limit",
    'brim.evaluate("m", "d", skipbad=True)': "skipbad",
    'brim.evaluate("m", "d").metric': "metric",
    'brim.profile("m", "d", {"k": range(3)}, order="sideways")': "order",
    'brim.train("c.yaml", seeds=1.5)': "seeds",
    'brim.sweep("g.yaml", on="cloud")': "on",
    "brim.report(7)": "report",
    "brim.find_batch_size(len, len, max_bach_size=4)": "max_bach_size",
    "brim.find_executable_batch_size(starting_batchsize=4)": "starting_batchsize",
    'brim.batches([1], batch_size="many")': "batch_size",
    "brim.accumulate(len, [1], model=3)": "accumulate",
    "brim.find_executable_batch_size(lambda size, steps: steps)(1, 2)": "arguments",
}


@pytest.mark.timeout(600)
def test_mypy_passes_the_examples_and_finds_mistakes(tmp_path: Path) -> None:
    good, bad = tmp_path / "good_calls.py", tmp_path / "bad_calls.py"
    good.write_text(GOOD, encoding="utf-8")
    bad.write_text("import brim\n" + "\n".join(BAD) + "\n", encoding="utf-8")
    examples = sorted(map(str, (ROOT / "examples").rglob("*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(good), str(bad),
         *examples],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        match = re.match(r"(.*?):(\d+): error: (.*)", line)
        if match is not None:
            assert match[1].endswith("bad_calls.py"), line
            found.setdefault(int(match[2]), match[3])
    assert done.returncode == 1, done.stdout + done.stderr
    assert {number - 2 for number in found} == set(range(len(BAD))), done.stdout
    for place, (call, word) in enumerate(BAD.items()):
        assert word in found[place + 2], (call, found[place + 2])
