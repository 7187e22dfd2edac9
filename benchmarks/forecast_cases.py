"""The cases of benchmarks/forecast.py: what is trained, run or generated, at which batch size.

Names are stable: measured peaks are stored under them in benchmarks/data/peaks-<gpu>.json.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.prompts import QWEN2_SHAPE
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads import build as build_spec
from brim.models.build import build_workload
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload

__all__ = ["CASES", "Case", "build", "case_named"]

_VIDEO_112 = {"frames": 16, "size": 112}
_VIDEO_224 = {"frames": 16, "size": 224}

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **QWEN2_SHAPE, "torch_dtype": "bfloat16"},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32"},
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4096,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    },
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", "torch_dtype": "float32"},
    "roberta": {
        "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "vocab_size": 50265,
        "max_position_embeddings": 514, "torch_dtype": "float32",
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 512, "d_ff": 2048,
        "num_layers": 6, "num_heads": 8, "d_kv": 64, "vocab_size": 32128, "decoder_start_token_id": 0,
        "torch_dtype": "float32",
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload at one batch size."""

    name: str
    part: str
    batch_size: int
    build: Callable[[str], Workload]  # on a device

    def is_of(self, parts: str) -> bool:
        """Whether it is asked for: by a text in its name, or by its part; several are given with commas."""
        return any(part in self.name or part == self.part for part in parts.split(","))


def build(case: Case, device: str = "auto") -> Workload:
    """The workload of a case."""
    return case.build(device)


def case_named(name: str) -> Case | None:
    """The case of that name, or None."""
    return next((case for case in CASES if case.name == name), None)


def _torchvision(part: str, model: str, mode: Any, size: int, **request: Any) -> Case:
    asked = {"dtype": "bfloat16", **request}
    knobs = asked.pop("knobs", {})
    words = [model, mode, asked["dtype"]]
    if mode == "train":
        words.append(asked.get("optimizer", "adamw"))
        if asked.get("gradient_checkpointing"):
            words.append("checkpointed")
    made = WorkloadRequest(model=f"torchvision:{model}", mode=mode, knobs=knobs, **asked)
    return Case(name=" ".join(words), part=part, batch_size=size, build=lambda device: _from_request(made, device))


def _language(shape: str, mode: Any, size: int, *, tokens: int, new: int | None = None, **request: Any) -> Case:
    knobs = {"tokens": tokens, **({"max_new_tokens": new} if new else {})}
    asked = {"dtype": "bfloat16", **request}
    words = [shape, mode, asked["dtype"], f"{tokens}+{new}" if new else str(tokens)]
    if asked.get("gradient_checkpointing"):
        words.append("checkpointed")

    def make(device: str) -> Workload:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_CONFIGS[shape]))
            return _from_request(WorkloadRequest(model=f"hf:{folder}", mode=mode, knobs=knobs, **asked), device)

    part = "generation" if mode == "generate" else "language"
    return Case(name=" ".join(words), part=part, batch_size=size, build=make)


def _from_request(request: WorkloadRequest, device: str) -> Workload:
    return build_workload(dataclasses.replace(request, device=device))[0]


def _of_search(name: str, size: int) -> Case:
    """One of the workloads of benchmarks/find.py."""
    return Case(name=name, part="search", batch_size=size, build=lambda device: build_spec(WORKLOADS[name], device))


def _pairwise_head(device: str) -> Workload:
    """512 → 256 → 128 → 1 on cached features; softplus over all pairs of an inner and an outer sample."""
    import torch
    from torch import nn
    from torch.nn import functional

    from brim.models.batches import random_floats
    from brim.models.placement import resolve_device
    from brim.workloads.train_step import TrainStepWorkload

    place = resolve_device(device)
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)).to(place)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inner, outer = model(batch[0])[:, 0], model(batch[1])[:, 0]
        preference = functional.softplus(-0.1 * (outer[None, :] - inner[:, None])).mean()
        total: torch.Tensor = preference + 0.01 * (inner.square().mean() + outer.square().mean())
        return total

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = random_floats((2, count, 512), device=place)
        return features[0].clone(), features[1].clone()

    return TrainStepWorkload(
        model=head, make_batch=batch, loss=loss, optimizer=torch.optim.AdamW(head.parameters()), device=place
    )


