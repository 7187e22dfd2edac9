"""The decode loop: read the prompts, then add one token at a time until every answer has ended.

The device never waits for the host. Prompts are padded on the right where the model allows it, so that prefill needs
no mask; decode steps run over keys and values at fixed addresses and are captured as a CUDA graph after the first;
whether all answers have ended is read every few steps, one block late. Finished rows are dropped between segments.
Knows nothing of text, tasks or files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from brim.generation.cache import grouped_attention
from brim.generation.choose import PADDING, TokenChooser, generation_config_for, uniforms
from brim.generation.graphs import CaptureFailedError, GraphPool, capture, graphs_work_on, shared_pool
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers, DecodeState, round_up

__all__ = ["DecodeLoop", "Padding", "PromptBatch", "Stopped"]

Padding = Literal["right", "left"]
Stopped = Callable[[list[list[int]]], list[bool]]  # tokens of every answer so far → which are complete

FIRST_SEGMENT = 128  # slots for new tokens at first; every later segment has twice as many
CHECK_STEPS = 16  # steps between two checks whether all answers have ended
MIN_STEPS_TO_CAPTURE = 4  # with fewer steps left, capturing costs more than it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts on the model's device, padded to one length.

    `inputs` are the model's own (`input_ids`, `pixel_values`, …). With `lengths`, [rows], they are padded on the
    right and need no mask; without, on the left, marked by `attention_mask`. `keys` number the samples for the
    noise of sampling.
    """

    inputs: Mapping[str, Any]
    keys: Sequence[int]
    lengths: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many prompts."""
        return int(self.inputs["input_ids"].shape[0])


class DecodeLoop:
    """Generates with one model under one set of settings.

    loop = DecodeLoop(model, GenerationSettings(max_new_tokens=16), TokenIds.of(model.generation_config))
    answers = loop.generate(PromptBatch(inputs={"input_ids": ids}, lengths=lengths, keys=range(len(ids))))
    answers.token_lists()        # waits for the device; without the prompt, cut at the end token
    """

    def __init__(
        self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, padding: Padding = "right"
    ) -> None:
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.padding: Padding = padding
        self.notes: list[str] = []
        self.stopped: Stopped | None = None  # called every few steps: which answers need no further token
        self.device = next(model.parameters()).device
        self._config = generation_config_for(model, settings, tokens)
        self._text_config = model.config.get_text_config(decoder=True)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._ends = torch.tensor(tokens.ends or (-1,), dtype=torch.long, device=self.device)
        self._captures = settings.graphs and graphs_work_on(self.device)
        self._pool: GraphPool | None = None  # kept from the first capture on
        self._kept: DecodeState | None = None  # the last batch's: the next batch of the same shape replays its graph

    @torch.inference_mode()
    def generate(self, batch: PromptBatch) -> Answers:
        """The answers to a batch; on a GPU they may still be computed when this returns."""
        try:
            return self._generate(batch)
        except BaseException:
            self.release()  # a failed batch must not hold its memory
            raise

    def _generate(self, batch: PromptBatch) -> Answers:
        rows = batch.rows
        answers = Answers.empty(rows, self.settings.max_new_tokens, self.tokens, self.device)
        noise = (
            uniforms(self.settings.seed, batch.keys, self.settings.max_new_tokens) if self._config.do_sample else None
        )
        state = self._state_for(batch, segment=min(self.settings.max_new_tokens, FIRST_SEGMENT))
        chooser = TokenChooser(self.model, self._config, prompt_length=self._start(batch), device=self.device)
        history = self._history(batch) if chooser.needs_tokens else None
        self._load_noise(state, noise, 0)
        logits = self.prefill(state, batch)
        self._choose(state, chooser, logits, history, 0)
        alive = torch.arange(rows, device=self.device)
        done = 0
        while True:
            steps = min(state.segment, self.settings.max_new_tokens - done)
            count = self._run_segment(state, chooser, history, steps, answers.written(alive, done))
            answers.write(alive, state.produced[: alive.shape[0], :count], at=done)
            done += count
            if done >= self.settings.max_new_tokens:
                break
            remaining = (~state.finished[: alive.shape[0]]).nonzero().squeeze(1)
            if remaining.shape[0] == 0:
                break
            if history is not None:
                history = torch.cat([history, state.produced[: alive.shape[0], :count]], dim=1)
                history = history.index_select(0, remaining)
            state = self._next_segment(state, remaining, self.settings.max_new_tokens - done)
            alive = alive.index_select(0, remaining)
            self._load_noise(state, None if noise is None else noise[alive.cpu()], done)
            self._step(state, chooser, history, 0)
        answers.send(done)
        return answers

    def prefill(self, state: DecodeState, batch: PromptBatch) -> torch.Tensor:
        """Read the prompts into the state; the logits of the first new token, [state.rows, vocabulary]."""
        length, rows = self._start(batch), batch.rows
        inputs = dict(batch.inputs)
        state.slots.decoding = False
        if batch.lengths is not None:
            valid = torch.arange(length, device=self.device).unsqueeze(0) < batch.lengths.unsqueeze(1)
            position = batch.lengths
            with self._last_token_only(batch.lengths - 1):
                output = self.model(**inputs, past_key_values=state.cache, use_cache=True)
        else:
            valid = inputs["attention_mask"]
            position = valid.sum(dim=1)
            if "position_ids" in self._parameters and "position_ids" not in inputs:
                inputs["position_ids"] = (valid.cumsum(dim=1) - 1).clamp_min(0)
            if "logits_to_keep" in self._parameters:
                inputs["logits_to_keep"] = 1
            output = self.model(**inputs, past_key_values=state.cache, use_cache=True)
        state.begin(slot=length, position=position, valid=valid)
        state.slots.decoding = True
        logits: torch.Tensor = output.logits[:, -1]
        if rows == state.rows:
            return logits
        return torch.cat([logits, logits[:1].expand(state.rows - rows, -1)])

    def decode_one_token(self, state: DecodeState) -> torch.Tensor:
        """Store the last token of every row and give the logits of the next, [rows, vocabulary]."""
        inputs: dict[str, Any] = {"input_ids": state.token, "attention_mask": state.valid}
        if "position_ids" in self._parameters:
            inputs["position_ids"] = state.position
        if "cache_position" in self._parameters:  # before transformers 5
            inputs["cache_position"] = state.slots.next
        with grouped_attention(self._text_config):
            output = self.model(**inputs, past_key_values=state.cache, use_cache=True)
        state.advance()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def release(self) -> None:
        """Free the keys, values and graph kept for the next batch."""
        self._kept = None

    def _start(self, batch: PromptBatch) -> int:
        """How many slots the prompts take."""
        return int(batch.inputs["input_ids"].shape[1])

    def _history(self, batch: PromptBatch) -> torch.Tensor:
        """The prompts, padded on the left with `PADDING`."""
        ids: torch.Tensor = batch.inputs["input_ids"]
        if batch.lengths is None:
            return ids.masked_fill(batch.inputs["attention_mask"] == 0, PADDING)
        length = ids.shape[1]
        source = torch.arange(length, device=ids.device).unsqueeze(0) - (length - batch.lengths).unsqueeze(1)
        return ids.gather(1, source.clamp_min(0)).masked_fill(source < 0, PADDING)

    def _run_segment(
        self, state: DecodeState, chooser: TokenChooser, history: torch.Tensor | None, steps: int, before: torch.Tensor
    ) -> int:
        """Generate the segment up to `steps` tokens (the first exists); how many, fewer if all answers ended."""
        watch = _EndWatch(state)
        made = 1
        while made < steps:
            if self.stopped is not None and made % CHECK_STEPS == 0:
                tokens = torch.cat([before, state.produced[: before.shape[0], :made]], dim=1)
                ended = torch.tensor(self.stopped(tokens.tolist()), device=self.device)
                state.finished[: before.shape[0]].logical_or_(ended)
            if watch.due(made) and watch.all_ended():
                break
            if state.graph is None and self._captures and made > 1 and steps - made >= MIN_STEPS_TO_CAPTURE:
                self._capture(state, chooser)
            self._step(state, chooser, history, made)
            made += 1
        return made

    def _step(self, state: DecodeState, chooser: TokenChooser, history: torch.Tensor | None, made: int) -> None:
        if state.graph is None:
            logits = self.decode_one_token(state)
            self._choose(state, chooser, logits, history, made)
            return
        state.graph.replay()
        if chooser.needs_tokens:
            assert state.logits is not None
            self._choose(state, chooser, state.logits, history, made)

    def _choose(
        self, state: DecodeState, chooser: TokenChooser, logits: torch.Tensor, history: torch.Tensor | None, made: int
    ) -> None:
        tokens = None
        if history is not None:
            tokens = torch.cat([history, state.produced[: history.shape[0], :made]], dim=1)
        rows = logits.shape[0] if tokens is None else tokens.shape[0]
        noise = state.noise()
        chosen = chooser.choose(logits[:rows], tokens=tokens, uniform=None if noise is None else noise[:rows])
        if rows < state.rows:
            chosen = torch.cat([chosen, chosen.new_full((state.rows - rows,), self.tokens.pad)])
        state.accept(chosen, self._ends, self.tokens.pad)

    def _capture(self, state: DecodeState, chooser: TokenChooser) -> None:
        def step() -> None:
            state.logits = self.decode_one_token(state)
            if not chooser.needs_tokens:
                self._choose(state, chooser, state.logits, None, 0)

        try:
            if self._pool is None:
                self._pool = shared_pool(self.device)
            state.graph = capture(step, self._pool)
        except CaptureFailedError as error:
            self._captures = False
            self.notes.append(f"decode steps run without CUDA graphs: capturing one failed ({error})")

    def _state_for(self, batch: PromptBatch, segment: int) -> DecodeState:
        capacity = round_up(self._start(batch) + segment)
        kept, self._kept = self._kept, None
        if kept is not None and kept.capacity == capacity and 0.75 * kept.rows <= batch.rows <= kept.rows:
            self._kept = kept
            return kept
        del kept  # before the new one is allocated
        self._kept = self._make_state(batch.rows, capacity, segment)
        return self._kept

    def _next_segment(self, state: DecodeState, remaining: torch.Tensor, left: int) -> DecodeState:
        """The unfinished rows in a new state, with slots for twice as many tokens, or for those that are left."""
        segment = min(2 * state.segment, left)
        grown = self._make_state(remaining.shape[0], round_up(state.capacity + segment), segment)
        state.graph = None
        state.carry_over(grown, remaining)
        self._kept = None
        return grown

    def _make_state(self, rows: int, capacity: int, segment: int) -> DecodeState:
        return DecodeState.make(
            layers=_cache_layers(self.model.config, self._text_config),
            rows=rows,
            capacity=capacity,
            segment=segment,
            samples=bool(self._config.do_sample),
            device=self.device,
        )

    def _load_noise(self, state: DecodeState, noise: torch.Tensor | None, done: int) -> None:
        if noise is not None and state.uniform is not None:
            part = noise[:, done : done + state.segment].to(self.device, non_blocking=True)
            state.uniform[: part.shape[0], : part.shape[1]] = part

    @contextlib.contextmanager
    def _last_token_only(self, last: torch.Tensor) -> Iterator[None]:
        """Run the head on each row's last token only: logits of whole prompts need more memory than the rest."""

        def pick(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden = arguments[0]  # [rows, length, width]
            rows = torch.arange(hidden.shape[0], device=hidden.device)
            return (hidden[rows, last].unsqueeze(1), *arguments[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()


class _EndWatch:
    """Whether all rows have ended, as of the check before, so that neither host nor device waits for the copy."""

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._on_gpu = state.finished.device.type == "cuda"
        self._asked: tuple[torch.Tensor, Any] | None = None

    def due(self, made: int) -> bool:
        return not self._on_gpu or made % CHECK_STEPS == 0

    def all_ended(self) -> bool:
        ended = self._state.finished.all()
        if not self._on_gpu:
            return bool(ended)
        before, flag = self._asked, torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(ended, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(ended.device))
        self._asked = (flag, event)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def _cache_layers(config: Any, text_config: Any) -> int:
    """The layers of the decoder; beside an encoder, only the whole configuration has `decoder_layers`."""
    decoder = ("num_decoder_layers", "decoder_layers")
    for source, names in ((config, decoder), (text_config, (*decoder, "num_hidden_layers", "n_layer"))):
        for name in names:
            layers = getattr(source, name, None)
            if isinstance(layers, int):
                return layers
    raise AttributeError("the configuration does not say how many layers the model has")
