"""Tiny vision-language models of the families that have knobs of their own: configuration, processor, random weights.

Each function saves a folder as `save_pretrained` writes it; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SIDE = 32  # of a crop, patch or tile, in pixels
TEXT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
SQUARE = {"height": SIDE, "width": SIDE}


def tokenizer(*special: str, **named: str) -> tuple[Any, dict[str, int]]:
    """One token a word; `named` ones are attributes of the tokenizer as well. The second value: every token's id."""
    words = ("<pad>", "<bos>", "<eos>", "<unk>", *special, *named.values(), "what", "is", "this")
    ids = {word: place for place, word in enumerate(dict.fromkeys(words))}
    inner: Any = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", extra_special_tokens=named,
    )  # fmt: skip
    made.add_tokens([*special, *named.values()], special_tokens=True)  # also in the middle of a word
    return made, ids


def save(folder: Path, model: Any, processor: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def molmo2(folder: Path) -> Path:
    names = ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>",
             "<im_low>", "<|image|>", "<|video|>")  # fmt: skip
    words, ids = tokenizer(*names)
    grid: dict[str, Any] = {"size": SQUARE, "patch_size": 8, "pooling_size": [2, 2]}
    processor = transformers.Molmo2Processor(
        image_processor=transformers.Molmo2ImageProcessor(max_crops=4, overlap_margins=[1, 1], **grid),
        video_processor=transformers.Molmo2VideoProcessor(**grid),
        tokenizer=words,
    )
    config = transformers.Molmo2Config(
        vision_config={**VISION, "image_size": [SIDE, SIDE], "num_key_value_heads": 2, "head_dim": 8},
        adapter_config={"vision_feature_layer": [1, 0], "hidden_size": 16, "num_attention_heads": 2,
                        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "text_hidden_size": 16},
        text_config={**TEXT, "additional_vocab_size": 8},
        image_start_token_id=ids["<im_start>"], low_res_image_start_token_id=ids["<low_res_im_start>"],
        image_end_token_id=ids["<im_end>"], image_patch_id=ids["<im_patch>"], image_col_id=ids["<im_col>"],
        frame_start_token_id=ids["<frame_start>"], frame_end_token_id=ids["<frame_end>"],
    )  # fmt: skip
    return save(folder, transformers.Molmo2ForConditionalGeneration(config), processor)


def internvl(folder: Path) -> Path:
    words, ids = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE, max_patches=6),
        tokenizer=words,
        video_processor=transformers.InternVLVideoProcessor(size=SQUARE),
        image_seq_length=4,
    )
    config = transformers.InternVLConfig(
        vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [8, 8]},
        text_config={**TEXT, "model_type": "qwen2"}, image_token_id=ids["<IMG_CONTEXT>"],
    )  # fmt: skip
    return save(folder, transformers.InternVLForConditionalGeneration(config), processor)


def got_ocr2(folder: Path) -> Path:
    """Only the configuration: its vision tower makes 256 tokens of 1024 pixels, which is not tiny."""
    words, ids = tokenizer("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>")
    processor = transformers.GotOcr2Processor(transformers.GotOcr2ImageProcessor(size=SQUARE), words)
    config = transformers.GotOcr2Config(
        vision_config={"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "mlp_dim": 24, "image_size": SIDE, "patch_size": 8, "global_attn_indexes": [0]},
        text_config={**TEXT, "model_type": "qwen2"}, image_token_index=ids["<imgpad>"],
    )  # fmt: skip
    return save(folder, config, processor)


def llava_next(folder: Path) -> Path:
    words, ids = tokenizer(image_token="<image>")
    grids = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [SIDE, 3 * SIDE]]
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(
            size={"shortest_edge": SIDE}, crop_size=SQUARE, image_grid_pinpoints=grids
        ),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = transformers.LlavaNextConfig(
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        text_config={**TEXT, "model_type": "llama"}, image_token_index=ids["<image>"], image_grid_pinpoints=grids,
    )  # fmt: skip
    return save(folder, transformers.LlavaNextForConditionalGeneration(config), processor)


def idefics3(folder: Path) -> Path:
    return _idefics(folder, "Idefics3")


def smolvlm(folder: Path) -> Path:
    return _idefics(folder, "SmolVLM")


def _idefics(folder: Path, family: str) -> Path:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words, ids = tokenizer(
        *rows, "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", image_token="<image>"
    )
    images = getattr(transformers, f"{family}ImageProcessor")(
        size={"longest_edge": 4 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    parts: dict[str, Any] = {"image_processor": images, "tokenizer": words, "image_seq_len": 4}
    if family == "SmolVLM":
        parts["video_processor"] = transformers.SmolVLMVideoProcessor(
            size={"longest_edge": 4 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
    processor = getattr(transformers, f"{family}Processor")(**parts)
    config = getattr(transformers, f"{family}Config")(
        vision_config=dict(VISION), text_config={**TEXT, "model_type": "llama"}, image_token_id=ids["<image>"],
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    return save(folder, getattr(transformers, f"{family}ForConditionalGeneration")(config), processor)


def qwen2_vl(folder: Path) -> Path:
    return _qwen(folder, "Qwen2VL")


def qwen2_5_vl(folder: Path) -> Path:
    return _qwen(folder, "Qwen2_5_VL")


def qwen3_vl(folder: Path) -> Path:
    return _qwen(folder, "Qwen3VL")


def _qwen(folder: Path, family: str) -> Path:
    words, ids = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    images = transformers.Qwen2VLImageProcessor(
        patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    )
    videos = transformers.Qwen3VLVideoProcessor if family == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    processor = getattr(transformers, f"{family}Processor")(
        image_processor=images, tokenizer=words, video_processor=videos(patch_size=8)
    )
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8,
                              "spatial_merge_size": 2, "out_hidden_size": 16}  # fmt: skip
    if family == "Qwen2VL":
        vision |= {"embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2}
    if family == "Qwen3VL":
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = getattr(transformers, f"{family}Config")(
        vision_config=vision, text_config={**TEXT, "rope_parameters": rope}, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return save(folder, getattr(transformers, f"{family}ForConditionalGeneration")(config), processor)


def gemma3(folder: Path) -> Path:
    words, ids = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    processor = transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(size=SQUARE), words, image_seq_length=4)
    config = transformers.Gemma3Config(
        vision_config=dict(VISION), text_config={**TEXT, "sliding_window": 512}, mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )  # fmt: skip
    return save(folder, transformers.Gemma3ForConditionalGeneration(config), processor)


def mllama(folder: Path) -> Path:
    words, ids = tokenizer("<|image|>", "<|python_tag|>")
    processor = transformers.MllamaProcessor(transformers.MllamaImageProcessor(size=SQUARE, max_image_tiles=4), words)
    config = transformers.MllamaConfig(
        vision_config={**VISION, "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0],
                       "vision_output_dim": 32, "num_hidden_layers": 2},
        text_config={**{name: value for name, value in TEXT.items() if name != "head_dim"},
                     "cross_attention_layers": [1]},
        image_token_index=ids["<|image|>"],
    )  # fmt: skip
    return save(folder, transformers.MllamaForConditionalGeneration(config), processor)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "molmo2": molmo2, "internvl": internvl, "got_ocr2": got_ocr2, "llava_next": llava_next, "idefics3": idefics3,
    "smolvlm": smolvlm, "qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "gemma3": gemma3,
    "mllama": mllama,
}  # fmt: skip
