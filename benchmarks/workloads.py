"""The workloads of the batch-size benchmarks: as plain values, as flags of `brim find`, and built as it builds them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.prompts import QWEN2_SHAPE

__all__ = ["FIRST_FIVE", "WORKLOADS", "Spec", "build", "find_flags", "tiny", "video"]

STEPS = Path(__file__).parent / "training_steps.py"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model, and how it runs."""

    model: str  # as brim takes it; `hf:` alone: the folder is made of `config`
    mode: str
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    multiple_of: int = 1  # of two: batch normalisation over a pooled map cannot train on one sample
    dtype: str = "bfloat16"


def video(model: str, size: int) -> Spec:
    """One of torchvision's video models, training."""
    return Spec(f"torchvision:{model}", "train", {"frames": 16, "size": size})


def _own(step: str, multiple_of: int = 1) -> Spec:
    return Spec(f"py:{STEPS}:{step}", "train", multiple_of=multiple_of)


# 0.3 B parameters in the shape of Qwen2: random weights, since only cost matters here.
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **QWEN2_SHAPE, "torch_dtype": "bfloat16"}

WORKLOADS: dict[str, Spec] = {
    "r3d_18 train 16x112": video("r3d_18", 112),
    "swin3d_t train 16x224": video("swin3d_t", 224),
    "mvit_v2_s train 16x224": video("mvit_v2_s", 224),
    "vit_b_16 forward": Spec("torchvision:vit_b_16", "forward"),
    "qwen2 0.3B generate 512+32": Spec("hf:", "generate", {"tokens": 512, "max_new_tokens": 32}, _QWEN2),
    "llama 0.9B lora train 512": _own("lora"),
    "t5 0.2B train 512+128": _own("t5"),
    "maxvit_t train 224": _own("maxvit"),
    "unet train 256": _own("unet"),
    "lstm train 128": _own("lstm"),
    "mixtral 0.5B train 512": _own("mixture"),
    "deeplabv3 train 512": _own("deeplabv3", multiple_of=2),
}
FIRST_FIVE = tuple(WORKLOADS)[:5]  # those that have curves

_TINY_QWEN2 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "vocab_size": 128}  # fmt: skip


def tiny(spec: Spec) -> Spec:
    """The same in a size that a laptop runs at once, in float32; swin3d_t and mvit_v2_s become r3d_18."""
    if spec.model.startswith("py:"):
        return dataclasses.replace(spec, knobs={"tiny": "true"}, dtype="float32")
    if spec.config is not None:
        knobs = {"tokens": 8, "max_new_tokens": 2}
        return dataclasses.replace(spec, knobs=knobs, config={**spec.config, **_TINY_QWEN2}, dtype="float32")
    if spec.mode == "forward":
        return Spec("torchvision:squeezenet1_1", "forward", {"size": 32}, dtype="float32")
    return Spec("torchvision:r3d_18", "train", {"frames": 2, "size": 16}, dtype="float32")


def find_flags(spec: Spec, folder: Path) -> list[str]:
    """The arguments of `brim find`; a model that needs a folder gets it inside of this one."""
    flags = [_model(spec, folder), "--mode", spec.mode, "--dtype", spec.dtype]
    for name, value in spec.knobs.items():
        flags += ["--knob", f"{name}={value}"]
    return flags if spec.multiple_of == 1 else [*flags, "--multiple-of", str(spec.multiple_of)]


def build(spec: Spec, device: str = "auto") -> Any:
    """The workload, on the default device unless another is named."""
    from brim.models.build import build_workload
    from brim.settings.find_settings import WorkloadRequest

    mode: Any = spec.mode
    with tempfile.TemporaryDirectory() as folder:
        request = WorkloadRequest(
            model=_model(spec, Path(folder)), mode=mode, knobs=spec.knobs, dtype=spec.dtype, device=device
        )
        return build_workload(request)[0]


def _model(spec: Spec, folder: Path) -> str:
    if spec.config is None:
        return spec.model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.config))
    return f"{spec.model}{folder}"
