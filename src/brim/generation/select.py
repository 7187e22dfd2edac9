"""Which decoder suits a model: brim's decode loop, checked on a short trial (`trial.py`), or transformers' `generate`.

`generate` is slower and gives the same answers; it runs the models that the loop does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from brim.generation.arena import flash_works_on
from brim.generation.choose import PADDING, WARPERS, TokenChooser, generation_config_for, uniforms
from brim.generation.loop import CHECK_STEPS, DecodeLoop, Padding, PromptBatch, Stopped
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers
from brim.generation.trial import PaddedTrial, loop_disagreement, padding_disagreement, pool_disagreement
from brim.memory.failures import FailureKind, classify

__all__ = [
    "Decoder",
    "GenerateFallback",
    "loop_obstacle",
    "make_decoder",
    "mixing_obstacle",
    "pool_obstacle",
    "pool_pays_on",
]

# Options of a generation configuration that the loop does not support, with the values that turn them off.
_UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "guidance_scale": (None, 1),
}
_ROTATIONS_BY_LONGEST = ("dynamic", "longrope")


class Decoder(Protocol):
    """Generates answers to batches of prompts."""

    padding: Padding
    notes: list[str]
    stopped: Stopped | None

    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""

    def release(self) -> None:
        """Free the memory kept between batches."""


def make_decoder(
    model: Any, settings: GenerationSettings, tokens: TokenIds, *, images: bool = False, longest: int | None = None
) -> Decoder:
    """The fastest decoder whose answers are those of the model's own `generate`.

    With `images`, prompts are padded on the left, as processors do. `longest` is the longest prompt in tokens, if
    known: a sliding window that is wider than prompt and answer has no effect.
    """
    total = None if longest is None else longest + settings.max_new_tokens
    obstacle = loop_obstacle(model, total) if settings.own_loop else "brim's own loop is switched off"
    if obstacle is not None:
        return _fallback(model, settings, tokens, why=obstacle, images=images)
    if model.config.is_encoder_decoder:
        candidates: list[DecodeLoop] = [Seq2SeqLoop(model, settings, tokens)]
    else:
        sides: tuple[Padding, ...] = ("left",) if images else ("right", "left")
        candidates = [DecodeLoop(model, settings, tokens, padding=side) for side in sides]
    why = ""
    for candidate in candidates:
        why = loop_disagreement(candidate)
        if not why:
            return candidate
    return _fallback(model, settings, tokens, why=why, images=images)


def _fallback(model: Any, settings: GenerationSettings, tokens: TokenIds, *, why: str, images: bool) -> Decoder:
    """transformers' `generate`; one prompt at a time where a model answers otherwise beside others."""
    one_by_one = ""
    if not (images or model.config.is_encoder_decoder):  # inputs of images are not rows that can be taken apart
        one_by_one = padding_disagreement(model, tokens)
    return GenerateFallback(model, settings, tokens, why=why, one_by_one=one_by_one)


def loop_obstacle(model: Any, longest: int | None, *, positions_read: bool = False) -> str | None:
    """Why a model's configuration rules out the loop, where a short trial would not show it; None if it does not.

    `longest` is the largest number of tokens of prompt and answer together; None: not known. `positions_read`: where an
    answer begins is known from the model, which positions the prompt.
    """
    name = type(model).__name__
    for asked, nothing in _UNSUPPORTED.items():
        if getattr(model.generation_config, asked, None) not in nothing:
            return f"the generation configuration of {name} asks for {asked}"
    config = model.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's, positioned by the length of the cache
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
    if not positions_read and any("mrope_section" in rope for rope in _rotations(config)):
        return f"{name} has positions in several dimensions"
    return None


def mixing_obstacle(model: Any, longest: int, *, positions_read: bool = False) -> str | None:
    """As `loop_obstacle`, where prompts of any lengths share a forward.

    Some models turn all positions of a forward by its longest one, once that is beyond what they were trained on.
    """
    obstacle = loop_obstacle(model, longest, positions_read=positions_read)
    if obstacle is not None:
        return obstacle
    config = model.config.get_text_config(decoder=True)
    for rope in _rotations(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _ROTATIONS_BY_LONGEST:
            continue
        own = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        trained = rope.get("original_max_position_embeddings") or own
        if longest > trained:
            return f"{type(model).__name__} has {kind} positions: beyond {trained:,} tokens the longest decides for all"
    return None


def _rotations(config: Any) -> list[dict[str, Any]]:
    """The parameters of rotary positions: one for all layers, or one for each kind of them."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [one for one in (rope, *rope.values()) if isinstance(one, dict)]


def pool_pays_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a pool is faster than batches: where flash attention serves it."""
    return flash_works_on(device, dtype)


def pool_obstacle(
    model: Any, settings: GenerationSettings, tokens: TokenIds, *, longest: int, prefix: bool = False,
    padded: PaddedTrial | None = None,
) -> str | None:  # fmt: skip
    """Why a model cannot generate in a pool: its configuration, or how a trial's logits differ; None if it can.

    The trial is of random tokens, or of `padded` prompts.
    """
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} has an encoder, and no pool serves those"
    obstacle = mixing_obstacle(model, longest + settings.max_new_tokens, positions_read=padded is not None)
    if obstacle is not None:
        return obstacle
    if settings.batch_invariant and _has_experts(model):
        return f"how many tokens an expert of {type(model).__name__} computes at once depends on the other prompts"
    config = generation_config_for(model, settings, tokens)
    chooser = TokenChooser(model, config, prompt_length=longest, device=next(model.parameters()).device)
    if chooser.needs_tokens:
        return "its generation configuration reads the tokens so far (a repetition penalty, say)"
    try:
        return pool_disagreement(model, settings, tokens, prefix=prefix, padded=padded) or None
    except Exception as error:
        if classify(error).kind is not FailureKind.OUT_OF_MEMORY:
            raise
        return "a trial of it ran out of memory"


