"""Batch size by card memory and size of language model: what guides write down by hand, computed.

One published shape stands for each class of models; the hand-made ranges that such tables give are kept beside the
computed figures. How a shape becomes a workload is the caller's business, since models lie below this layer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.forecasting.forecast import Forecaster, TracedWorkload
from brim.forecasting.gpus import Gpu
from brim.records import Mode
from brim.settings.find_settings import DEFAULT_MAX_SIZE
from brim.workloads.base import Workload

__all__ = ["CARD_GB", "MODELS", "BatchTable", "BatchTableEntry", "ModelClass", "batch_size_table", "card_of"]

TABLE_SCHEMA = "brim.batch_table/1"
GIB = 2**30
CARD_GB = (4, 8, 12, 16, 24, 80)
MODES: tuple[Mode, ...] = ("generate", "train")
TOKENS, NEW_TOKENS = 512, 32
DRIVER_SHARE = (
    0.97  # of the advertised gigabytes, what the driver of such a card reports (0.96 to 0.99 in the catalogue)
)
CONTEXT_BYTES = 500 * 2**20
TRAIN_BYTES = 16  # a parameter: float32 weight, gradient and two moments of AdamW
GENERATE_BYTES = 2  # a parameter in half precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelClass:
    """A class of models, the published shape that stands for it, and the batch sizes a guide gives for it."""

    label: str
    stands_for_it: str
    config: Mapping[str, Any]
    parameters: int
    by_hand: str


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 32768,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
    }  # fmt: skip


# The third seed document's ranges: by card memory and by model size, each on its own.
BY_HAND_CARDS = {4: "1-2", 8: "2-4", 12: "4-8", 16: "8-16", 24: "8-16", 80: "8-16"}
MODELS = (
    ModelClass(
        label="< 1 B", stands_for_it="Qwen2.5-0.5B", parameters=494_000_000, by_hand="8-16",
        config=_shape(896, 4864, 24, 14, 2, 151_936, tied=True),
    ),
    ModelClass(
        label="1-7 B", stands_for_it="Qwen2.5-3B", parameters=3_086_000_000, by_hand="4-8",
        config=_shape(2048, 11_008, 36, 16, 2, 151_936, tied=True),
    ),
    ModelClass(
        label="7-13 B", stands_for_it="Qwen2.5-7B", parameters=7_616_000_000, by_hand="2-4",
        config=_shape(3584, 18_944, 28, 28, 4, 152_064, tied=False),
    ),
    ModelClass(
        label="> 13 B", stands_for_it="Qwen2.5-14B", parameters=14_770_000_000, by_hand="1-2",
        config=_shape(5120, 13_824, 48, 40, 8, 152_064, tied=False),
    ),
)  # fmt: skip

WorkloadMaker = Callable[[Mapping[str, Any], Mode, Mapping[str, int]], Workload]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTableEntry:
    """One place of the table: 0 means that nothing fits."""

    card_gb: int
    model: str
    mode: Mode
    batch_size: int
    by_hand_for_the_card: str
    by_hand_for_the_model: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTable:
    """Every card against every class, in both modes, and how it was computed."""

    entries: Sequence[BatchTableEntry]
    models: Sequence[ModelClass]
    seconds: float

    def batch_size(self, card_gb: int, model: str, mode: Mode) -> int:
        """The computed batch size of one place."""
        wanted = (card_gb, model, mode)
        return next(e.batch_size for e in self.entries if (e.card_gb, e.model, e.mode) == wanted)

    @property
    def method(self) -> tuple[str, ...]:
        """What was assumed, in sentences."""
        shapes = ", ".join(f"{model.label}: {model.stands_for_it}" for model in self.models)
        lines = [f"shapes: {shapes}, random weights, built without filling them"]
        lines.append(
            f"generation in bfloat16 of {NEW_TOKENS} new tokens after {TOKENS}; training on {TOKENS} tokens under "
            "bfloat16 autocast over float32 weights with AdamW"
        )
        lines.append(
            f"a card's driver reports {DRIVER_SHARE:.0%} of its gigabytes, a CUDA context takes "
            f"{CONTEXT_BYTES // 2**20} MiB, 5 % of the rest stays free"
        )
        lines.append(
            "every layer is traced, unless weights alone (in training with gradients and moments) exceed every card"
        )
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """The table as plain JSON values, schema first."""
        return {
            "schema": TABLE_SCHEMA,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "models": [
                {"label": m.label, "stands_for_it": m.stands_for_it, "parameters": m.parameters, "by_hand": m.by_hand}
                for m in self.models
            ],
            "by_hand_for_cards": {str(card): sizes for card, sizes in BY_HAND_CARDS.items()},
            "method": list(self.method),
            "seconds": self.seconds,
        }


def batch_size_table(
    make_workload: WorkloadMaker,
    *,
    cards_gb: Sequence[int] = CARD_GB,
    models: Sequence[ModelClass] = MODELS,
    modes: Sequence[Mode] = MODES,
    progress: Callable[[str], None] = lambda _: None,
) -> BatchTable:
    """The whole table; two or three traces for each model and mode, however many cards there are."""
    started = time.perf_counter()
    entries = []
    for mode in modes:
        for model in models:
            progress(f"{model.stands_for_it}, {mode}")
            sizes = _sizes(make_workload, model, mode, [card_of(card) for card in cards_gb])
            entries += [
                BatchTableEntry(
                    card_gb=card,
                    model=model.label,
                    mode=mode,
                    batch_size=size,
                    by_hand_for_the_card=_by_hand(card),
                    by_hand_for_the_model=model.by_hand,
                )
                for card, size in zip(cards_gb, sizes, strict=True)
            ]
    return BatchTable(entries=tuple(entries), models=tuple(models), seconds=time.perf_counter() - started)


def card_of(gigabytes: int) -> Gpu:
    """A card of so many advertised gigabytes."""
    return Gpu(
        key=f"{gigabytes}gb",
        name=f"a card of {gigabytes} GB",
        memory_bytes=math.floor(gigabytes * GIB * DRIVER_SHARE),
        compute_capability=(8, 0),
        context_bytes=CONTEXT_BYTES,
        memory_source="the advertised size, less what drivers keep of it",
        context_source="the middle of the catalogue",
    )


def _sizes(make_workload: WorkloadMaker, model: ModelClass, mode: Mode, cards: Sequence[Gpu]) -> list[int]:
    least = model.parameters * (TRAIN_BYTES if mode == "train" else GENERATE_BYTES)
    if all(card.usable_bytes < least for card in cards):
        return [0 for _ in cards]
    knobs = {"tokens": TOKENS, **({"max_new_tokens": NEW_TOKENS} if mode == "generate" else {})}
    traced = TracedWorkload(make_workload(model.config, mode, knobs))
    forecasters = [Forecaster(traced, card, largest=DEFAULT_MAX_SIZE) for card in cards]
    return [
        0 if card.usable_bytes < least else forecaster.largest()
        for card, forecaster in zip(cards, forecasters, strict=True)
    ]


def _by_hand(card_gb: int) -> str:
    return next(sizes for least, sizes in reversed(BY_HAND_CARDS.items()) if card_gb >= least)
