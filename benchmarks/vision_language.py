"""A Molmo2-shaped model with random weights and pictures to ask it about, for benchmarks without any download.

`--tiny` shapes are for trying a benchmark out on a laptop: their figures mean nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

__all__ = ["save_model", "write_questions"]

# Vision as Molmo2's own (SigLIP-like, 378-pixel crops); a text decoder of 18 layers, 1.03 B parameters in all.
LARGE = {
    "vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 12, "num_attention_heads": 16,
               "num_key_value_heads": 16, "head_dim": 72, "patch_size": 14},
    "text": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 18, "num_attention_heads": 16,
             "num_key_value_heads": 4, "head_dim": 128},
    "adapter": {"hidden_size": 1152, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
                "intermediate_size": 5632, "vision_feature_layer": [-3, -9]},
    "crop": 378, "patch": 14, "overlap": [4, 4],
}  # fmt: skip
TINY = {
    "vision": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8},
    "text": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 24},
    "adapter": {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                "intermediate_size": 64, "vision_feature_layer": [2, 0]},
    "crop": 64, "patch": 8, "overlap": [1, 1],
}  # fmt: skip
POSITIONS = 8192


def save_model(folder: Path, *, tiny: bool = False, weights_on: str | None = None) -> Path:
    """Configuration and processor; and random weights, made on a device: a card does that in a moment.

    Without them brim makes some itself.
    """
    import torch
    import transformers

    from brim.demo.model import build_config, build_processor

    shape: dict[str, Any] = TINY if tiny else LARGE
    processor = build_processor()
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"height": shape["crop"], "width": shape["crop"]}
        part.patch_size = shape["patch"]
    processor.image_processor.overlap_margins = shape["overlap"]
    processor.tokenizer.model_max_length = POSITIONS
    config = build_config()
    vision = {**config.vision_config.to_dict(), **shape["vision"], "image_size": [shape["crop"]] * 2}
    vision["image_num_pos"] = (shape["crop"] // shape["patch"]) ** 2
    text = {**config.text_config.to_dict(), **shape["text"], "max_position_embeddings": POSITIONS}
    adapter = {**config.adapter_config.to_dict(), **shape["adapter"], "text_hidden_size": shape["text"]["hidden_size"]}
    whole = {**config.to_dict(), "vision_config": vision, "text_config": text, "adapter_config": adapter}
    config = transformers.Molmo2Config(**{key: value for key, value in whole.items() if key != "model_type"})
    if weights_on is not None:
        with torch.device(weights_on):
            model = transformers.Molmo2ForConditionalGeneration(config).to(torch.bfloat16)
        model.save_pretrained(folder)
        del model
        if weights_on == "cuda":
            torch.cuda.empty_cache()
    else:
        config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_questions(folder: Path, count: int, *, pixels: int = 1000, pictures: int = 64) -> Path:
    """Questions about noisy pictures of this many pixels a side and more, as JSONL."""
    import numpy
    from PIL import Image

    draw = random.Random(0)
    noise = numpy.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(min(pictures, count)):
        width, height = (draw.randrange(pixels, pixels + pixels // 2) for _ in range(2))
        coarse = noise.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
        Image.fromarray(coarse).resize((width, height)).save(folder / f"{number}.jpg", quality=85)
    path = folder / "questions.jsonl"
    rows = [
        {"id": str(number), "question": "which digit is at the top left ?", "answer": str(draw.randrange(10)),
         "image": f"{number % min(pictures, count)}.jpg"}
        for number in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
