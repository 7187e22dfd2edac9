"""Random command lines that are nearly right: a valid line of each command, one to three things in it changed.

Options come from the declarations of the commands, so a new flag is drawn without a word here. What is drawn follows
from the seed alone. Nothing here runs a command.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import typer
from safetensors.numpy import save_file

from brim.cli.main import app
from tests.reported_runs import write_evaluation, write_find

FACTORIES = """
import torch

def rows(width: int = 16):
    return (lambda batch: batch * 2), (lambda n: torch.ones(n, width))

def reader(reach: int = 4):
    return lambda samples: ["yes" if int(sample.id) < reach else "no" for sample in samples]

def classifier(width: int = 4):
    return torch.nn.Linear(4, 2)

def nothing():
    return 5

def broken():
    raise ValueError("no checkpoint at step 7")
"""
TRAIN_FILE = """\
model:
  type: mlp
  params: {hidden: [4], dropout: 0.1}
data:
  root: features.npz
  num_workers: 0
hp:
  epochs: 1
  batch_size: 8
  learning_rate: 1e-2
  seed: 3
optimizer:
  name: adamw
  params: {weight_decay: 0.1, betas: [0.9, 0.99]}
scheduler:
  name: cosine
  warmup_steps: 1
training:
  device: cpu
  gradient_clip: 1.0
"""
SWEEP_FILE = """\
data:
  root: features.npz
  num_workers: 0
hp: {epochs: 1}
grid_search:
  fixed:
    training.device: cpu
  grid:
    model.type: [mlp, "py:nets.py:classifier"]
    hp.batch_size: [8, 4]
    hp.learning_rate: [0.001, 0.01]
  exclude:
    - {model.type: mlp, hp.learning_rate: 0.01}
  repeat: 2
