"""Generation in a trace: the prompts read, one decode step as it is, one as a CUDA graph would capture it.

The decode loop of an evaluation runs on shape tensors, but for its repetitions: over keys and values that never move,
every step allocates the same. Models that an evaluation leaves to transformers' own `generate` are read and decoded by
plain forwards instead: the first step after the prompt, and the last one, when keys and values are longest.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from brim.errors import first_line
from brim.forecasting.ledger import Ledger
from brim.forecasting.torch_private import without_dispatch_modes
from brim.forecasting.tracer import Tracer
from brim.generation.choose import TokenChooser
from brim.generation.loop import MIN_STEPS_TO_CAPTURE, DecodeLoop, Padding, PromptBatch, Stopped
from brim.generation.select import loop_obstacle
from brim.generation.seq2seq import Seq2SeqLoop
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers, DecodeState
from brim.generation.trial import padded_batch
from brim.workloads.inference import GenerateWorkload

__all__ = ["prepare_generation"]

_TRIAL_LENGTHS = (4, 6)
# By model: results of the trials of its loops, which every further size would repeat.
_TRIALS: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[int, bool, str], str]] = weakref.WeakKeyDictionary()


class _TracedDecoder(Protocol):
    tracer: Tracer
    padding: Padding
    tokens: TokenIds
    notes: list[str]
    stopped: Stopped | None

    def generate(self, batch: PromptBatch) -> Answers: ...

    def release(self) -> None: ...


def prepare_generation(workload: GenerateWorkload, tracer: Tracer, batch: Mapping[str, Any]) -> str | None:
    """Give the workload a decoder for the trace; why it is not the one that would run, if it is not."""
    model: Any = workload.model
    settings = GenerationSettings(max_new_tokens=workload.max_new_tokens)
    tokens = TokenIds(ends=(), pad=TokenIds.of(getattr(model, "generation_config", None)).pad)
    why = loop_obstacle(model, int(batch["input_ids"].shape[1]) + workload.max_new_tokens)
    if why is None and getattr(model, "_is_stateful", False):
        why = f"{type(model).__name__} keeps a state instead of keys and values"
    if why is None:
        short = GenerationSettings(max_new_tokens=2)
        images = len(batch) > 2
        trials = _candidates(model, short, tokens, images=images)
        known = _TRIALS.setdefault(model, {})
        for number, make in enumerate(_candidates(model, settings, tokens, images=images)):
            key = (number, images, model.config.to_json_string(use_diff=False))
            if key not in known:
                known[key] = _trial(trials[number], tracer)
            why = known[key]
            if not why:
                workload.decoder = make(tracer)
                return None
    workload.decoder = _PlainForwards(model, settings, tokens, tracer)
    return f"generation would run through transformers' generate ({why}); traced as plain forwards"


_Maker = Callable[[Tracer], _TracedDecoder]


def _candidates(model: Any, settings: GenerationSettings, tokens: TokenIds, *, images: bool) -> list[_Maker]:
    """The loops that an evaluation would try; where positions cannot be given, the padding has to be on the left."""
    if model.config.is_encoder_decoder:
        return [lambda tracer: _TracedSeq2SeqLoop(model, settings, tokens).traced_by(tracer)]
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    sides: tuple[Padding, ...] = ("left",) if images or not takes_positions else ("right", "left")
    return [_maker(model, settings, tokens, side) for side in sides]


def _maker(model: Any, settings: GenerationSettings, tokens: TokenIds, padding: Padding) -> _Maker:
    return lambda tracer: _TracedLoop(model, settings, tokens, padding=padding).traced_by(tracer)


def _trial(make: _Maker, tracer: Tracer) -> str:
    """The error that a loop meets on two short prompts, or "" if it meets none."""
    backends = dict(tracer.facts.attention)
    with without_dispatch_modes():
        aside = Tracer(Ledger())
        try:
            with aside:
                loop = make(aside)
                prompts = [torch.zeros(length, dtype=torch.long) for length in _TRIAL_LENGTHS]
                masked = isinstance(loop, Seq2SeqLoop)
                loop.generate(padded_batch(prompts, loop.padding, pad=loop.tokens.pad, masked=masked))
        except Exception as error:
            return f"a trial of the decode loop raised {type(error).__name__}: {first_line(error)}"
        finally:
            aside.values.release()
            tracer.facts.attention = backends
    return ""


class _Shortened:
    """A decode loop that makes each kind of step once: as it is, and as a graph would capture it."""

    tracer: Tracer
    tokens: TokenIds

    def traced_by(self, tracer: Tracer) -> Any:
        self.tracer = tracer
        return self

    def prefill(self, state: DecodeState, batch: PromptBatch) -> torch.Tensor:
        logits: torch.Tensor = super().prefill(state, batch)  # type: ignore[misc]
        self._label(state)
        return logits

    def _next_segment(self, state: DecodeState, going_on: torch.Tensor, left: int) -> DecodeState:
        grown: DecodeState = super()._next_segment(state, going_on, left)  # type: ignore[misc]
        self._label(grown)
        return grown

    def _run_segment(
        self, state: DecodeState, chooser: TokenChooser, history: torch.Tensor | None, steps: int, said: torch.Tensor
    ) -> int:
        del said
        loop: Any = self
        if steps > 1 and state.graph is None:
            loop._step(state, chooser, history, 1)
        if steps - 2 >= MIN_STEPS_TO_CAPTURE and state.graph is None:
            self._capture(state, chooser)
        if chooser.needs_tokens and steps > 2:  # the longest history of all
            loop._step(state, chooser, history, steps - 1)
        return steps

    def _capture(self, state: DecodeState, chooser: TokenChooser) -> None:
        loop: Any = self
        with self.tracer.graph_pool():
            state.logits = loop.decode_one_token(state)
            if not chooser.needs_tokens:
                loop._choose(state, chooser, state.logits, None, 0)
        state.graph = _CapturedGraph()

    def _label(self, state: DecodeState) -> None:
        for layer in state.cache.layers:
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    self.tracer.ledger.label(self.tracer.values.block_of(tensor), "cache", "(keys and values)")


class _TracedLoop(_Shortened, DecodeLoop):
    pass


class _TracedSeq2SeqLoop(_Shortened, Seq2SeqLoop):
    pass


class _CapturedGraph:
    def replay(self) -> None:
        """A replay allocates nothing."""


class _PlainForwards:
    """Prompt, next token and last token by forwards of the model, with whatever cache it makes itself."""

    def __init__(self, model: Any, settings: GenerationSettings, tokens: TokenIds, tracer: Tracer) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.tracer = tracer
        self.padding: Padding = "right" if model.config.is_encoder_decoder else "left"
        self.notes: list[str] = []
        self.stopped: Stopped | None = None

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """One prompt read, the first and the last token added."""
        ids = batch.inputs["input_ids"]
        answers = Answers.empty(batch.rows, self.settings.max_new_tokens, self.tokens, ids.device)
        inputs = dict(batch.inputs)
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = 1
        token = torch.full((batch.rows, 1), self.tokens.pad, dtype=torch.long, device=ids.device)
        is_seq2seq = self.model.config.is_encoder_decoder
        if is_seq2seq:
            inputs["decoder_input_ids"] = token
        output = self.model(**inputs, use_cache=True)
        past = 1 if is_seq2seq else int(ids.shape[1])
        fixed = {"encoder_outputs": (output.encoder_last_hidden_state,)} if is_seq2seq else {}
        for step in range(min(self.settings.max_new_tokens - 1, 2)):
            _choose(output.logits)
            name = "past_key_values" if getattr(output, "past_key_values", None) is not None else "cache_params"
            cache = getattr(output, name)
            del output
            if step == 1:
                past += _lengthen(cache, self.settings.max_new_tokens - 2 - 1)
            self._label(cache)
            past += 1
            given = {"decoder_input_ids": token} if is_seq2seq else {"input_ids": token}
            given["attention_mask"] = torch.ones(
                (batch.rows, ids.shape[1] if is_seq2seq else past), dtype=torch.long, device=ids.device
            )
            output = self.model(**given, **fixed, use_cache=True, **{name: cache})
        _choose(output.logits)
        answers.send(0)
        return answers

    def release(self) -> None:
        """Nothing is kept between batches."""

    def _label(self, cache: Any) -> None:
        for layer in getattr(cache, "layers", ()):
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(tensor, torch.Tensor):
                    self.tracer.ledger.label(self.tracer.values.block_of(tensor), "cache")


def _choose(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1].float().argmax(dim=-1)


def _lengthen(cache: Any, tokens: int) -> int:
    """Let the keys and values of a growing cache be as long as after so many more tokens; how many it took."""
    layers = getattr(cache, "layers", None)
    if not layers or tokens <= 0 or not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in layers):
        return 0
    for layer in layers:
        rows, heads, _, width = layer.keys.shape
        layer.update(
            layer.keys.new_empty((rows, heads, tokens, width)),
            layer.values.new_empty((rows, layer.values.shape[1], tokens, layer.values.shape[3])),
        )
    return tokens
