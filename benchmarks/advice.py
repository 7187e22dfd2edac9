"""Runs that are slow for one known reason: does `brim advise` name it first, and does following it bring what it says?

    python benchmarks/advice.py              # on CUDA, three minutes
    python benchmarks/advice.py --tiny       # on the CPU, small models

Nothing is downloaded: models have random weights, and tokenizers a word for a token. A row says which cause was named
first, what it promised, and what the same work brought in turns with the run as it was, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import brim
from brim.advice.advise import advise_run
from brim.advice.run_reader import Run, open_run
from brim.advice.run_requests import eval_request
from brim.advice.trials import try_advice
from brim.evaluation.run import evaluate

WORDS = [f"w{number}" for number in range(1000)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
SLOW_ROWS = """
import time

import torch
from torch import nn


class Rows:
    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), float(item % 2)), item % 2


def rows(count: int = 512, seconds: float = 0.01):
    return lambda name: Rows(count, seconds) if name == "train" else None


def net(num_classes: int = 2):
    pooled = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(32, num_classes))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large models and data are."""

    device: str
    width: int
    layers: int
    samples: int
    longest: int
    hidden: int


CARD = Scale(device="cuda", width=1024, layers=12, samples=768, longest=480, hidden=2048)
TINY = Scale(device="cpu", width=32, layers=2, samples=96, longest=60, hidden=64)


class Bench:
    """Makes the runs of one scale in a folder."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder, self.scale, self.draw = folder, scale, random.Random(0)

    def tokenizer(self) -> Any:
        vocabulary = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )

    def shape(self) -> dict[str, Any]:
        scale = self.scale
        return {
            "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": scale.width, "intermediate_size": 2 * scale.width,
            "num_hidden_layers": scale.layers, "num_attention_heads": max(scale.width // 64, 4),
            "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
        }  # fmt: skip

    def language_model(self) -> Path:
        """Half of all words end an answer, so that most end within eight tokens."""
        place = self.folder / "language-model"
        if not place.exists():
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self.shape()))
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.normal_(0, 0.4 if self.scale.width < 100 else 0.08)
            model.generation_config.eos_token_id = list(range(1, len(SPECIAL) + len(WORDS), 2))
            model.to(torch.bfloat16 if self.scale.device == "cuda" else torch.float32).save_pretrained(place)
            self.tokenizer().save_pretrained(place)
        return place

    def classifier(self) -> Path:
        place = self.folder / "classifier"
        torch.manual_seed(0)
        names = {0: "a", 1: "b"}
        config = transformers.BertConfig(
            **{**self.shape(), "bos_token_id": 2}, id2label=names, label2id={"a": 0, "b": 1}
        )
        model = transformers.BertForSequenceClassification(config)
        model.to(torch.bfloat16 if self.scale.device == "cuda" else torch.float32).save_pretrained(place)
        self.tokenizer().save_pretrained(place)
        return place

    def lines(self, name: str, lines: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    def text(self, words: int) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(words))

    def short_answers(self) -> Path:
        """Questions that the model answers in at most eight tokens."""
        path = self.folder / "short.jsonl"
        if path.exists():
            return path
        many = [{"id": f"q{n}", "question": self.text(12), "answer": "w1"} for n in range(2 * self.scale.samples)]
        run = self.evaluated("short-answers", self.language_model(), self.lines("many.jsonl", many), max_tokens=9)
        found = [line for line in run.samples() if not line["truncated"] and line["tokens"] <= 8][: self.scale.samples]
        return self.lines(path.name, [{"id": one["id"], "question": one["input"], "answer": "w1"} for one in found])

    def evaluated(self, name: str, model: Path, data: Path, **settings: Any) -> Run:
        brim.evaluate(str(model), data, output=self.folder / name, device=self.scale.device, no_cache=True, **settings)
        return open_run(self.folder / name)

    def trained(self, name: str, settings: dict[str, Any]) -> Run:
        brim.train({**settings, "training": {"device": self.scale.device, **settings.get("training", {})}},
                   output=self.folder / name, no_cache=True)  # fmt: skip
        return open_run(self.folder / name)

    def slow_loader(self) -> Run:
        file = self.folder / "slow_rows.py"
        file.write_text(SLOW_ROWS, encoding="utf-8")
        count = 512 if self.scale.device == "cuda" else 128
        return self.trained("slow-loader", {
            "model": {"type": f"py:{file}:net"},
            "data": {"type": f"py:{file}:rows", "num_workers": 0, "params": {"count": count}},
            "hp": {"epochs": 1, "effective_batch": 32},
        })  # fmt: skip

    def small_batch(self) -> Run:
        return self.evaluated("small-batch", self.language_model(), self.short_answers(), max_tokens=16, batch_size=1,
                              limit=self.scale.samples // 6)  # fmt: skip

    def padded(self) -> Run:
        long, short = 2 * self.scale.samples // 5, 5 * self.scale.samples
        lengths = [self.scale.longest] * long + [4] * short
        lines = [{"text": self.text(length), "label": "ab"[n % 2]} for n, length in enumerate(lengths)]
        data = self.lines("padded.jsonl", lines)
        return self.evaluated("padded", self.classifier(), data, batch_size=len(lines))

    def long_limit(self) -> Run:
        return self.evaluated("long-limit", self.language_model(), self.short_answers(), max_tokens=256, cost_cap=4096)

    def truncated(self) -> Run:
        return self.evaluated("truncated", self.language_model(), self.short_answers(), max_tokens=1)

    def checkpoints(self) -> Run:
        draw = numpy.random.default_rng(0)
        rows = draw.standard_normal((1024, 64)).astype("float32")
        numpy.savez(self.folder / "features.npz", features=rows, labels=rows[:, :4].argmax(axis=1))
        hidden = [self.scale.hidden, self.scale.hidden]
        return self.trained("checkpoints", {
            "model": {"type": "mlp", "params": {"hidden": hidden}},
            "data": {"root": str(self.folder / "features.npz")},
            "hp": {"epochs": 2, "effective_batch": 64}, "training": {"checkpoint_every": 1},
        })  # fmt: skip


CASES: dict[str, Callable[[Bench], Run]] = {
    "loading": Bench.slow_loader, "batch_size": Bench.small_batch, "padding": Bench.padded,
    "max_new_tokens": Bench.long_limit, "truncated_answers": Bench.truncated, "checkpoints": Bench.checkpoints,
}  # fmt: skip


def row(bench: Bench, cause: str) -> dict[str, Any]:
    """One case: what was named, promised and measured."""
    started = time.perf_counter()
    run = CASES[cause](bench)
    pieces = advise_run(run)
    named = pieces[0].name if pieces else "none"
    found: dict[str, Any] = {"case": cause, "named_first": named, "right": named == cause}
    piece = next((one for one in pieces if one.name == cause), None)
    if piece is not None and cause == "truncated_answers":
        after = evaluate(eval_request(run, piece.settings), output=bench.folder / "raised").summary["answer_tokens"]
        before = run.summary["answer_tokens"]["truncated_fraction"]
        left = after["truncated_fraction"]
        cut = f"{before:.0%} cut off before, {left:.0%} after"
        found |= {"promised": "fewer cut off", "measured": cut, "half": left <= before / 2}
    elif piece is not None:
        (tried,) = try_advice(run, [piece], samples=10**6, repeats=3, note=_silent)
        gain, promised = tried.gain, piece.expected_gain
        half = gain is not None and promised is not None and gain.value >= 1 + (promised - 1) / 2
        found |= {"promised": piece.gain_text, "measured": tried.text, "half": half}
    return {**found, "seconds": time.perf_counter() - started}


def _silent(line: str) -> None:
    del line


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for cause in asked.cases.split(","):
            place = Path(folder) / cause
            place.mkdir()
            rows.append(row(Bench(place, TINY if asked.tiny else CARD), cause))
            if not asked.json:
                print(_line(rows[-1]), flush=True)
    if asked.json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"{sum(one['right'] for one in rows)} of {len(rows)} causes named first, "
              f"{sum(bool(one.get('half')) for one in rows)} brought half of the promise or more, "
              f"{sum(one['seconds'] for one in rows):.0f} s")  # fmt: skip


def _line(one: dict[str, Any]) -> str:
    right = "yes" if one["right"] else f"no: {one['named_first']}"
    half = "yes" if one.get("half") else "no"
    return (
        f"| {one['case']} | {right} | {one.get('promised', '—')} | {one.get('measured', '—')} | {half} | "
        f"{one['seconds']:.0f} s |"
    )


if __name__ == "__main__":
    main()