models_to_train: [mlp]
max_experiments: 4
"""

# Valid lines, each part of its own: what is dropped, doubled or replaced is a part. Every command has one at least.
QUICK = ["--device cpu", "--no-cache"]
BASES: dict[str, list[list[str]]] = {
    "find": [["py:nets.py:rows", "--memory-limit 64KiB", "--max-batch-size 16", "--max-probes 4", *QUICK]],
    "eval": [["-m py:nets.py:reader", "-d questions.jsonl", "--metrics exact_match", "-o out", *QUICK]],
    "profile": [
        ["-m py:nets.py:reader", "-d questions.jsonl", "--knob reach", "--values 2,4", "-o out", "--latency-samples 0",
         "--metrics exact_match", *QUICK],
    ],
    "sweep": [["grid.yaml", "--dry-run", "hp.epochs=1"], ["--config grid.yaml", "--check", "--no-forecast"]],
    "forecast": [["py:nets.py:rows", "--memory 1GiB", "-b 4"], ["py:nets.py:rows", "--gpu a100-80gb"], ["--gpus"]],
    "encode": [["-d smiles.csv", "-o features.safetensors", "--knob bits=64", "--limit 4", *QUICK]],
    "knobs": [["py:nets.py:rows"]],
    "report": [["run"], ["run", "run2", "-o both.html"]],
    "check": [["evaluated"], ["evaluated", "--max-total-seconds 1e6", "--min-utilisation 0.1"]],
    "watch": [["--once"]],
    "doctor": [["--json"]],
    "advise": [["-m py:nets.py:reader", "-d questions.jsonl", "-b 2", "--max-tokens 4"]],
    "demo": [["--questions 8", "--memory-limit 80MiB", "-o out"]],
    "train": [["config.yaml", "hp.epochs=1", "-o out"], ["config.yaml", "--seeds 2", "--fast-path off", "-o out"]],
    "ood": [
        ["--id in.safetensors", "--ood out.safetensors", "--hidden 4", "--epochs 2", "--seeds 2", "--device cpu",
         "-o out"],
    ],
    "cache list": [["--json"]],
    "cache clear": [[]],
}  # fmt: skip
NOT_FUZZED = {"lm-eval": "reads lm-eval's index of tasks, seconds for every line"}
KEPT = ("--dry-run", "--check", "--epochs")  # without them a line that is valid would work for minutes
DRAWN_NEVER = {
    "--isolate": "starts a process that imports torch",
    "--table": "traces the models of the whole table",
    "--explain-speed": "runs the same evaluation seven times",
    "--metrics": "without a terminal, writes until it is ended",
    "--try": "runs the work in turns",
    "--help": "prints the help and nothing else",
    "--version": "prints the version and nothing else",
}

PATHS = (
    "missing.csv", "no/such/folder", ".", "empty", "/dev/null", "/dev/full", "nets.py", "questions.jsonl",
    "smiles.csv", "features.npz", "config.yaml", "broken.gguf",
)  # fmt: skip
TEXTS = (
    "", " ", "auto", "none", "true", "-", "--", ",", "1,2", "1,,2", "=", "a=", "=1", "a=b", "a=1=2", "x" * 300, "é😀",
    "\udcff", "\x1b[31mred", "a\nb", "[red]x[/red]", "%s{0}", "$HOME", "..", "'", "*",
)  # fmt: skip
NUMBERS = (
    "0", "-1", "1", "2", "3", "1.5", "1e-3", "1e999", "-1e999", "nan", "inf", "99999999999999999999", "9" * 400, "0x10",
    "1_000", "٣", "²", "+1", " 1", "1GiB", "24 gib", "0GiB", "-1GiB", "1e300GiB", "2-13", "13-2", "2-13:0",
    "1-999999999",
)  # fmt: skip
NASTY = ("x" * 300, "\udcff", "1e999", "-1e999", "nan", "9" * 400, "99999999999")  # drawn more often
MODELS = (
    "py:nets.py:rows", "py:nets.py:nothing", "py:nets.py:absent", "py:nets.py:broken", "py:missing.py:rows",
    "py:nets.py", "py:", "py::", "py:os:getcwd", "nets.py", "r3d_81", "resnet", "torchvision:nope", "timm:", "hf:",
    "hf:missing", "hf:nonsense", "nonsense", "broken.gguf", "mlp", "morgan", "unimol",
)  # fmt: skip
WORDS: dict[str, tuple[str, ...]] = {
    "--dtype": ("float32", "float16", "bfloat16", "float64", "int8", "half"),
    "--device": ("cpu", "cuda", "cuda:9", "mps", "meta", "cpu:1", "gpu", "xla"),
    "--objective": ("fastest", "largest", "slowest"),
    "--optimizer": ("sgd", "lbfgs", "sparseadam", "adafactor", "Optimizer", "lr_scheduler", "_functional"),
    "--mode": ("forward", "generate", "train"),
    "--task": ("generate", "vqa", "choice", "classify"),
    "--metrics": ("bleu", "bleu,rouge", "exact_match,exact_match", "cider", "accuracy", "exactmatch"),
    "--knob": ("width=8", "width=0", "width=99999999999", "width=x", "reach", "reach=2", "reach=2,3", "dtype", "x=0"),
    "--map": ("prompt=question", "smiles=smiles", "label=x", "prompt=absent", "reference=question"),
    "--order": ("given", "ascending", "descending"),
    "--pairing": ("cross", "zip"),
    "--sample": ("lhs", "stratified", "boundary"),
    "--fast-path": ("auto", "off", "resident", "stacked"),
    "--loss": ("energy", "reference", "hinge", "bce,mse"),
    "--pairs": ("all", "matched"),
    "--baselines": ("all", "knn", "lof,msp", "mahalanobis"),
    "--encoder": ("morgan", "morgan,morgan", "minimol"),
    "--lr-scale": ("none", "sqrt", "linear", "auto"),
    "--offload": ("cpu", "disk"),
    "--weights": ("auto", "none", "features.npz"),
    "--split": ("train", "test"),
    "--gpu": ("a100-80gb", "rtx 4090", "h100", "a100"),
    "--slurm": ("partition=gpu", "cluster=local"),
    "--log": ("tensorboard", "mlflow", "wandb", "csv"),
    "--plugin": ("nets.py", "missing.py", "config.yaml"),
    "--reference": ("in.safetensors", "missing.safetensors"),
    "--plan": ("run", "missing", "empty"),
    "--initial-scale": ("4=1,8=0.75,0.4", "0.5,4=1", "4=0", "nan=nan"),
    "--batch-size-for": ("2=1", "reach=2=1", "9=9", "reach=2,width=3=1"),
    "--on": ("local", "slurm", "kubernetes"),
    "--num-workers": ("0",),
    "--questions": ("8",),
    "--epochs": ("1",),
}  # fmt: skip
# Values of which each is valid and long, or starts processes: of these only the ones above and wrong ones are drawn.
SMALL_ONLY = {"--num-workers", "--questions", "--epochs"}
WRONG = ("", " ", "x", "-1", "nan", "inf", "1.5", "²", "x" * 300, "\udcff", "-9" * 20)


class Option(NamedTuple):
    """One option of a command: its names, and whether a value follows."""

    names: tuple[str, ...]
    takes_value: bool

    @property
    def values(self) -> tuple[str, ...]:
        """What may be drawn as its value."""
        own = next((WORDS[name] for name in self.names if name in WORDS), ())
        if SMALL_ONLY.intersection(self.names):
            return (*own, *WRONG)
        models = MODELS if "--model" in self.names else ()
        return (*own * 6, *models, *PATHS, *TEXTS, *NUMBERS, *NASTY * 3)


def commands() -> dict[str, tuple[Option, ...]]:
    """Every command that can be typed, by its words, with its options, but for those that take too long."""
    found = {}
    root: Any = typer.main.get_command(app)
    root.build_all()
    for words, command in _leaves(root, ()):
        found[" ".join(words)] = tuple(
            Option((*one.opts, *one.secondary_opts), not getattr(one, "is_flag", False))
            for one in command.params
            if one.opts[0].startswith("-")
        )
    return {name: options for name, options in found.items() if name not in NOT_FUZZED}


def _leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _leaves(inner, (*words, name))


def drawn_line(seed: str, known: dict[str, tuple[Option, ...]]) -> list[str]:
    """The arguments of one command; most are wrong in one or two places."""
    draw = random.Random(seed)
    names = sorted(known)
    name = draw.choices(names, weights=[len(known[name]) for name in names])[0]
    parts = [part.split(" ", 1) for part in draw.choice(BASES[name])]
    options = [one for one in known[name] if not DRAWN_NEVER.keys() & set(one.names)]
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3))):
        _changed(parts, options, draw)
    return [*name.split(), *itertools.chain.from_iterable(parts)]


def _changed(parts: list[list[str]], options: list[Option], draw: random.Random) -> None:
    """One change, in place."""
    kind = draw.choices(
        ("add", "replace", "drop", "double", "misspell", "cut", "extra", "shuffle"), weights=(8, 8, 2, 1, 1, 1, 1, 1)
    )[0]
    free = [part for part in parts if part[0] not in KEPT]
    if kind == "add" and options:
        option = draw.choice(options)
        value = [draw.choice(option.values)] if option.takes_value else []
        parts.insert(draw.randint(0, len(parts)), [draw.choice(option.names), *value])
    elif kind == "extra" or not free:
        parts.insert(draw.randint(0, len(parts)), [draw.choice((*MODELS, *PATHS, *TEXTS, *NUMBERS, "a.b=[1,"))])
    elif kind == "replace":
        part = draw.choice(free)
        option = next((one for one in options if part[0] in one.names), Option((), True))
        part[-1] = draw.choice(option.values if option.names else (*MODELS, *PATHS, *TEXTS))
    elif kind == "drop":
        parts.remove(draw.choice(free))
    elif kind == "double":
        parts.append(list(draw.choice(parts)))
    elif kind == "misspell":
        part = draw.choice(free)
        place = draw.randrange(len(part[0]) or 1)
        part[0] = part[0][:place] + draw.choice(("", "x", "_")) + part[0][place + 1 :]
    elif kind == "cut":
        part = draw.choice(free)
        parts[:] = [
            *(one for one in parts[parts.index(part) + 1 :] if one[0] in KEPT),
            *parts[: parts.index(part)],
            part[:1],
        ]
    else:
        draw.shuffle(parts)


def write_inputs(folder: Path) -> None:
    """All the files that the lines name, into a folder that is empty."""
    (folder / "nets.py").write_text(FACTORIES)
    rows = [{"id": str(number), "question": f"number {number}?", "answer": "yes"} for number in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "smiles.csv").write_text("smiles\n" + "\n".join("C" * n for n in range(1, 8)) + "\n")
    generator = numpy.random.default_rng(0)
    for name, shift in (("in", 0.0), ("out", 2.0)):
        features = generator.normal(size=(24, 4)) + shift
        save_file({"features": features.astype(numpy.float32)}, folder / f"{name}.safetensors")
    table = generator.standard_normal((24, 4)).astype("float32")
    numpy.savez(folder / "features.npz", features=table, labels=(table[:, 0] > 0).astype(int))
    (folder / "config.yaml").write_text(TRAIN_FILE)
    (folder / "grid.yaml").write_text(SWEEP_FILE)
    for name in ("run", "run2"):
        write_find(folder / name)
    record = write_evaluation(folder / "evaluated", [1.0, 0.0] * 4, gpu=False) / "run.json"
    document = json.loads(record.read_text())
    document["summary"]["oom_events"] = 0
    record.write_text(json.dumps(document))
    (folder / "empty").mkdir()
    (folder / "nonsense").mkdir()
    (folder / "nonsense" / "config.json").write_text('{"model_type": 7, "hidden_size": "wide"}')
    (folder / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff")