def _has_experts(model: Any) -> bool:
    """Whether each token goes to some of several experts, by any of the names that configurations have for that."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.items())


class GenerateFallback:
    """The interface of `DecodeLoop` over `model.generate`; `one_by_one` says why prompts share no forward, if so."""

    def __init__(
        self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, why: str, one_by_one: str = ""
    ) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.padding: Padding = "right" if model.config.is_encoder_decoder else "left"
        self.device = next(model.parameters()).device
        self.stopped: Stopped | None = None
        self.notes = [f"generation runs through transformers' own generate, which is slower: {why}"]
        self._one_by_one = bool(one_by_one)
        if one_by_one:
            self.notes.append(f"prompts are answered one by one, at the speed of batch size 1: in a batch {one_by_one}")

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""
        answers = Answers.empty(batch.rows, self.settings.max_new_tokens, self.tokens, self.device)
        steps = 0
        for row, part in enumerate(_rows_alone(batch) if self._one_by_one else [batch]):
            produced = self._produced(part)
            answers.write(torch.arange(part.rows, device=self.device) + row, produced, at=0)
            steps = max(steps, produced.shape[1])
        answers.send(steps)
        return answers

    def _produced(self, batch: PromptBatch) -> torch.Tensor:
        """The new tokens of a batch, [rows, steps]."""
        model, settings = self.model, self.settings
        ours, theirs = _split_config(generation_config_for(model, settings, self.tokens))
        processors = []
        if settings.samples or ours.repetition_penalty not in (None, 1.0):
            length = int(batch.inputs["input_ids"].shape[1])
            chooser = TokenChooser(model, ours, prompt_length=length, device=self.device)
            noise = uniforms(settings.seed, batch.keys, settings.max_new_tokens) if settings.samples else None
            mask = None if model.config.is_encoder_decoder else batch.inputs.get("attention_mask")
            processors.append(_Choose(chooser, noise=None if noise is None else noise.to(self.device), mask=mask))
        start = 1 if model.config.is_encoder_decoder else int(batch.inputs["input_ids"].shape[1])
        criteria = [] if self.stopped is None else [_StopCriterion(self.stopped, start)]
        usual = model.generation_config
        model.generation_config = theirs  # generate() takes unset values from here, with a warning
        try:
            ids = model.generate(
                **batch.inputs, generation_config=theirs, logits_processor=processors, stopping_criteria=criteria
            )
        finally:
            model.generation_config = usual
        produced: torch.Tensor = ids[:, start:]
        return produced

    def release(self) -> None:
        """Nothing is kept between batches."""


def _rows_alone(batch: PromptBatch) -> Iterator[PromptBatch]:
    """Each prompt of a batch without its padding."""
    for row, key in enumerate(batch.keys):
        kept = batch.inputs["attention_mask"][row].bool()
        yield PromptBatch(inputs={name: one[row : row + 1, kept] for name, one in batch.inputs.items()}, keys=[key])


class _Choose:
    """A logits processor that allows one token only: the chooser's, with the sample's own noise."""

    def __init__(self, chooser: TokenChooser, *, noise: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self._chooser = chooser
        self._noise = noise  # [rows, max_new_tokens]
        self._mask = mask  # [rows, length of the prompts], 0 where they are padding
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.clone()
        if self._mask is not None:
            tokens[:, : self._mask.shape[1]].masked_fill_(self._mask == 0, PADDING)
        uniform = None if self._noise is None else self._noise[:, self._step]
        chosen = self._chooser.choose(scores, tokens=tokens, uniform=uniform)
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen.unsqueeze(1), 0.0)


class _StopCriterion:
    """A stopping criterion of transformers that checks every few steps which answers are complete."""

    def __init__(self, stopped: Stopped, start: int) -> None:
        self._stopped = stopped
        self._start = start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        del scores, kwargs
        new = input_ids[:, self._start :]
        ended = [False] * len(new)
        if new.shape[1] % CHECK_STEPS == 0:
            ended = self._stopped(new.tolist())
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


def _split_config(config: Any) -> tuple[Any, Any]:
    """The configuration split in two: what the chooser does, as the last step, and what is left to `generate`.

    The chooser samples and applies the repetition penalty: `generate` would also penalise the padding of a batch.
    """
    ours, theirs = type(config)(), copy.deepcopy(config)
    for name in ("max_new_tokens", "eos_token_id", "do_sample"):
        setattr(ours, name, getattr(config, name))
    for name in ("repetition_penalty", *WARPERS):
        setattr(ours, name, getattr(config, name, None))
        setattr(theirs, name, None)
    theirs.do_sample = False
    return ours, theirs
