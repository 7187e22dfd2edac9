"""LoRA fine-tuning by transformers' `Trainer` and TRL's `SFTTrainer` with brim around it: does it keep its word?

    python -m benchmarks.trainers            # 1 B Llama shape in bfloat16 on the card, about three minutes
    python -m benchmarks.trainers --tiny     # the same on the CPU with two layers, in under a minute
    python -m benchmarks.trainers --json trainers.json

Random weights, random tokens, no dropout. For each trainer: the forecast against what its training really allocated at
that size; the rate after `fit_to_memory` against the best of all fixed sizes with the same effective batch, in the same
run; and a neighbour that takes memory in the middle: whether the run ends, and its losses beside the undisturbed ones.
Where TRL is not installed its loss over its collator's batches runs in a `Trainer`, and the row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.environment import environment
from benchmarks.training_steps import LoraLinear
from brim.integrations.transformers import TrainerFit, fit_to_memory, forecast

TRAINERS = ("Trainer", "SFTTrainer")
COLUMNS = (
    ("trainer", "trainer"),
    ("batch_size", "batch × accumulation"),
    ("forecast", "forecast"),
    ("measured", "measured"),
    ("error", "off by"),
    ("rate", "samples/s"),
    ("best", "best fixed"),
    ("ratio", "of best"),
    ("neighbour", "with a neighbour"),
    ("loss_difference", "losses differ by"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How large everything is."""

    device: torch.device
    dtype: torch.dtype
    width: int
    layers: int
    heads: int
    words: int
    tokens: int
    effective: int
    steps: int = 4  # of the optimizer at a fixed size; the first two warm up
    long_steps: int = 6  # of those that are compared, loss by loss
    disturbed_at: int = 2
    neighbour_bytes: int = 0  # on the CPU, where the neighbour is a tensor
    memory_limit: int | None = None

    @property
    def on_card(self) -> bool:
        """Whether there is a card to measure on."""
        return self.device.type == "cuda"


CARD = {"width": 2048, "layers": 16, "heads": 32, "words": 128_256, "tokens": 1024, "effective": 64}
TINY = {"width": 64, "layers": 2, "heads": 4, "words": 256, "tokens": 32, "effective": 8}


def shape_of(*, tiny: bool) -> Shape:
    if tiny:
        limit = 128 * 2**20
        return Shape(device=torch.device("cpu"), dtype=torch.float32, memory_limit=limit, neighbour_bytes=limit, **TINY)
    return Shape(device=torch.device("cuda"), dtype=torch.bfloat16, **CARD)


def make_model(shape: Shape) -> Any:
    """A Llama shape (1.2 B weights on the card) with adapters of rank 16, made where it runs; the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=4 * shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads // 4, vocab_size=shape.words,
        max_position_embeddings=shape.tokens, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with shape.device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return with_adapters(model, shape)


def with_adapters(model: Any, shape: Shape) -> Any:
    """PEFT's LoRA at the attention's projections; by hand where PEFT is not installed."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if installed("peft"):
        peft: Any = importlib.import_module("peft")
        config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)
    model.requires_grad_(False)
    with shape.device:
        for layer in model.model.layers:
            for target in targets:
                setattr(layer.self_attn, target, LoraLinear(getattr(layer.self_attn, target), rank=16))
    return model


class Tokens(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Random tokens; every second text is a little shorter, so that batches are padded."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1)
        count = shape.effective * (shape.long_steps + 1)
        lengths = (shape.tokens, shape.tokens - shape.tokens // 32)
        self.rows = [
            torch.randint(1, shape.words, (lengths[place % 2],), generator=generator).tolist() for place in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[place]}


def padded(samples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """What TRL's collator makes of tokens, and transformers' too."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(filling: int) -> torch.Tensor:
        return torch.tensor([one["input_ids"] + [filling] * (longest - len(one["input_ids"])) for one in samples])

    ids = rows(0)
    return {"input_ids": ids, "labels": rows(-100), "attention_mask": ids.ne(0).long()}


def arguments(shape: Shape, folder: str, size: int, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": size, "max_steps": steps, "learning_rate": 1e-4,
        "gradient_accumulation_steps": shape.effective // size, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": not shape.on_card, "lr_scheduler_type": "constant",
        "dataloader_pin_memory": shape.on_card, "seed": 3,
    }  # fmt: skip


def make_trainer(name: str, shape: Shape, folder: str, size: int, steps: int) -> Any:
    """A trainer of this name, or what stands in for TRL's where that is not installed."""
    import transformers

    options = arguments(shape, folder, size, steps)
    if name == "SFTTrainer" and installed("trl"):
        return _make_sft(shape, options)
    kind = transformers.Trainer if name == "Trainer" else _tokens_alone(transformers.Trainer)
    args = transformers.TrainingArguments(**options)
    return kind(model=make_model(shape), args=args, train_dataset=Tokens(shape), data_collator=padded)


def _make_sft(shape: Shape, options: dict[str, Any]) -> Any:
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in Tokens(shape).rows])
    extra: dict[str, Any] = {"bf16": False, "max_length": None, "gradient_checkpointing": False}
    extra |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
    args = trl.SFTConfig(**options, **extra)
    return trl.SFTTrainer(model=make_model(shape), args=args, train_dataset=data, processing_class=_tokenizer(shape))


def _tokenizer(shape: Shape) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(min(shape.words, 512))}
    inner = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2", unk_token="w1")


