"""Runs that are slow for one known reason each, small on a CPU or large on a card.

Nothing is downloaded: models have random weights, and tokenizers a word for a token. `benchmarks/advice.py` measures
what advice on them brings in time, tests/advice counts the work that it saves.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import brim
from brim.advice.run_reader import Run, open_run

__all__ = ["CARD", "CASES", "TINY", "Scale", "SlowRuns"]

WORDS = [f"w{number}" for number in range(1000)]
POSITIONS = 1024
SPECIAL = ["<pad>", "<eos>", "<unk>"]
SLOW_ROWS = """
import os
import time

import torch
from torch import nn


class Rows:
    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        with open(LOG, "a") as file:
            file.write(f"{os.getpid()}\\n")
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


class SlowRuns:
    """Makes the runs of one scale in a folder; models and questions may be shared with others."""

    def __init__(self, folder: Path, scale: Scale, *, shared: Path | None = None) -> None:
        self.folder, self.scale, self.shared, self.draw = folder, scale, shared or folder, random.Random(0)

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
            "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
        }  # fmt: skip

    def language_model(self) -> Path:
        """Half of all words end an answer, so that most end within eight tokens."""
        place = self.shared / "language-model"
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
        place = self.shared / "classifier"
        if place.exists():
            return place
        torch.manual_seed(0)
        names = {0: "a", 1: "b"}
        config = transformers.BertConfig(
            **{**self.shape(), "bos_token_id": 2}, id2label=names, label2id={"a": 0, "b": 1}
        )
        model = transformers.BertForSequenceClassification(config)
        model.to(torch.bfloat16 if self.scale.device == "cuda" else torch.float32).save_pretrained(place)
        self.tokenizer().save_pretrained(place)
        return place

    def write(self, path: Path, lines: list[dict[str, Any]]) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    def text(self, words: int) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(words))

    def questions(self, count: int) -> list[dict[str, Any]]:
        return [{"id": f"q{number}", "question": self.text(12), "answer": "w1"} for number in range(count)]

    def short_answers(self) -> Path:
        """Questions that the model answers in at most eight tokens."""
        path = self.shared / "short.jsonl"
        if path.exists():
            return path
        many = self.write(self.shared / "many.jsonl", self.questions(2 * self.scale.samples))
        run = self.evaluated("short-answers", self.language_model(), many, max_tokens=9)
        found = [line for line in run.samples() if not line["truncated"] and line["tokens"] <= 8][: self.scale.samples]
        return self.write(path, [{"id": one["id"], "question": one["input"], "answer": "w1"} for one in found])

    def texts(self, name: str, lengths: list[int]) -> Path:
        lines = [{"text": self.text(length), "label": "ab"[number % 2]} for number, length in enumerate(lengths)]
        return self.write(self.folder / name, lines)

    def evaluated(self, name: str, model: Path, data: Path, **settings: Any) -> Run:
        brim.evaluate(str(model), data, output=self.folder / name, device=self.scale.device, no_cache=True, **settings)
        return open_run(self.folder / name)

    def trained(self, name: str, settings: dict[str, Any]) -> Run:
        brim.train({**settings, "training": {"device": self.scale.device, **settings.get("training", {})}},
                   output=self.folder / name, no_cache=True)  # fmt: skip
        return open_run(self.folder / name)

    def slow_loader(self) -> Run:
        """Every sample takes a hundredth of a second; prepared.log has the process that prepared each."""
        file = self.folder / "slow_rows.py"
        file.write_text(f"LOG = {str(self.folder / 'prepared.log')!r}\n{SLOW_ROWS}", encoding="utf-8")
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
        """One batch, nine tenths of it padding: its record does not show what padding costs."""
        lengths = [self.scale.longest] * (self.scale.samples // 6) + [4] * (5 * self.scale.samples)
        return self.evaluated("padded", self.classifier(), self.texts("padded.jsonl", lengths), batch_size=len(lengths))

    def padded_and_timed(self) -> Run:
        """The first of several batches is padded; those after it have texts of different lengths, so they show it."""
        size, longest = self.scale.samples, min(8 * self.scale.longest, POSITIONS - 64)
        steps = [longest // part for part in (32, 40, 48, 64, 80, 96, 120, 120)]
        lengths = [longest] * 2 + [steps[0]] * (size - 2) + [length for length in steps for _ in range(size)]
        data = self.texts("padded-and-timed.jsonl", lengths)
        return self.evaluated("padded-and-timed", self.classifier(), data, batch_size=size)

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


# By name: what advice must name first, and the run.
CASES: dict[str, tuple[str, Callable[[SlowRuns], Run]]] = {
    "loading": ("loading", SlowRuns.slow_loader),
    "batch_size": ("batch_size", SlowRuns.small_batch),
    "padding": ("padding", SlowRuns.padded),
    "padding_timed": ("padding", SlowRuns.padded_and_timed),
    "max_new_tokens": ("max_new_tokens", SlowRuns.long_limit),
    "truncated_answers": ("truncated_answers", SlowRuns.truncated),
    "checkpoints": ("checkpoints", SlowRuns.checkpoints),
}
