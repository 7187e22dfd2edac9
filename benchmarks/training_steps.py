"""Seven training steps that brim has no name for, as factories: `brim find py:benchmarks/training_steps.py:t5`.

Random weights, worst-case batches, AdamW, autocast where a half precision is asked for. Shapes are such that 24 GiB
hold tens to thousands of samples; `--knob tiny=true` is the same model in a size that a laptop runs at once. They know
torch, torchvision and transformers, and nothing of brim: two versions of it can be tried on the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["STEPS", "deeplabv3", "lora", "lstm", "maxvit", "mixture", "t5", "unet"]

STEPS = ("lora", "t5", "maxvit", "unet", "lstm", "mixture", "deeplabv3")

Parts = dict[str, Any]
MakeBatch = Callable[[int], tuple[torch.Tensor, ...]]


def lora(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """A Llama shape of 0.9 B frozen weights, with adapters of rank 16 at its queries and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, tokens, words = (32, 2, 16, 128) if tiny else (2048, 16, 512, 32_000)
    heads = 2 if tiny else 16
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=words, max_position_embeddings=tokens,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype or torch.float32)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj, rank=16)
            layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, rank=16)
    return _step(model, _tokens(words, tokens, device), lambda ids: model(input_ids=ids, labels=ids).loss, dtype)


class LoraLinear(nn.Module):
    """A frozen layer and a low-rank update beside it."""

    def __init__(self, frozen: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frozen(hidden)
        update: torch.Tensor = self.up(self.down(hidden.to(self.down.weight.dtype)))
        return result + update.to(result.dtype)  # the next frozen layer takes no other


def t5(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """T5 in its base shape (0.22 B): 512 tokens in, 128 out."""
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, tokens, words = (32, 2, 16, 128) if tiny else (768, 12, 512, 32_128)
    config = T5Config(
        d_model=width, d_kv=16 if tiny else 64, d_ff=4 * width, num_layers=layers, num_heads=2 if tiny else 12,
        vocab_size=words, decoder_start_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = T5ForConditionalGeneration(config)

    def make_batch(size: int) -> tuple[torch.Tensor, ...]:
        shapes = ((size, tokens), (size, tokens // 4))
        return tuple(torch.randint(words, shape, device=device) for shape in shapes)

    return _step(model, make_batch, lambda ids, labels: model(input_ids=ids, labels=labels).loss, dtype)


def maxvit(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """torchvision's MaxViT-T on pictures of 224 pixels a side."""
    from torchvision.models.maxvit import MaxVit, maxvit_t

    side, classes = (56, 10) if tiny else (224, 1000)
    with torch.device(device):
        model = (
            MaxVit((side, side), 8, 7, [8, 16], [1, 1], 8, 0.2, num_classes=classes) if tiny else maxvit_t(weights=None)
        )
    return _step(
        model,
        _pictures(side, (), classes, device),
        lambda pictures, labels: functional.cross_entropy(model(pictures), labels),
        dtype,
    )


def unet(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """A U-Net of five levels from 64 channels on, a class for each of 256² pixels."""
    side, width, levels, classes = (32, 4, 3, 3) if tiny else (256, 64, 5, 21)
    with torch.device(device):
        model = UNet(width, levels, classes)
    return _step(
        model,
        _pictures(side, (side, side), classes, device),
        lambda pictures, labels: functional.cross_entropy(model(pictures), labels),
        dtype,
    )


class UNet(nn.Module):
    """Down by halves, up again, with what was seen on the way down beside it."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_twice(above, here) for above, here in zip([3, *widths], widths, strict=False))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(2 * here, here, 2, stride=2) for here in reversed(widths[:-1]))
        self.up = nn.ModuleList(_twice(2 * here, here) for here in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden, seen = pictures, []
        for place, block in enumerate(self.down):
            hidden = block(
                functional.max_pool2d(hidden, 2) if place else hidden
            )  # [n, width · 2^place, side / 2^place, …]
            seen.append(hidden)
        for rise, block, beside in zip(self.raise_, self.up, reversed(seen[:-1]), strict=True):
            hidden = block(torch.cat([beside, rise(hidden)], dim=1))
        scores: torch.Tensor = self.head(hidden)
        return scores


def _twice(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def lstm(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """A language model of two LSTM layers, 128 tokens at a time."""
    width, tokens, words = (16, 8, 64) if tiny else (1024, 128, 8192)
    with torch.device(device):
        model = LstmLanguageModel(width, words)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return _step(model, _tokens(words, tokens + 1, device), loss, dtype)


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM, head."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embedding(ids))  # [n, tokens, width]
        scores: torch.Tensor = self.head(hidden)
        return scores


def mixture(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """A Mixtral shape of 0.5 B weights: eight experts, two for each of 512 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    width, layers, tokens, words = (32, 2, 16, 128) if tiny else (1024, 8, 512, 32_000)
    config = MixtralConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2 if tiny else 16,
        num_key_value_heads=1 if tiny else 8, num_local_experts=4 if tiny else 8, num_experts_per_tok=2,
        vocab_size=words, max_position_embeddings=tokens,
    )  # fmt: skip
    with torch.device(device):
        model = MixtralForCausalLM(config).to(dtype or torch.float32)  # grouped products are not part of autocast
    return _step(model, _tokens(words, tokens, device), lambda ids: model(input_ids=ids, labels=ids).loss, dtype)


def deeplabv3(*, tiny: bool = False, device: torch.device, dtype: torch.dtype | None = None) -> Parts:
    """torchvision's DeepLabV3 over a ResNet-50 with its auxiliary head, a class for each of 512² pixels.

    Batch normalisation over a pooled map: it trains on two samples and more.
    """
    from torchvision.models.segmentation import deeplabv3_resnet50

    side, classes = (33 if tiny else 512), 21
    with torch.device(device):
        model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=classes, aux_loss=True)

    def loss(pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model(pictures)
        return functional.cross_entropy(scores["out"], labels) + 0.4 * functional.cross_entropy(scores["aux"], labels)

    return _step(model, _pictures(side, (side, side), classes, device), loss, dtype)


def _step(
    model: nn.Module, make_batch: MakeBatch, loss: Callable[..., torch.Tensor], dtype: torch.dtype | None
) -> Parts:
    """What brim asks of a factory: the model, its optimizer, a batch of any size and a step on it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    half = dtype if dtype in (torch.bfloat16, torch.float16) else None
    model.train()

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch[0].device.type, dtype=half, enabled=half is not None):
            value = loss(*batch)
        torch.autograd.backward(value)
        optimizer.step()
        return value.detach()

    return {"model": model, "optimizer": optimizer, "make_batch": make_batch, "step": step, "mode": "train"}


def _tokens(words: int, count: int, device: torch.device) -> MakeBatch:
    return lambda size: (torch.randint(words, (size, count), device=device),)


def _pictures(side: int, labelled: tuple[int, ...], classes: int, device: torch.device) -> MakeBatch:
    return lambda size: (
        torch.randn(size, 3, side, side, device=device),
        torch.randint(classes, (size, *labelled), device=device),
    )