def _vision_language(mode: str) -> Callable[[str], Workload]:
    """LLaVA-shaped: 12 layers of CLIP on 224² pixels (256 image tokens) before 8 layers of a Qwen2."""

    def make(device: str) -> Workload:
        import torch
        import transformers

        from brim.models.batches import random_floats, random_integers
        from brim.models.placement import resolve_device
        from brim.workloads.inference import ForwardWorkload
        from brim.workloads.train_step import TrainStepWorkload

        place, image_token, image_tokens, words = resolve_device(device), 31_999, 256, 64
        vision = transformers.CLIPVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
            patch_size=14, projection_dim=512,
        )  # fmt: skip
        text = transformers.Qwen2Config(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=32_000, use_cache=False,
        )  # fmt: skip
        config = transformers.LlavaConfig(
            vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=image_token,
            image_seq_length=image_tokens,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.float32 if mode == "train" else torch.bfloat16
        # Converted before it is moved: what a conversion on the card leaves cached is none of the step's.
        model = transformers.LlavaForConditionalGeneration(config).to(dtype).to(place)

        def batch(count: int) -> dict[str, torch.Tensor]:
            ids = random_integers(10, 30_000, (count, image_tokens + words), device=place)
            ids[:, 1 : 1 + image_tokens] = image_token
            pixels = random_floats((count, 3, 224, 224), device=place, dtype=dtype)
            made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
            return {**made, "labels": ids} if mode == "train" else made

        if mode == "forward":
            return ForwardWorkload(model=model.eval(), make_batch=batch, device=place)
        return TrainStepWorkload(
            model=model.train(),
            make_batch=batch,
            loss=lambda model, batch: model(**batch).loss,
            optimizer=torch.optim.AdamW(model.parameters()),
            device=place,
            autocast_dtype=torch.bfloat16,
        )

    return make


CASES: tuple[Case, ...] = (
    # The nine video models.
    _torchvision("video", "r3d_18", "train", 8, knobs=_VIDEO_112),
    _torchvision("video", "mc3_18", "train", 8, knobs=_VIDEO_112, optimizer="sgd"),
    _torchvision("video", "r2plus1d_18", "train", 8, knobs=_VIDEO_112, dtype="float32"),
    _torchvision("video", "s3d", "train", 8, knobs=_VIDEO_224),
    _torchvision("video", "mvit_v1_b", "train", 4, knobs=_VIDEO_224),
    _torchvision("video", "mvit_v2_s", "train", 4, knobs=_VIDEO_224, gradient_checkpointing=True),
    _torchvision("video", "swin3d_t", "train", 4, knobs=_VIDEO_224),
    _torchvision("video", "swin3d_s", "train", 4, knobs=_VIDEO_224, gradient_checkpointing=True),
    _torchvision("video", "swin3d_b", "train", 2, knobs=_VIDEO_224, dtype="float32", optimizer="sgd"),
    # Ten image models in training.
    _torchvision("image", "resnet50", "train", 32),
    _torchvision("image", "resnet50", "train", 32, dtype="float32", optimizer="sgd"),
    _torchvision("image", "resnet50", "train", 32, gradient_checkpointing=True),
    _torchvision("image", "vgg16", "train", 16, dtype="float32"),
    _torchvision("image", "densenet121", "train", 32),
    _torchvision("image", "efficientnet_b0", "train", 64, optimizer="sgd"),
    _torchvision("image", "mobilenet_v3_large", "train", 64, dtype="float32"),
    _torchvision("image", "regnet_y_8gf", "train", 32),
    _torchvision("image", "convnext_tiny", "train", 32),
    _torchvision("image", "convnext_tiny", "train", 16, dtype="float32", optimizer="sgd"),
    _torchvision("image", "vit_b_16", "train", 32),
    _torchvision("image", "vit_b_16", "train", 32, dtype="float32", gradient_checkpointing=True),
    _torchvision("image", "swin_t", "train", 32, optimizer="sgd"),
    _torchvision("image", "swin_t", "train", 16, dtype="float32"),
    _torchvision("image", "maxvit_t", "train", 16),
    # Forward only.
    _torchvision("forward", "resnet50", "forward", 128),
    _torchvision("forward", "vit_b_16", "forward", 64, dtype="float32"),
    _torchvision("forward", "swin_t", "forward", 128),
    _torchvision("forward", "convnext_tiny", "forward", 64, dtype="float32"),
    _torchvision("forward", "r3d_18", "forward", 32, knobs=_VIDEO_112),
    # Small forwards in half precision, where little is in use and what is cached weighs most.
    _torchvision("half-forward", "vit_b_16", "forward", 64),
    _torchvision("half-forward", "vit_b_32", "forward", 256),
    _torchvision("half-forward", "regnet_y_3_2gf", "forward", 256),
    _torchvision("half-forward", "resnet18", "forward", 256),
    _torchvision("half-forward", "swin_b", "forward", 64),
    _torchvision("half-forward", "efficientnet_b0", "forward", 256),
    _torchvision("half-forward", "convnext_base", "forward", 64),
    _torchvision("half-forward", "mobilenet_v3_large", "forward", 256),
    _torchvision("half-forward", "regnet_x_8gf", "forward", 64),
    # Measured before their requests had been examined; the last but one has corrected the rule for groups since.
    _torchvision("half-forward", "regnet_y_16gf", "forward", 64),
    _torchvision("half-forward", "regnet_x_1_6gf", "forward", 256),
    _torchvision("half-forward", "regnet_y_800mf", "forward", 256),
    _torchvision("half-forward", "regnet_y_8gf", "forward", 64),
    _torchvision("half-forward", "resnext50_32x4d", "forward", 128),
    # Language models.
    _language("qwen2", "train", 8, tokens=512),
    _language("qwen2", "train", 8, tokens=512, gradient_checkpointing=True),
    _language("llama", "train", 4, tokens=1024, dtype="float32"),
    _language("gpt2", "train", 8, tokens=512, dtype="float32"),
    _language("qwen2", "forward", 16, tokens=512),
    _language("bert", "train", 16, tokens=256),
    _language("bert", "forward", 64, tokens=256, dtype="float32"),
    _language("roberta", "train", 16, tokens=256, dtype="float32"),
    _language("t5", "train", 16, tokens=256, new=64),
    _language("t5", "forward", 32, tokens=256, new=64, dtype="float32"),
    # Generation at several prompt lengths.
    _language("qwen2", "generate", 64, tokens=128, new=32),
    _language("qwen2", "generate", 64, tokens=512, new=32),
    _language("qwen2", "generate", 16, tokens=2048, new=64),
    _language("llama", "generate", 32, tokens=256, new=64),
    _language("t5", "generate", 32, tokens=256, new=32, dtype="float32"),
    # A vision-language model, and the loss that is quadratic in the batch.
    Case(name="llava forward bfloat16", part="vision-language", batch_size=16, build=_vision_language("forward")),
    Case(name="llava train bfloat16 adamw", part="vision-language", batch_size=8, build=_vision_language("train")),
    Case(name="pairwise head train float32 2048", part="pairwise", batch_size=2048, build=_pairwise_head),
    Case(name="pairwise head train float32 8192", part="pairwise", batch_size=8192, build=_pairwise_head),
    # Not used while the rules for workspaces were first made; five of them have corrected the rules since.
    _torchvision("second", "resnet101", "train", 24),
    _torchvision("second", "wide_resnet50_2", "train", 16, dtype="float32", optimizer="sgd"),
    _torchvision("second", "resnext50_32x4d", "train", 32),
    _torchvision("second", "shufflenet_v2_x1_0", "train", 128, optimizer="sgd"),
    _torchvision("second", "efficientnet_v2_s", "train", 24),
    _torchvision("second", "swin_v2_t", "train", 16),
    _torchvision("second", "regnet_x_3_2gf", "train", 32, dtype="float32"),
    _torchvision("second", "densenet169", "forward", 64),
    _torchvision("second", "efficientnet_b3", "forward", 32, dtype="float32"),
    _torchvision("second", "convnext_small", "forward", 64),
    _torchvision("second", "vit_l_16", "forward", 64),
    _torchvision("second", "r2plus1d_18", "forward", 16, knobs=_VIDEO_112),
    _torchvision("second", "mvit_v1_b", "forward", 8, knobs=_VIDEO_224, dtype="float32"),
    _torchvision("second", "s3d", "train", 4, knobs=_VIDEO_224, dtype="float32"),
    _torchvision("second", "mc3_18", "train", 12, knobs=_VIDEO_112),
    _torchvision("second", "swin3d_b", "forward", 8, knobs=_VIDEO_224),
    # Never used to make rules: how good a forecast is on unseen models.
    _torchvision("unseen", "resnet34", "train", 64, optimizer="sgd"),
    _torchvision("unseen", "mnasnet1_0", "train", 64, optimizer="sgd"),
    _torchvision("unseen", "mobilenet_v2", "train", 32, dtype="float32"),
    _torchvision("unseen", "squeezenet1_1", "train", 128),
    _torchvision("unseen", "densenet161", "train", 16, dtype="float32"),
    _torchvision("unseen", "efficientnet_b4", "train", 16),
    _torchvision("unseen", "regnet_y_1_6gf", "train", 48, dtype="float32", optimizer="sgd"),
    _torchvision("unseen", "convnext_small", "train", 24, optimizer="sgd"),
    _torchvision("unseen", "swin_s", "train", 8, dtype="float32"),
    _torchvision("unseen", "vit_l_16", "train", 16),
    _torchvision("unseen", "resnext101_32x8d", "forward", 32, dtype="float32"),
    _torchvision("unseen", "mobilenet_v3_small", "forward", 256),
    _torchvision("unseen", "r3d_18", "train", 6, knobs=_VIDEO_112, dtype="float32", optimizer="sgd"),
    _torchvision("unseen", "r2plus1d_18", "train", 8, knobs=_VIDEO_112),
    _torchvision("unseen", "mvit_v1_b", "train", 2, knobs=_VIDEO_224, dtype="float32"),
    _torchvision("unseen", "swin3d_t", "forward", 4, knobs=_VIDEO_224, dtype="float32"),
    # The workloads of benchmarks/find.py, of which whole curves are stored.
    *(
        _of_search(name, size)
        for name, size in {
            "r3d_18 train 16x112": 64, "swin3d_t train 16x224": 8, "mvit_v2_s train 16x224": 8,
            "vit_b_16 forward": 512, "qwen2 0.3B generate 512+32": 128,
        }.items()
    ),
)  # fmt: skip
