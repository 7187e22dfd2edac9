"""The shipped model, a Molmo2 of half a million parameters that answers DigitBoard's questions, and its profile.

`weights_folder()` is a folder as `save_pretrained` writes it. The builders below make the same model untrained; the
training script (examples/digitboard/train.py) starts from them. `brim demo` profiles it over its number of crops.
"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from brim.demo.digitboard import NUMBER_WORDS, write_digitboard
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import DemoSettings, ProfileRequest, ProfileSettings

__all__ = [
    "CEILING",
    "CROPS",
    "CROP_SIZE",
    "IMAGE_TOKEN",
    "build_config",
    "build_processor",
    "profile_settings",
    "weights_folder",
    "write_boards",
    "write_model",
]

CROP_SIZE = 64  # pixels; the overlap leaves 48 of them new in every crop
PATCH_SIZE = 8
POOLING = 2  # patches each way that become one token
IMAGE_TOKEN = "<|image|>"

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_PLACES = (
    *(f"row {number}" for number in range(1, 5)), *(f"column {number}" for number in range(1, 6)),
    *(f"{row} {column}" for row in ("top", "bottom") for column in ("left", "right")),
)  # fmt: skip
_WORDS = (
    *(str(number) for number in range(10)), "yes", "no", *NUMBER_WORDS, *_PLACES, "which", "digit", "is", "in", "at",
    "the", "largest", "there", "a", "an", "?",
)  # fmt: skip
# The processor's own names. They come last: the model has embeddings for them, but cannot generate them.
_IMAGE_TOKENS = (
    "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>",
    "<im_low>", IMAGE_TOKEN, "<|video|>",
)  # fmt: skip
_VOCABULARY = (*_SPECIAL, *_WORDS, *_IMAGE_TOKENS)


def weights_folder() -> Path:
    """The folder of the shipped model, ready for `from_pretrained`."""
    return Path(str(resources.files("brim.demo") / "weights"))


def build_config() -> Any:
    """The configuration of the model: 3 vision layers, 3 text layers."""
    import transformers

    ids = {token: place for place, token in enumerate(_VOCABULARY)}
    vision: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "image_size": [CROP_SIZE, CROP_SIZE], "patch_size": PATCH_SIZE,
        "initializer_range": 0.1,  # narrow layers: with the usual 0.02 the signal vanishes at first
    }  # fmt: skip
    adapter: dict[str, Any] = {
        "vision_feature_layer": [2, 0], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 16, "intermediate_size": 192, "text_hidden_size": 96, "initializer_range": 0.1,
    }  # fmt: skip
    text: dict[str, Any] = {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 24, "vocab_size": len(_VOCABULARY) - len(_IMAGE_TOKENS),
        "additional_vocab_size": len(_IMAGE_TOKENS), "max_position_embeddings": 1024, "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_cache": True,
        "bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"], "pad_token_id": ids["<pad>"],
    }  # fmt: skip
    return transformers.Molmo2Config(
        initializer_range=0.08,
        vision_config=vision,
        adapter_config=adapter,
        text_config=text,
        image_start_token_id=ids["<im_start>"],
        low_res_image_start_token_id=ids["<low_res_im_start>"],
        image_end_token_id=ids["<im_end>"],
        image_patch_id=ids["<im_patch>"],
        frame_start_token_id=ids["<frame_start>"],
        frame_end_token_id=ids["<frame_end>"],
        bos_token_id=ids["<bos>"],
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
    )


def build_processor() -> Any:
    """Images to crops of 64 pixels, text to one token per word; `max_crops` is an option of every call."""
    import transformers

    grid: dict[str, Any] = {
        "size": {"height": CROP_SIZE, "width": CROP_SIZE}, "patch_size": PATCH_SIZE, "pooling_size": [POOLING, POOLING],
    }  # fmt: skip
    colours = {"image_mean": [0.3, 0.15, 0.3], "image_std": [0.25, 0.25, 0.25]}  # of a board: mostly dark background
    images = transformers.Molmo2ImageProcessor(max_crops=12, overlap_margins=[1, 1], **grid, **colours)
    videos = transformers.Molmo2VideoProcessor(**grid, **colours)
    return transformers.Molmo2Processor(image_processor=images, video_processor=videos, tokenizer=_build_tokenizer())


def _build_tokenizer() -> Any:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    inner: Any = Tokenizer(models.WordLevel({token: place for place, token in enumerate(_VOCABULARY)}, "<unk>"))
    inner.normalizer = normalizers.Lowercase()
    pieces = Regex(r"row \d|column \d|(?:top|bottom) (?:left|right)|\w+|[^\w\s]")  # a place is one word
    inner.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="removed", invert=True)  # drops the rest
    inner.decoder = decoders.WordPiece(prefix="##")  # words separated by a space
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=list(_IMAGE_TOKENS),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


CROPS = ("1", "2", "4", "6", "9", "12")
CEILING = 64
SEED = 1


def write_boards(folder: Path, *, questions: int) -> Path:
    """Write questions about boards into a folder of their own."""
    return write_digitboard(folder / "boards", questions=questions, seed=SEED)


def write_model(folder: Path) -> Path:
    """Copy the shipped model into a folder of its own, for commands that are typed by hand."""
    target = folder / "model"
    target.mkdir(exist_ok=True)
    for file in weights_folder().iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    return target


def profile_settings(settings: DemoSettings, model: Path, boards: Path, folder: Path) -> ProfileSettings:
    """The settings of the profile that `brim demo` runs."""
    base = EvalRequest(
        model=str(model),
        data=str(boards),
        device="cpu",
        batch_size=CEILING,
        memory_limit=settings.memory_limit,
        use_cache=False,
    )
    request = ProfileRequest(base=base, axes={"max_crops": CROPS}, resume=settings.resume)
    return ProfileSettings(request=request, output=folder, json_output=settings.json_output)
