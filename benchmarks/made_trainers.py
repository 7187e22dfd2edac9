"""The trainers of `benchmarks/trainers.py`: a Llama shape with LoRA, random tokens, transformers' `Trainer` and TRL's.

What stands in for PEFT and TRL where they are not installed is here too, and how a row names it. Knows nothing of brim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.training_steps import LoraLinear

__all__ = ["Shape", "clear", "described", "installed", "shape_of", "trainer_of"]

PIECE_TOKENS = 2048  # whose logits exist at once in what stands in for TRL's loss


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
    steps: int = 6  # of the optimizer; the first two warm up
    disturbed_at: int = 2
    neighbour_bytes: int = 0  # on the CPU, where the neighbour is a tensor
    memory_limit: int | None = None

    @property
    def on_card(self) -> bool:
        """Whether there is a card to measure on."""
        return self.device.type == "cuda"


CARD = {"width": 2048, "layers": 16, "heads": 32, "words": 128_256, "tokens": 1024, "effective": 32}
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
        count = shape.effective * (shape.steps + 1)
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


def arguments(shape: Shape, folder: str, size: int) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": size, "max_steps": shape.steps, "learning_rate": 1e-4,
        "gradient_accumulation_steps": shape.effective // size, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": not shape.on_card, "lr_scheduler_type": "constant",
        "dataloader_pin_memory": shape.on_card, "seed": 3,
    }  # fmt: skip


def make_trainer(name: str, shape: Shape, folder: str, size: int) -> Any:
    """A trainer of this name, or what stands in for TRL's where that is not installed."""
    import transformers

    options = arguments(shape, folder, size)
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
    """TRL's loss in a `Trainer`: of all tokens of the window, a piece at a time, so that no whole logits are there."""

    class TokenLoss(trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            causal = model.get_base_model() if hasattr(model, "get_base_model") else model
            hidden = causal.model(inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)[0]
            pieces = hidden[:, :-1].flatten(0, 1).split(PIECE_TOKENS)
            labels = inputs["labels"][:, 1:].flatten().split(PIECE_TOKENS)
            totals = [
                checkpoint(_piece_loss, causal.lm_head, *piece, use_reentrant=False, preserve_rng_state=False)
                for piece in zip(pieces, labels, strict=True)
            ]
            loss = torch.stack(totals).sum() / num_items_in_batch
            return (loss, {}) if return_outputs else loss

    return TokenLoss


def _piece_loss(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, ignore_index=-100, reduction="sum")


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def described(name: str) -> str:
    """The trainer as the table names it: what stands in for a library that is not installed."""
    if name != "Trainer" and not installed("trl"):
        name = "SFTTrainer's loss in a Trainer (no TRL here)"
    return name if installed("peft") else f"{name}, LoRA by hand (no PEFT here)"


@contextlib.contextmanager
def trainer_of(name: str, shape: Shape, size: int) -> Iterator[Any]:
    """A fresh trainer; its memory is given back afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        made = [make_trainer(name, shape, folder, size)]
        try:
            yield made[0]
        finally:
            fit = vars(made[0]).get("_brim_fit")
            for owner in (made[0].accelerator, *([] if fit is None else [fit.guard]), made[0]):
                vars(owner).clear()  # whoever still has the trainer has none of its tensors
            clear(shape)


def clear(shape: Shape) -> None:
    """Give memory back that nothing uses."""
    gc.collect()
    if shape.on_card:
        torch.cuda.empty_cache()
