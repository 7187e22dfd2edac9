"""Which decoder suits a model: brim's decode loop, checked on a short trial, or transformers' own `generate`.

`generate` is slower and gives the same answers; it runs the models that the loop does not fit.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from brim.generation.arena import ALIGNMENT, flash_works_on, region_slots
from brim.generation.choose import PADDING, WARPERS, TokenChooser, generation_config_for, uniforms
from brim.generation.loop import CHECK_STEPS, DecodeLoop, Padding, PromptBatch, Stopped
from brim.generation.pool import GenerationPool, PaddedPrompts, PoolPrompt
from brim.generation.precision import in_float32
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers
from brim.memory.failures import FailureKind, classify

__all__ = [
    "Decoder",
    "GenerateFallback",
    "PaddedTrial",
    "disagreement",
    "logit_difference",
    "loop_obstacle",
    "make_decoder",
    "mixing_obstacle",
    "padded_batch",
    "pool_obstacle",
    "pool_pays_on",
    "trial_prompts",
]

CHECK_TOKENS = 3
CHECK_LENGTHS = (5, 9)
MOST_NOISE = 1.5  # times how far a half-precision model's own logits are from those in float32
CHECK_PREFIX = 4  # tokens that prompts share in a trial of a shared prefix

# Options of a generation configuration that the loop does not support, with the values that turn them off.
_UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "guidance_scale": (None, 1),
}
_ROTATIONS_BY_LONGEST = ("dynamic", "longrope")


OwnLogits = Callable[[], torch.Tensor]  # computes the model's own logits after a prompt and its first tokens


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedTrial:
    """How to get a few real prompts with images, to try a pool on."""

    prompts: Callable[[], Sequence[Sequence[PoolPrompt]]]  # each kind of them apart
    pad: Callable[[Sequence[PoolPrompt]], PaddedPrompts]
    own: Callable[[PoolPrompt], Mapping[str, Any]]  # a prompt's inputs alone, on the device


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
    known = _TRIALS.setdefault(model, {})
    key = (GenerationPool, "prefix" if prefix else "", model.config.to_json_string(use_diff=False))
    try:
        if padded is not None:  # not kept: what the next ones are made of may differ
            return _padded_disagreement(model, settings, tokens, padded) or None
        if key not in known:
            known[key] = _pool_disagreement(model, settings, tokens, shared=CHECK_PREFIX if prefix else 0)
    except Exception as error:
        if classify(error).kind is not FailureKind.OUT_OF_MEMORY:
            raise
        return "a trial of it ran out of memory"
    return known[key] or None


def _has_experts(model: Any) -> bool:
    """Whether each token goes to some of several experts, by any of the names that configurations have for that."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.items())


class _RecordingPool(GenerationPool):
    """Keeps the logits that its tokens are chosen from."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(*arguments, **named)

    def _chosen(self, logits: torch.Tensor, uniform: torch.Tensor | None, rows: int) -> torch.Tensor:
        self.logits.append(logits[:rows].float())
        return super()._chosen(logits, uniform, rows)

    def logits_of(self, *groups: Sequence[PoolPrompt]) -> list[tuple[torch.Tensor, list[int]]]:
        """The logits of each prompt's tokens, [steps, vocabulary], and the tokens; groups are read one by one."""
        for group in groups:
            self.admit(group)
        prompts = [prompt for group in groups for prompt in group]
        answers = {answer.key: answer.tokens for answer in self.advance()}
        first = torch.cat(self.logits[: -CHECK_TOKENS + 1])  # of each prompt, in chunks
        steps = [one[: len(prompts)] for one in self.logits[-CHECK_TOKENS + 1 :]]
        logits = torch.stack([first, *steps], dim=1)
        return [(own, answers[prompt.key]) for own, prompt in zip(logits, prompts, strict=True)]


@torch.inference_mode()
def _pool_disagreement(model: Any, settings: GenerationSettings, tokens: TokenIds, *, shared: int) -> str:
    """As `disagreement`, of a pool; prompts share so many tokens."""
    prompts = trial_prompts(model, next(model.parameters()).device)
    if shared:
        prompts = [torch.cat([prompts[1][:shared], prompt]) for prompt in prompts]

    def trials() -> Iterator[tuple[torch.Tensor, OwnLogits]]:
        asked = [PoolPrompt(ids=prompt.tolist(), key=key) for key, prompt in enumerate(prompts)]
        pool = _trial_pool(
            model, settings, tokens, asked, prefix=prompts[0][:shared].tolist(), chunk_tokens=len(prompts[0]) + 2
        )
        found = pool.logits_of(asked)
        rows = [torch.cat([one, one.new_tensor(made[:-1])]) for one, (_, made) in zip(prompts, found, strict=True)]
        yield torch.cat([ours for ours, _ in found]), functools.partial(_logits_of_rows, model, rows)

    return logit_difference(model, trials)


