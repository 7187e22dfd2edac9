"""The five workloads of the batch-size benchmarks, built the way `brim find` builds them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.prompts import QWEN2_SHAPE

from brim.models.build import build_workload
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload

__all__ = ["WORKLOADS", "build"]

# 0.3 B parameters in the shape of Qwen2: random weights, since only cost matters here.
_QWEN2_SHAPED = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    **QWEN2_SHAPE,
    "torch_dtype": "bfloat16",
}


def _video(model: str, size: int) -> WorkloadRequest:
    knobs: dict[str, Any] = {"frames": 16, "size": size}
    return WorkloadRequest(model=f"torchvision:{model}", mode="train", knobs=knobs, dtype="bfloat16")


WORKLOADS: dict[str, WorkloadRequest] = {
    "r3d_18 train 16x112": _video("r3d_18", 112),
    "swin3d_t train 16x224": _video("swin3d_t", 224),
    "mvit_v2_s train 16x224": _video("mvit_v2_s", 224),
    "vit_b_16 forward": WorkloadRequest(model="torchvision:vit_b_16", mode="forward", dtype="bfloat16"),
    "qwen2 0.3B generate 512+32": WorkloadRequest(
        model="hf:QWEN2_SHAPED", mode="generate", knobs={"tokens": 512, "max_new_tokens": 32}, dtype="bfloat16"
    ),
}


def build(name: str) -> Workload:
    """Build one of the five on the default device."""
    request = WORKLOADS[name]
    if request.model != "hf:QWEN2_SHAPED":
        return build_workload(request)[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_QWEN2_SHAPED))
        return build_workload(dataclasses.replace(request, model=f"hf:{folder}"))[0]
