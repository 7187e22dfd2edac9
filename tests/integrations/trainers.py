"""Small trainers of transformers and TRL on the CPU, the same each time they are made, without dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.saved_models import IDS, SHAPE, VOCABULARY, tokenizer

LENGTHS = (5, 12, 7, 9, 16, 6, 11, 8)
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
    "learning_rate": 0.01, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4,
    "per_device_eval_batch_size": 4,
    "adam_epsilon": 1e-3,  # or a gradient that is nothing but rounding would be made as large as all others
}  # fmt: skip


def make_model(*, lora: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2))
    if not lora:
        return model
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def make_seq2seq() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(VOCABULARY), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, len(VOCABULARY), (count,), generator=generator).tolist()


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Tokens of different lengths; labels ignore the first two."""

    def __init__(self, count: int = 40) -> None:
        self.rows = [tokens(LENGTHS[place % len(LENGTHS)], place) for place in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        row = self.rows[place]
        return {"input_ids": row, "labels": [-100, -100, *row[2:]]}


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, filling: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [filling] * (longest - len(sample[name])) for sample in samples])

    ids = rows("input_ids", 0)
    return {"input_ids": ids, "labels": rows("labels", -100), "attention_mask": ids.ne(0).long()}


def make_trainer(folder: Path, *, kind: Any = None, lora: bool = False, eval_count: int = 0, **arguments: Any) -> Any:
    kind = kind or transformers.Trainer
    return kind(
        model=make_model(lora=lora),
        args=transformers.TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **arguments}),
        train_dataset=Texts(),
        eval_dataset=Texts(eval_count) if eval_count else None,
        data_collator=padded,
    )


def make_classifier(folder: Path, **arguments: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2, num_labels=3)

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {**padded(samples), "labels": torch.tensor([len(sample["input_ids"]) % 3 for sample in samples])}

    return transformers.Trainer(
        model=transformers.LlamaForSequenceClassification(config),
        args=transformers.TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **arguments}),
        train_dataset=Texts(), data_collator=collate,
    )  # fmt: skip


def make_sft(folder: Path, *, lora: bool = False, eval_count: int = 0, **arguments: Any) -> Any:
    import datasets
    import trl

    args = trl.SFTConfig(output_dir=str(folder), **{**ARGUMENTS, "bf16": False, "max_length": 32, **arguments})
    rows = [{"input_ids": Texts().rows[place]} for place in range(40)]
    data = datasets.Dataset.from_list(rows)
    held_out = datasets.Dataset.from_list(rows[:eval_count]) if eval_count else None
    return trl.SFTTrainer(
        model=make_model(lora=lora), args=args, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer()
    )


def make_dpo(folder: Path, *, eval_count: int = 0, **arguments: Any) -> Any:
    import datasets
    import trl

    def text(place: int, count: int) -> str:
        return " ".join(VOCABULARY[token] for token in tokens(count, place))

    args = trl.DPOConfig(output_dir=str(folder), **{**ARGUMENTS, "bf16": False, "max_length": 32, **arguments})
    rows = [
        {
            "prompt": text(3 * place, 3),
            "chosen": " " + text(3 * place + 1, LENGTHS[place % 8] - 2),
            "rejected": " " + text(3 * place + 2, LENGTHS[place % 5] - 1),
        }
        for place in range(40)
    ]
    data = datasets.Dataset.from_list(rows)
    held_out = datasets.Dataset.from_list(rows[:eval_count]) if eval_count else None
    return trl.DPOTrainer(
        model=make_model(), ref_model=make_model(seed=1), args=args, train_dataset=data, eval_dataset=held_out,
        processing_class=tokenizer(),
    )  # fmt: skip


def make_reward(folder: Path, **arguments: Any) -> Any:
    import datasets
    import trl

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2, num_labels=1)
    args = trl.RewardConfig(output_dir=str(folder), **{**ARGUMENTS, "bf16": False, "max_length": 32, **arguments})
    rows = [
        {"chosen_ids": tokens(LENGTHS[place % 8], 2 * place), "rejected_ids": tokens(LENGTHS[place % 5], 2 * place + 1)}
        for place in range(40)
    ]
    return trl.RewardTrainer(
        model=transformers.LlamaForSequenceClassification(config), args=args,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


class Neighbour:
    """Takes memory in the midst of some training steps, as another process would, and gives it back at the next step.

    A context: `at_calls` numbers the model's forwards in training, from 0; with `backward` it comes when the gradients
    of the last layer are there already.
    """

    def __init__(self, trainer: Any, *, at_calls: tuple[int, ...], take_bytes: int, backward: bool = False) -> None:
        self._model = trainer.model
        self._at = at_calls
        self._bytes = take_bytes
        self._backward = backward
        self._held: torch.Tensor | None = None
        self.calls = -1

    def __enter__(self) -> Neighbour:
        first = next(module for name, module in self._model.named_modules() if name.endswith("layers.0.mlp"))
        self._handles = [
            self._model.register_forward_pre_hook(self._begin),
            first.register_full_backward_hook(self._in_backward),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._held = None
        self.calls += self._model.training
        if not self._backward:
            self._take()

    def _in_backward(self, *_: Any) -> None:
        if self._backward:
            self._take()

    def _take(self) -> None:
        if self._model.training and self.calls in self._at:
            self._held = torch.zeros(self._bytes, dtype=torch.uint8, device=self._model.device)
