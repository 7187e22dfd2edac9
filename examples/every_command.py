"""Every command of brim as a Python call, on files that it writes itself: a small table, a model of one function.

python examples/every_command.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import brim

FACTORIES = """
def answers(suffix: str = "!"):
    return lambda samples: [sample.prompt + suffix for sample in samples]

def rows(width: int = 256):
    import torch
    return (lambda batch: batch * 2), (lambda n: torch.ones(n, width))
"""
TRAINING = {"model": {"type": "mlp"}, "hp": {"epochs": 1, "effective_batch": 8}, "training": {"device": "cpu"}}


def main(folder: Path) -> None:
    (folder / "models.py").write_text(FACTORIES)
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n}", "answer": f"{n}!"}) + "\n" for n in range(8)))
    table = folder / "table.csv"
    table.write_text("a,b,label\n" + "".join(f"{n},{n % 3},{n % 2}\n" for n in range(32)))

    plan = brim.find(f"py:{folder}/models.py:rows", device="cpu", memory_limit="1MiB", max_batch_size=64)
    print(f"find      batch size {plan.batch_size}: {plan.reason}")

    forecast = brim.forecast(f"py:{folder}/models.py:rows", gpu="rtx 4090", max_batch_size=64)
    print(f"forecast  at most {forecast.batch_size_max}, {forecast.forecasts[-1].peak_reserved_bytes:,} bytes reserved")

    doubled = brim.map(lambda numbers: [2 * number for number in numbers], range(5))
    print(f"map       {list(doubled)}")

    result = brim.evaluate(
        f"py:{folder}/models.py:answers", questions, metrics="exact_match", device="cpu", output=folder / "eval"
    )
    print(f"evaluate  exact match {result.metrics['exact_match']['value']:.2f}")

    profile = brim.profile(
        f"py:{folder}/models.py:answers", questions, {"suffix": ["!", "more"]}, metrics=["exact_match"], device="cpu",
        latency_samples=0, output=folder / "profile",
    )  # fmt: skip
    print(f"profile   {[(entry['suffix'], entry['accuracy']) for entry in profile.entries]}")

    trained = brim.train({**TRAINING, "data": {"root": str(table)}}, output=folder / "train", batch_size=8)
    print(f"train     top-1 {trained.metrics['top1']['mean']:.2f}")

    page = brim.report(folder / "eval")
    print(f"report    {page.path.name}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