def _logits_of_rows(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The model's own logits after the last tokens of each row, [rows * steps, vocabulary], without a cache.

    All rows in one forward, which takes most of a trial's time: with padding on the right no token sees any.
    """
    logits = model(input_ids=nn.utils.rnn.pad_sequence(list(rows), batch_first=True), use_cache=False).logits
    own = [of_row[len(row) - CHECK_TOKENS : len(row)] for row, of_row in zip(rows, logits, strict=True)]
    return torch.cat(own).float()


@torch.inference_mode()
def _padded_disagreement(model: Any, settings: GenerationSettings, tokens: TokenIds, trial: PaddedTrial) -> str:
    """As `disagreement`, of a pool whose prompts have images; the model's own logits are those in `generate`."""
    kinds = trial.prompts()
    if not kinds:
        return "no sample could be prepared for a trial"

    def trials() -> Iterator[tuple[torch.Tensor, OwnLogits]]:
        prompts = [prompt for kind in kinds for prompt in kind]
        pool = _trial_pool(model, settings, tokens, prompts)
        pool.pad = trial.pad
        found = pool.logits_of(*(group for kind in kinds for group in (kind[:1], kind[1:])))  # alone, and together
        for prompt, (ours, made) in zip(prompts, found, strict=True):
            yield ours, functools.partial(_generated_logits, model, trial.own(prompt), made, tokens.pad)

    return logit_difference(model, trials)


def _trial_pool(
    model: Any, settings: GenerationSettings, tokens: TokenIds, prompts: Sequence[PoolPrompt], **options: Any
) -> _RecordingPool:
    """A pool for these prompts, whose answers do not end."""
    asked = dataclasses.replace(settings, max_new_tokens=CHECK_TOKENS, graphs=False, temperature=0.0)
    longest = max(len(prompt.ids) for prompt in prompts)
    slots = ALIGNMENT + len(prompts) * region_slots(longest + CHECK_TOKENS) + region_slots(CHECK_PREFIX)
    return _RecordingPool(
        model, asked, TokenIds(ends=(), pad=tokens.pad), rows=len(prompts), slots=slots, longest=longest, **options
    )


def _generated_logits(model: Any, inputs: Mapping[str, Any], tokens: Sequence[int], pad: int) -> torch.Tensor:
    """The logits that `generate` chooses from if it must choose these tokens, [steps, vocabulary]."""
    length = inputs["input_ids"].shape[1]

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, tokens[ids.shape[1] - length]] = 0.0
        return forced

    usual = model.generation_config
    config = type(usual)(
        max_new_tokens=len(tokens), do_sample=False, pad_token_id=pad, output_logits=True, return_dict_in_generate=True
    )
    model.generation_config = config  # generate() takes unset values from here
    try:
        output = model.generate(**inputs, generation_config=config, logits_processor=[only])
    finally:
        model.generation_config = usual
    return torch.stack([logits[0].float() for logits in output.logits])


# By model: results of the trials of its loops. A profile needs them again for every value of its knob.
_TRIALS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[type, str, str], str]] = weakref.WeakKeyDictionary()


def _known_disagreement(loop: DecodeLoop) -> str:
    """As `disagreement`, computed once per model and configuration."""
    known = _TRIALS.setdefault(loop.model, {})
    key = (type(loop), loop.padding, loop.model.config.to_json_string(use_diff=False))
    if key not in known:
        known[key] = disagreement(loop)
    return known[key]


@torch.inference_mode()
def disagreement(loop: DecodeLoop) -> str:
    """Why the loop cannot be used: how its logits differ from the model's own, or the error it raised; "" if it can."""
    model = loop.model

    def trials() -> Iterator[tuple[torch.Tensor, OwnLogits]]:
        prompts = trial_prompts(model, loop.device)
        ours, tokens = _loop_logits(loop, prompts)
        for row, prompt in enumerate(prompts):
            yield ours[row], functools.partial(_model_logits, model, prompt, tokens[row], loop)

    try:
        return logit_difference(model, trials)
    finally:
        loop.release()


def logit_difference(model: Any, trials: Callable[[], Iterator[tuple[torch.Tensor, OwnLogits]]]) -> str:
    """How our logits differ from the model's own by more than rounding, or the error of the trial.

    In half precision models differ in how much rounding does. Where ours and its own are further apart than usual, both
    are compared with float32: ours may be about as far from that as its own are.
    """
    try:
        for ours, compute in trials():
            theirs = compute()
            worst = (ours - theirs).abs().max().item()
            scale = theirs.std().item() + 1e-6
            allowed = (1e-3 if _precise(model) else 0.2) * scale
            if not worst <= allowed and not _precise(model):
                with in_float32(model):
                    exact = compute()
                worst, allowed = ((one - exact).abs().max().item() for one in (ours, theirs))
                allowed *= MOST_NOISE
            if not worst <= allowed:
                return f"its logits differ from {type(model).__name__}'s own by {worst / scale:.2g} standard deviations"
    except Exception as error:
        if classify(error).kind is FailureKind.OUT_OF_MEMORY:
            raise
        return f"a trial of it raised {type(error).__name__}: {error}".splitlines()[0]
    return ""


def _precise(model: Any) -> bool:
    return bool(next(model.parameters()).dtype in (torch.float32, torch.float64))


def trial_prompts(model: Any, device: torch.device) -> list[torch.Tensor]:
    """Short prompts of random tokens, to compare logits on."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Away from both ends of the vocabulary, where special tokens are.
    low, high = vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 1)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(low, high, (length,), generator=generator).to(device) for length in CHECK_LENGTHS]


def _loop_logits(loop: DecodeLoop, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop's logits, [rows, steps, vocabulary], and the tokens it chose, [rows, steps]."""
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
    """Prompts of token ids as one batch, padded on the side that the decoder expects."""
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


class GenerateFallback:
    """The interface of `DecodeLoop` over `model.generate`."""

    def __init__(self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, why: str) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.padding: Padding = "right" if model.config.is_encoder_decoder else "left"
        self.device = next(model.parameters()).device
        self.stopped: Stopped | None = None
        self.notes = [f"generation runs through transformers' own generate, which is slower: {why}"]

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch."""
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
        produced = ids[:, start:]
        answers = Answers.empty(batch.rows, settings.max_new_tokens, self.tokens, self.device)
        answers.write(torch.arange(batch.rows, device=self.device), produced, at=0)
        answers.send(produced.shape[1])
        return answers

    def release(self) -> None:
        """Nothing is kept between batches."""


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
