"""Which way of generating suits a model: the fastest one that gives the model's own logits.

The loop's assumptions (positions may be given, masked slots do not matter, every layer sees the whole past) hold for
most decoders, and a configuration does not say for which. So it is tried: a few steps of the loop on two short prompts
must give what the model gives without any cache. Only a window or a chunk of the past, which short prompts cannot
show, is read from the configuration.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from brim.generation.answers import Answers
from brim.generation.fallback import GenerateFallback
from brim.generation.loop import DecodeLoop, Padding, PromptBatch, Stopped
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import GenerationSettings, TokenIds
from brim.memory.failures import FailureKind, classify

__all__ = ["Decoder", "disagreement", "loop_obstacle", "make_decoder", "padded_batch"]

CHECK_TOKENS = 3
CHECK_LENGTHS = (5, 9)

# What a generation configuration may ask for and the loop does not do, with the values that ask for nothing.
_NOT_DONE = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "guidance_scale": (None, 1),
}


class Decoder(Protocol):
    """Something that answers batches of prompts."""

    padding: Padding
    notes: list[str]
    stopped: Stopped | None

    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""

    def release(self) -> None:
        """Let go of memory kept between batches."""


def make_decoder(
    model: Any, settings: GenerationSettings, tokens: TokenIds, *, images: bool = False, longest: int | None = None
) -> Decoder:
    """The fastest decoder that gives the model's own answers.

    With `images`, prompts come padded on the left, as processors pad them. `longest` is the longest prompt in tokens,
    where it is known: a window that is wider than everything it will see is none.
    """
    total = None if longest is None else longest + settings.max_new_tokens
    obstacle = loop_obstacle(model, total) if settings.own_loop else "brim's own loop was switched off"
    if obstacle is not None:
        return GenerateFallback(model, settings, tokens, why=obstacle)
    if model.config.is_encoder_decoder:
        candidates: list[DecodeLoop] = [Seq2SeqLoop(model, settings, tokens)]
    else:
        sides: tuple[Padding, ...] = ("left",) if images else ("right", "left")
        candidates = [DecodeLoop(model, settings, tokens, padding=side) for side in sides]
    why = ""
    for candidate in candidates:
        why = _known_disagreement(candidate)
        if not why:
            return candidate
    return GenerateFallback(model, settings, tokens, why=why)


def loop_obstacle(model: Any, longest: int | None) -> str | None:
    """What a configuration says against the loop, where a short trial would not show it.

    `longest` is the most tokens that prompt and answer come to; None: not known.
    """
    name = type(model).__name__
    for asked, nothing in _NOT_DONE.items():
        if getattr(model.generation_config, asked, None) not in nothing:
            return f"the generation configuration of {name} asks for {asked}"
    config = model.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's, placed by the length of the cache
        return f"{name} attends to a window of {config.window_size} tokens"
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if longest is None or window is None or window <= longest:
        whole = {"full_attention"}
        if kinds is None and window is not None:
            return f"{name} attends to a window of {window} tokens"
    else:
        whole = {"full_attention", "sliding_attention"}
    if not set(kinds or ()) <= whole:
        return f"{name} has layers of the kinds {', '.join(sorted(set(kinds or ())))}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and "mrope_section" in rope:
        return f"{name} has positions in several dimensions"
    return None


# By model: what the trials of its loops have shown. A profile asks again for every value of its knob.
_VERDICTS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[type, str, str], str]] = weakref.WeakKeyDictionary()


def _known_disagreement(loop: DecodeLoop) -> str:
    """As `disagreement`, once for a model as it is configured now."""
    known = _VERDICTS.setdefault(loop.model, {})
    key = (type(loop), loop.padding, loop.model.config.to_json_string(use_diff=False))
    if key not in known:
        known[key] = disagreement(loop)
    return known[key]


@torch.inference_mode()
def disagreement(loop: DecodeLoop) -> str:
    """Why the loop may not be used: how its logits differ from the model's own, or the error it met; "" if it may."""
    model = loop.model
    try:
        prompts = _check_prompts(model, loop.device)
        ours, tokens = _loop_logits(loop, prompts)
        for row, prompt in enumerate(prompts):
            theirs = _model_logits(model, prompt, tokens[row], loop)
            worst = (ours[row] - theirs).abs().max().item()
            scale = theirs.std().item() + 1e-6
            allowed = (1e-3 if theirs.dtype == torch.float32 and _precise(model) else 0.2) * scale
            if not worst <= allowed:
                return f"its logits differ from {type(model).__name__}'s own by {worst / scale:.2g} standard deviations"
    except Exception as error:
        if classify(error).kind is FailureKind.OUT_OF_MEMORY:
            raise
        return f"a trial of it raised {type(error).__name__}: {error}".splitlines()[0]
    finally:
        loop.release()
    return ""


def _precise(model: Any) -> bool:
    return bool(next(model.parameters()).dtype in (torch.float32, torch.float64))


def _check_prompts(model: Any, device: torch.device) -> list[torch.Tensor]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    low, high = vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 1)  # away from both ends, where special ids are
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(low, high, (length,), generator=generator).to(device) for length in CHECK_LENGTHS]


def _loop_logits(loop: DecodeLoop, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop's logits, [rows, steps, vocabulary], and the tokens it took, [rows, steps]."""
    batch = padded_batch(prompts, loop.padding, pad=loop.tokens.pad, masked=isinstance(loop, Seq2SeqLoop))
    state = loop._state_for(batch, CHECK_TOKENS)
    ends = torch.tensor([-1], device=loop.device)
    logits = [loop.prefill(state, batch)]
    for _ in range(CHECK_TOKENS - 1):
        state.accept(logits[-1].argmax(dim=-1), ends, loop.tokens.pad)
        logits.append(loop.decode_one_token(state))
    return torch.stack(logits, dim=1).float(), state.produced[:, : CHECK_TOKENS - 1]


def _model_logits(model: Any, prompt: torch.Tensor, tokens: torch.Tensor, loop: DecodeLoop) -> torch.Tensor:
    """The model's own logits after the prompt and after each token, [steps, vocabulary], without a cache."""
    if isinstance(loop, Seq2SeqLoop):
        decoder = torch.cat([tokens.new_tensor([loop._start_token]), tokens]).unsqueeze(0)
        output = model(input_ids=prompt.unsqueeze(0), decoder_input_ids=decoder, use_cache=False)
    else:
        output = model(input_ids=torch.cat([prompt, tokens]).unsqueeze(0), use_cache=False)
    logits: torch.Tensor = output.logits[0, -CHECK_TOKENS:].float()
    return logits


def padded_batch(prompts: list[torch.Tensor], padding: Padding, *, pad: int, masked: bool = False) -> PromptBatch:
    """Prompts of token ids as one batch, padded on the side that the decoder wants."""
    length = max(prompt.shape[0] for prompt in prompts)
    device = prompts[0].device
    ids = torch.full((len(prompts), length), pad, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(0, prompt.shape[0]) if padding == "right" else slice(length - prompt.shape[0], length)
        ids[row, where] = prompt
        mask[row, where] = 1
    keys = range(len(prompts))
    if padding == "right" and not masked:
        lengths = torch.tensor([prompt.shape[0] for prompt in prompts], device=device)
        return PromptBatch(inputs={"input_ids": ids}, lengths=lengths, keys=keys)
    return PromptBatch(inputs={"input_ids": ids, "attention_mask": mask}, keys=keys)
