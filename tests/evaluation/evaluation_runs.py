"""What tests of evaluations write, run and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import brim
from brim.evaluation.run import EvalResult

# A model without a tensor: an evaluation with it takes twenty milliseconds.
FUNCTIONS = """
def shout(suffix=""):
    return lambda samples: [sample.prompt.upper() + suffix for sample in samples]
"""


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_words(path: Path, count: int = 20) -> Path:
    """Questions of different lengths that `shout` answers, every fifth wrongly."""

    def record(number: int) -> dict[str, str]:
        length = 1 + number % 7
        return {"id": f"w{number}", "question": "a" * length, "answer": "A" * (length + (number % 5 == 0))}

    return write_lines(path, map(record, range(count)))


def shout(folder: Path) -> str:
    """The model's name for brim."""
    file = folder / "functions.py"
    if not file.exists():
        file.write_text(FUNCTIONS, encoding="utf-8")
    return f"py:{file}:shout"


def run(model: Path | str, data: Path, output: Path, **settings: Any) -> EvalResult:
    """An evaluation on the CPU that neither reads nor leaves a cached plan."""
    settings = {"device": "cpu", "use_cache": False, **settings}
    result: EvalResult = brim.evaluate(str(model), data, output=output, **settings)
    return result


def predictions(result: EvalResult) -> list[Any]:
    return [sample["prediction"] for sample in result.samples]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """samples.jsonl as it is on disk."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def without_sizes(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines without what may differ between two runs of the same work."""
    return [{name: value for name, value in line.items() if name != "batch_size"} for line in lines]


def record_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return document
