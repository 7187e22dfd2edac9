"""Two small models that run anywhere: `py:brim.models.small:convnet` and `py:brim.models.small:transformer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.models.base import ModelParts, Setup, assemble
from brim.models.batches import random_floats, random_integers
from brim.models.placement import Precision
from brim.models.vision import classification_loss
from brim.records import Mode
from brim.workloads.base import Workload

__all__ = ["convnet", "transformer"]

_CLASSES = 10
_VOCABULARY = 1000


def convnet(
    size: int = 32,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    mode: Mode = "forward",
    optimizer: str = "adamw",
    gradient_checkpointing: bool = False,
) -> Workload:
    """A convolutional classifier of 0.4 M parameters on images [n, 3, size, size]."""

    def images(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return random_floats((count, 3, size, size), device=device, dtype=dtype)

    def labelled(count: int, device: torch.device, dtype: torch.dtype) -> Any:
        return images(count, device, dtype), random_integers(0, _CLASSES, (count,), device=device)

    stages = [nn.Conv2d(3, 32, 3, padding=1), *(_ConvBlock(width, 2 * width) for width in (32, 64, 128))]
    model = nn.Sequential(nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, _CLASSES))
    setup = _setup(mode, device, dtype, optimizer, gradient_checkpointing)
    weights = setup.precision.weights or torch.float32
    parts = ModelParts(
        model=model.to(dtype=weights),
        dtype=weights,
        make_inputs=images,
        make_train_batch=labelled,
        loss=classification_loss,
    )
    return assemble(parts, setup, {"model": "py:brim.models.small:convnet", "knobs": {"size": size}})[0]


def transformer(
    tokens: int = 64,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    mode: Mode = "forward",
    optimizer: str = "adamw",
    gradient_checkpointing: bool = False,
) -> Workload:
    """A next-token model of 0.6 M parameters on token ids [n, tokens]."""

    def prompts(count: int, device: torch.device, _dtype: torch.dtype) -> torch.Tensor:
        return random_integers(0, _VOCABULARY, (count, tokens), device=device)

    setup = _setup(mode, device, dtype, optimizer, gradient_checkpointing)
    weights = setup.precision.weights or torch.float32
    parts = ModelParts(
        model=_Transformer(tokens).to(dtype=weights),
        dtype=weights,
        make_inputs=prompts,
        make_train_batch=prompts,
        loss=_next_token_loss,
    )
    return assemble(parts, setup, {"model": "py:brim.models.small:transformer", "knobs": {"tokens": tokens}})[0]


class _ConvBlock(nn.Module):
    """Halves the height and width, widens the channels."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)
        self.normalisation = nn.GroupNorm(8, out_channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.normalisation(self.convolution(images)))


class _Transformer(nn.Module):
    def __init__(self, tokens: int, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(_TransformerBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.positions  # [n, tokens, width]
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)  # [n, tokens, vocabulary]
        return scores


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        joined = self.queries_keys_values(self.before_attention(hidden))
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in joined.chunk(3, dim=2)
        )  # each [n, heads, tokens, width / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.after_attention(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = hidden + self.perceptron(hidden)
        return result


def _next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    scores = model(ids)
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _setup(
    mode: Mode, device: torch.device, dtype: torch.dtype | None, optimizer: str, gradient_checkpointing: bool
) -> Setup:
    half = dtype if dtype in (torch.float16, torch.bfloat16) else None
    if mode == "train":
        precision = Precision(weights=torch.float32, autocast=half, scaled=half is torch.float16)
    else:
        precision = Precision(weights=dtype or torch.float32)
    return Setup(
        mode=mode,
        device=device,
        precision=precision,
        optimizer=optimizer,
        gradient_checkpointing=gradient_checkpointing,
    )
