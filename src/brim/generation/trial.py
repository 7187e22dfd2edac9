"""Whether a decoder gives a model's own answers: a short trial, whose logits are compared with the model's.

A decoder's trial is of random tokens; that of a pool of prompts with images is of real ones. Knows nothing of which
decoder is wanted.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.generation.arena import ALIGNMENT, region_slots
from brim.generation.loop import DecodeLoop, Padding, PromptBatch
from brim.generation.pool import GenerationPool, PaddedPrompts, PoolPrompt
from brim.generation.precision import in_float32
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import GenerationSettings, TokenIds
from brim.memory.failures import FailureKind, classify

__all__ = [
    "PaddedTrial",
    "disagreement",
    "logit_difference",
    "loop_disagreement",
    "padded_batch",
    "padding_disagreement",
    "pool_disagreement",
    "trial_prompts",
]

CHECK_TOKENS = 3
CHECK_LENGTHS = (5, 9)
MOST_NOISE = 1.5  # times how far a half-precision model's own logits are from those in float32
CHECK_PREFIX = 4  # tokens that prompts share in a trial of a shared prefix

OwnLogits = Callable[[], torch.Tensor]  # computes the model's own logits after a prompt and its first tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedTrial:
    """How to get a few real prompts with images, to try a pool on."""

    prompts: Callable[[], Sequence[Sequence[PoolPrompt]]]  # each kind of them apart
    pad: Callable[[Sequence[PoolPrompt]], PaddedPrompts]
    own: Callable[[PoolPrompt], Mapping[str, Any]]  # a prompt's inputs alone, on the device


def loop_disagreement(loop: DecodeLoop) -> str:
    """As `disagreement`, computed once for a model and its configuration."""
    return _once(loop.model, type(loop), loop.padding, lambda: disagreement(loop))


def pool_disagreement(
    model: Any, settings: GenerationSettings, tokens: TokenIds, *, prefix: bool, padded: PaddedTrial | None
) -> str:
    """As `disagreement`, of a pool, whose prompts share a prefix or have more than tokens; computed once as well."""
    if padded is not None:  # not kept: what the next ones are made of may differ
        return _padded_disagreement(model, settings, tokens, padded)
    shared = CHECK_PREFIX if prefix else 0
    variant = "prefix" if prefix else ""
    return _once(model, GenerationPool, variant, lambda: _pool_disagreement(model, settings, tokens, shared=shared))


def padding_disagreement(model: Any, tokens: TokenIds) -> str:
    """As `disagreement`, of the model's own `generate` with padded prompts; computed once as well."""
    return _once(model, type(model), "left", lambda: _padding_disagreement(model, tokens.pad))


# By model: results of its trials. A profile needs them again for every value of its knob.
_TRIALS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[type, str, str], str]] = weakref.WeakKeyDictionary()


def _once(model: Any, decoder: type, variant: str, judge: Callable[[], str]) -> str:
    known = _TRIALS.setdefault(model, {})
    key = (decoder, variant, model.config.to_json_string(use_diff=False))
    if key not in known:
        known[key] = judge()
    return known[key]


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
            yield ours.unsqueeze(0), functools.partial(_generated_logits, model, trial.own(prompt), made, tokens.pad)

    return logit_difference(model, trials)


@torch.inference_mode()
def _padding_disagreement(model: Any, pad: int) -> str:
    """As `disagreement`, of `generate` with padded prompts, compared with what it has for each alone."""
    prompts = trial_prompts(model, next(model.parameters()).device)
    made = prompts[0][:CHECK_TOKENS].tolist()

    def logits_of(some: list[torch.Tensor]) -> torch.Tensor:
        return _generated_logits(model, padded_batch(some, "left", pad=pad).inputs, made, pad)

    def trials() -> Iterator[tuple[torch.Tensor, OwnLogits]]:
        for row, together in enumerate(logits_of(prompts)):
            yield together.unsqueeze(0), functools.partial(logits_of, prompts[row : row + 1])

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
    """The logits that `generate` chooses from if it must choose these tokens, [rows, steps, vocabulary]."""
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
    return torch.stack([logits.float() for logits in output.logits], dim=1)


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