def _tokens_alone(trainer: Any) -> Any:
    """TRL's loss in a `Trainer`: log-probabilities of the labels' tokens alone, over the items of the window."""

    class TokenLoss(trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")[:, 1:]
            logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
            total = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            loss = total / num_items_in_batch
            return (loss, {"logits": logits}) if return_outputs else loss

    return TokenLoss


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def described(name: str) -> str:
    """The trainer as the table names it: what stands in for a library that is not installed."""
    if name != "Trainer" and not installed("trl"):
        name = "SFTTrainer's loss in a Trainer (no TRL here)"
    return name if installed("peft") else f"{name}, LoRA by hand (no PEFT here)"


@contextlib.contextmanager
def trainer_of(name: str, shape: Shape, size: int, steps: int) -> Iterator[Any]:
    """A fresh trainer; its memory is given back afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        made = [make_trainer(name, shape, folder, size, steps)]
        try:
            yield made[0]
        finally:
            fit = vars(made[0]).get("_brim_fit")
            for owner in (made[0].accelerator, *([] if fit is None else [fit.guard]), made[0]):
                vars(owner).clear()  # whoever still has the trainer has none of its tensors
            gc.collect()
            if shape.on_card:
                torch.cuda.empty_cache()


def timed_run(trainer: Any, shape: Shape) -> dict[str, Any]:
    """Train; samples a second of the last steps, losses, and the peak allocated on a card."""
    from transformers import PrinterCallback, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if shape.on_card:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    if shape.on_card:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if shape.on_card else None
    times = [after - before for before, after in itertools.pairwise(ends[1:])]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"rate": shape.effective / statistics.median(times), "losses": losses, "peak": peak, "steps": len(ends)}


def fixed_sizes(name: str, shape: Shape) -> dict[int, float]:
    """Samples a second at every size that the effective batch is a multiple of, as far as they fit."""
    rates: dict[int, float] = {}
    size = 1
    while size <= shape.effective:
        failed = False
        with trainer_of(name, shape, size, shape.steps) as trainer:
            try:
                rates[size] = timed_run(trainer, shape)["rate"]
            except torch.OutOfMemoryError:
                failed = True
        log(f"{name}: fixed size {size}: {'does not fit' if failed else f'{rates[size]:.2f} samples/s'}")
        if failed:
            break
        size *= 2
    return rates


NEIGHBOUR = """
import sys, torch
held = None
torch.zeros(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    leave = int(line)
    held = None
    torch.cuda.empty_cache()
    if leave >= 0:
        held = torch.empty(max(torch.cuda.mem_get_info()[0] - leave, 0), dtype=torch.uint8, device="cuda")
    print("done", flush=True)
"""


class Neighbour:
    """Another process that takes nearly all that is free on the card, and gives it back."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ready = False  # torch takes its time to start

    def leave(self, free_bytes: int) -> None:
        """Take all but so many bytes; -1: give everything back."""
        assert self._process.stdin is not None
        if not self._ready:
            self._expect("ready")
            self._ready = True
        self._process.stdin.write(f"{free_bytes}\n")
        self._process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise RuntimeError("the neighbour has ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def disturb(trainer: Any, shape: Shape, neighbour: Neighbour | None, needed_bytes: int) -> None:
    """At one step somebody takes the memory, and gives it back at the next but one."""
    from transformers import TrainerCallback

    class Disturbance(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if neighbour is not None and state.global_step == shape.disturbed_at:
                torch.cuda.empty_cache()  # or what is cached already would last
                neighbour.leave(needed_bytes * 2 // 5)
            if neighbour is not None and state.global_step == shape.disturbed_at + 2:
                neighbour.leave(-1)

    trainer.add_callback(Disturbance())
    if neighbour is None:
        taken: list[int] = []

        def take(*_: Any) -> None:
            if trainer.state.global_step == shape.disturbed_at and not taken:
                taken.append(1)
                torch.zeros(shape.neighbour_bytes, dtype=torch.uint8)

        trainer.model.register_forward_pre_hook(take)


def run(name: str, shape: Shape, neighbour: Neighbour | None) -> dict[str, Any]:
    """Everything about one trainer. The rate after fitting is taken beside those of fixed sizes."""
    started = time.perf_counter()
    steps = shape.long_steps
    with trainer_of(name, shape, shape.effective, steps) as trainer:
        fit = fit_to_memory(trainer, memory_limit=shape.memory_limit)
        search_seconds = time.perf_counter() - started
        size, accumulation = fit.per_device_train_batch_size, fit.gradient_accumulation_steps
        assert size is not None
        log(f"{name}: fitted {size} × {accumulation} in {search_seconds:.1f} s; {_probes(fit)}")
        if shape.memory_limit is not None:
            fit.guard.limit_bytes = None  # the meter of the CPU would be what is timed
        undisturbed = timed_run(trainer, shape)
    with trainer_of(name, shape, size, steps) as trainer:
        found = forecast(trainer, gpu=() if shape.on_card else "rtx 4090", batch_size=size).forecasts[0]
    resident = sum(found.breakdown.get(part, 0) for part in ("weights", "optimizer_state", "gradients"))
    with trainer_of(name, shape, shape.effective, steps) as trainer:
        again = fit_to_memory(trainer, batch_size=size, memory_limit=shape.memory_limit)
        disturb(trainer, shape, neighbour, found.peak_allocated_bytes - resident)
        disturbed = timed_run(trainer, shape)
        oom_events = again.oom_events
    if neighbour is not None:
        neighbour.leave(-1)
    rates = fixed_sizes(name, shape)
    differences = [abs(a - b) / abs(b) for a, b in zip(disturbed["losses"], undisturbed["losses"], strict=True)]
    return {
        "trainer": described(name),
        "batch_size": size,
        "accumulation": accumulation,
        "search_seconds": search_seconds,
        "forecast_bytes": found.peak_allocated_bytes,
        "measured_bytes": undisturbed["peak"],
        "rate": undisturbed["rate"],
        "fixed_rates": rates,
        "best_rate": max(rates.values()),
        "oom_events": oom_events,
        "steps": disturbed["steps"],
        "steps_asked": steps,
        "losses": disturbed["losses"],
        "undisturbed_losses": undisturbed["losses"],
        "largest_loss_difference": max(differences),
        "seconds": time.perf_counter() - started,
    }


def _probes(fit: TrainerFit) -> str:
    assert fit.plan is not None
    return ", ".join(f"{probe.batch_size} {probe.verdict}" for probe in fit.plan.probes)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(title for _, title in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        measured = row["measured_bytes"]
        cells = {
            "trainer": row["trainer"],
            "batch_size": f"{row['batch_size']} × {row['accumulation']}",
            "forecast": f"{row['forecast_bytes'] / 2**30:.2f} GiB",
            "measured": "—" if measured is None else f"{measured / 2**30:.2f} GiB",
            "error": "—" if measured is None else f"{row['forecast_bytes'] / measured - 1:+.1%}",
            "rate": f"{row['rate']:.1f}",
            "best": f"{row['best_rate']:.1f}",
            "ratio": f"{row['rate'] / row['best_rate']:.3f}",
            "neighbour": f"{row['steps']} of {row['steps_asked']} steps, {row['oom_events']} OOM",
            "loss_difference": f"{row['largest_loss_difference']:.1e}",
        }
        lines.append("| " + " | ".join(cells[name] for name, _ in COLUMNS) + " |")
    return "\n".join(lines)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two layers on the CPU")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything into this file")
    options = parser.parse_args(argv)
    logging.getLogger("brim.integrations").setLevel(logging.ERROR)
    shape = shape_of(tiny=options.tiny)
    neighbour = Neighbour() if shape.on_card else None
    with contextlib.redirect_stdout(sys.stderr):  # trainers print what they log
        rows = [run(name, shape, neighbour) for name in options.trainers]
    if neighbour is not None:
        neighbour.close()
    print(table(rows))
    if options.json is not None:
        document = {"schema": "brim.benchmark.trainers/1", "tiny": options.tiny, "environment": environment()}
        options.json.write_text(json.dumps({**document, "rows": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
