"""What tests of profiles write and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brim.profiling.run import ProfileResult, profile
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest

# Answers the first `reach` questions rightly: accuracy rises with the knob, without a tensor.
FUNCTIONS = """
import json
from pathlib import Path


def reader(reach: int = 4, width: int = 1):
    def answer(samples):
        with (Path(__file__).parent / "seen.jsonl").open("a") as file:
            file.write(json.dumps([reach, len(samples)]) + "\\n")
        return ["yes" if int(sample.id) < reach else "no" for sample in samples]

    return answer


def greedy(reach: int = 4):
    def answer(samples):
        if reach > 6:
            raise MemoryError
        return ["yes" for sample in samples]

    return answer


def broken(reach: int = 4):
    if reach == 3:
        raise ValueError("three is not supported")
    return lambda samples: ["yes" for sample in samples]
"""


def write_questions(folder: Path, count: int = 8) -> Path:
    path = folder / "questions.jsonl"
    rows = [{"id": str(number), "question": f"number {number}?", "answer": "yes"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model(folder: Path, name: str = "reader") -> str:
    (folder / "functions.py").write_text(FUNCTIONS)
    return f"py:{folder / 'functions.py'}:{name}"


def batches(folder: Path) -> list[tuple[int, int]]:
    """What `reader` was asked: (reach, samples) of every batch."""
    path = folder / "seen.jsonl"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def request(
    folder: Path, *, name: str = "reader", axes: Any = None, base: dict[str, Any] | None = None, **more: Any
) -> ProfileRequest:
    settings: dict[str, Any] = {"device": "cpu", "use_cache": False, "metrics": ("exact_match",), **(base or {})}
    return ProfileRequest(
        base=EvalRequest(model=model(folder, name), data=str(write_questions(folder)), **settings),
        axes={"reach": ("2", "4", "6")} if axes is None else axes,
        **{"latency_samples": 2, **more},
    )


def run(folder: Path, **more: Any) -> ProfileResult:
    return profile(request(folder, **more), output=folder / "run")
