"""Models of two layers with random weights, saved with what reads for them as transformers saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<eos>", "<unk>", "<image>")
WORDS = (*(str(number) for number in range(20)), "what", "is", "plus", "?", "user:", "assistant:", "system:")
VOCABULARY = (*SPECIAL, *WORDS, *(f"w{number}" for number in range(60)))
PAD, END, UNKNOWN, IMAGE = range(len(SPECIAL))
POSITIONS = 320
PATCHES = 4  # of an image
IDS: dict[str, Any] = {"vocab_size": len(VOCABULARY), "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer(chat_template: str | None = None, *, frame: str = "$A") -> Any:
    """One token a word; `frame` says which special tokens stand around a text."""
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, SPECIAL.index(word)) for word in SPECIAL if word in frame]
    inner.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<image>"], model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    made.chat_template = chat_template
    return made


def save_language_model(folder: Path, *, chat_template: str | None = None, seed: int = 7, ends: bool = True) -> Path:
    """With `ends`, some answers end by themselves after a few tokens; without, none does."""
    config = transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2)
    model = varied(transformers.LlamaForCausalLM(config), seed=seed)
    model.generation_config.eos_token_id = [END, VOCABULARY.index("w56")] if ends else None
    if not ends:
        with torch.no_grad():
            model.lm_head.weight[: len(SPECIAL)] = 0
    return save(folder, model, tokenizer(chat_template, frame="<unk> $A" if chat_template else "$A"))


def save_seq2seq(folder: Path) -> Path:
    config = transformers.BartConfig(
        **{**IDS, "bos_token_id": 2}, tie_word_embeddings=False, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    model.generation_config.forced_eos_token_id = None  # the default forces an end at the last token
    varied(model, spread=0.2, louder=("embed_positions",), quieter=("encoder_attn",))
    return save(folder, model, tokenizer(frame="$A <eos>"))


def save_vision_language_model(folder: Path, *, ends: bool = True) -> Path:
    """Without `ends` its answers never end by themselves."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(**IDS, **SHAPE, num_key_value_heads=2)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=PATCHES, eos_token_id=END,
        pad_token_id=PAD,
    )  # fmt: skip
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    model = varied(transformers.LlavaForConditionalGeneration(config))
    if not ends:
        with torch.no_grad():
            model.get_output_embeddings().weight[: len(SPECIAL)] = 0
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = model.config.text_config.eos_token_id = None
    return save(folder, model, processor)


def save_text_classifier(folder: Path, names: Sequence[str] = ("calm", "angry", "sad")) -> Path:
    config = transformers.BertConfig(
        **{**IDS, "bos_token_id": 2}, **{**SHAPE, "max_position_embeddings": 64},
        id2label=dict(enumerate(names)), label2id={name: place for place, name in enumerate(names)},
    )  # fmt: skip
    return save(folder, varied(transformers.BertForSequenceClassification(config)), tokenizer())


def save_image_classifier(folder: Path, names: Sequence[str] = ("cat", "dog")) -> Path:
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        id2label=dict(enumerate(names)), label2id={name: place for place, name in enumerate(names)},
    )  # fmt: skip
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    return save(folder, varied(transformers.ViTForImageClassification(config)), processor)


def save(folder: Path, *parts: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    for part in parts:
        part.save_pretrained(folder)
    return folder


def varied(
    model: Any, *, seed: int = 7, spread: float = 0.4, louder: Sequence[str] = (), quieter: Sequence[str] = ()
) -> Any:
    """The model with weights so large that its answers depend on the prompt, and vary within themselves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, spread, generator=generator)
            if any(part in name for part in louder):
                weight.mul_(3)
            if any(part in name for part in quieter):
                weight.mul_(0.5)
    return model.eval()
