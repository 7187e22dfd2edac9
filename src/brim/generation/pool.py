"""A pool of sequences that generate together: an answer leaves when it ends, and the next prompt takes its place.

    pool = GenerationPool(model, settings, tokens, rows=512, slots=200_000, longest=1_500)
    while prompts or pool.active:
        prompts = prompts[pool.admit(prompts):]
        for answer in pool.advance():
            ...

Prompts are read packed, in chunks of bounded tokens; keys and values stay where they were written (`arena.py`) while
rows come and go. Every few steps the host reads which answers have ended. Steps are captured as CUDA graphs for a few
numbers of rows. Prompts with more than token ids, such as images, are read whole, as padded rows, by the model's own
forward, whose attention may differ there (image tokens that see each other). Knows nothing of text, tasks or files.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from brim.generation.arena import Arena, PackedTokens, Regions, head_on, region_slots
from brim.generation.choose import TokenChooser, generation_config_for, uniforms
from brim.generation.graphs import CaptureFailedError, GraphPool, capture, graphs_work_on, shared_pool
from brim.generation.norms import fused_norms
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import PoolRows

__all__ = ["CHUNK_TOKENS", "GenerationPool", "PaddedPrompts", "PoolAnswer", "PoolPrompt", "chunk_tokens_of"]

CHUNK_TOKENS = 16384  # prompt tokens of one forward, of a model with so many parameters or more: as fast as twice …
FULL_CHUNK_PARAMETERS = 1_000_000_000  # … as many; a smaller model needs more of them to keep the host ahead …
MOST_CHUNK_TOKENS = 65536  # … up to here
LEAST_CHUNK_TOKENS = 1024
CHECK_STEPS = 8  # steps between two readings of which answers have ended
SMALLEST_GRAPH = 8  # rows
INVARIANT_ROWS = 256  # of every step where answers must not depend on what else is in the pool …
INVARIANT_CHUNK_TOKENS = 8192  # … and prompt tokens of every forward
MIN_STEPS_TO_CAPTURE = 2  # with fewer steps left, capturing costs more than it saves


def chunk_tokens_of(model: Any, settings: GenerationSettings, *, halvings: int = 0) -> int:
    """Prompt tokens of one forward that keep a GPU busy while the host launches it; halved where memory is short."""
    if settings.batch_invariant:
        return INVARIANT_CHUNK_TOKENS
    parameters = int(sum(parameter.numel() for parameter in model.parameters()))
    wanted = CHUNK_TOKENS * FULL_CHUNK_PARAMETERS // max(parameters, 1)
    return max(min(max(wanted, CHUNK_TOKENS), MOST_CHUNK_TOKENS) >> halvings, LEAST_CHUNK_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPrompt:
    """Token ids that wait to be read; `key` numbers the sample for the noise of sampling.

    `inputs` is what else there is of it, as `GenerationPool.pad` takes it. In a chunk it counts for at least `weight`
    tokens, and stands beside others of its `kind` only.
    """

    ids: Sequence[int]
    key: int
    inputs: Any = None
    weight: int = 0
    kind: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedPrompts:
    """Prompts as the model's own forward takes them, on the device.

    Padded on the left they have an `attention_mask`. On the right they need none: no token sees a later one, and
    attention without a mask is faster.
    """

    inputs: Mapping[str, Any]  # `input_ids`, [prompts, longest], and the rest
    kept: torch.Tensor  # [tokens], the places of those that are not padding, row after row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolAnswer:
    """New tokens, without the end token, whether there was one, and how many sequences the pool had at its start."""

    key: int
    tokens: list[int]
    ended: bool
    shared_with: int


@dataclasses.dataclass(kw_only=True)
class _Occupant:
    """The sequence in a row."""

    key: int
    start: int
    shared_with: int = 0
    steps: int = 1  # tokens since it was admitted, if it has not ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A prompt's tokens from one place to another, read in one forward."""

    row: int
    prompt: PoolPrompt
    start: int
    begin: int
    end: int

    @property
    def ends_prompt(self) -> bool:
        return self.end == len(self.prompt.ids)


class GenerationPool:
    """Generates with one model under one set of settings, at most `rows` sequences at a time.

    `longest` is the longest prompt in tokens; `prefix` are tokens with which every prompt begins, and shorter than any
    of them. With `settings.batch_invariant` all forwards over prompts have the same number of tokens, and all steps the
    same number of rows: the kernels that a library chooses by shape are then the same whatever else is in the pool.
    """

    def __init__(
        self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, rows: int, slots: int, longest: int,
        prefix: Sequence[int] = (), chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:  # fmt: skip
        self.model, self.settings, self.tokens = model, settings, tokens
        self.device = next(model.parameters()).device
        self.rows, self.longest, self.chunk_tokens = rows, longest, chunk_tokens
        self.notes: list[str] = []
        self.stopped: Callable[[list[list[int]]], list[bool]] | None = None  # which answers need no further token
        self.pad: Callable[[Sequence[PoolPrompt]], PaddedPrompts] | None = None  # prompts are read padded, and whole
        self.computed_tokens = self.useful_tokens = 0  # of prompts and steps; the former with rows that had ended
        self._config = generation_config_for(model, settings, tokens)
        self._text_config = model.config.get_text_config(decoder=True)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._mrope = next((one for one in model.modules() if hasattr(one, "rope_deltas")), None)
        self._chooser = TokenChooser(model, self._config, prompt_length=longest, device=self.device)
        self._ends = torch.tensor(tokens.ends or (-1,), dtype=torch.long, device=self.device)
        self._state = PoolRows.make(rows, settings.max_new_tokens, samples=settings.samples, device=self.device)
        self._numbers = torch.arange(rows, device=self.device)
        self._regions = Regions(slots)
        self.arena = Arena(self._text_config.num_hidden_layers, slots)
        self._occupants: list[_Occupant | None] = [None] * rows
        self._top = 0  # rows in use are below
        self._graphs: dict[int, Any] = {}
        self._captures = settings.graphs and graphs_work_on(self.device)
        self._graph_pool: GraphPool | None = None
        self._norms = fused_norms(model)
        self._prefix = 0
        if prefix:
            self._read_prefix(prefix)

    @property
    def active(self) -> int:
        """Sequences that are being answered."""
        return sum(one is not None for one in self._occupants[: self._top])

    def tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        return [*self._state.tensors(), *self.arena.tensors()]

    def slots_of(self, prompt_tokens: int) -> int:
        """Slots that a prompt of so many tokens and its longest answer take."""
        return region_slots(prompt_tokens - self._prefix + self.settings.max_new_tokens)

    @torch.inference_mode()
    def grow(self, slots: int) -> None:
        """More slots; sequences stay where they are."""
        self._graphs.clear()
        self.arena.grow(slots)
        self._regions.grow(slots)

    @torch.inference_mode()
    def admit(self, prompts: Sequence[PoolPrompt]) -> int:
        """Read prompts, from the first, as far as rows and slots are free; how many."""
        taken: list[tuple[int, PoolPrompt, int]] = []
        free = (row for row, one in enumerate(self._occupants) if one is None)
        for prompt in prompts:
            row = next(free, None)
            start = None if row is None else self._regions.take(self.slots_of(len(prompt.ids)))
            if row is None or start is None:
                break
            taken.append((row, prompt, start))
        self._reach(max((len(prompt.ids) for _, prompt, _ in taken), default=0))
        for row, prompt, start in taken:
            self._occupants[row] = _Occupant(key=prompt.key, start=start)
        self._top = max([self._top, *(row + 1 for row, _, _ in taken)])
        active = self.active
        for row, _, _ in taken:
            self._occupants[row].shared_with = active  # type: ignore[union-attr]  # it was put there just now
        for parts in self._chunks(taken) if self.pad is None else self._padded_chunks(taken):
            self._read(parts)
        return len(taken)

    @torch.inference_mode()
    def advance(self) -> list[PoolAnswer]:
        """Make some steps; the answers that have ended, whose rows and slots are free again."""
        held = [one for one in self._occupants[: self._top] if one is not None]
        if not held:
            return []
        left = self.settings.max_new_tokens - min(one.steps for one in held)
        steps = min(CHECK_STEPS, left)
        size = self._graph_size(self._top)
        for made in range(steps):
            self._step(size, left=left - made)
        for one in held:
            one.steps += steps
        self.computed_tokens += steps * size
        return self._collect()

    def release(self) -> None:
        """Free keys, values and graphs."""
        self._graphs.clear()
        self.arena.release()

    def _reach(self, length: int) -> None:
        """Captured steps read as far as the longest prompt that was known: with a longer one they are made anew."""
        if length > self.longest:
            self.longest = length
            self._graphs.clear()

    def _padded_chunks(self, taken: Sequence[tuple[int, PoolPrompt, int]]) -> Iterator[list[_Part]]:
        """What is read in one forward: whole prompts, at most `chunk_tokens` with padding unless there is one only."""
        for kind in dict.fromkeys(prompt.kind for _, prompt, _ in taken):
            parts: list[_Part] = []
            longest = 0
            for row, prompt, start in taken:
                if prompt.kind != kind:
                    continue
                longest = max(longest, len(prompt.ids), prompt.weight)
                if parts and (len(parts) + 1) * longest > self.chunk_tokens:
                    yield parts
                    parts, longest = [], max(len(prompt.ids), prompt.weight)
                parts.append(_Part(row=row, prompt=prompt, start=start, begin=0, end=len(prompt.ids)))
            yield parts

    def _chunks(self, taken: Sequence[tuple[int, PoolPrompt, int]]) -> Iterator[list[_Part]]:
        """What is read in one forward: at most `chunk_tokens`, the last prompt cut where it must be."""
        parts: list[_Part] = []
        room = self.chunk_tokens
        for row, prompt, start in taken:
            begin = self._prefix
            while begin < len(prompt.ids):
                end = min(len(prompt.ids), begin + room)
                parts.append(_Part(row=row, prompt=prompt, start=start, begin=begin, end=end))
                room -= end - begin
                begin = end
                if room == 0:
                    yield parts
                    parts, room = [], self.chunk_tokens
        if parts:
            yield parts

    def _read(self, parts: Sequence[_Part]) -> None:
        """One forward over parts of prompts; those that are read to their end get their first token."""
        import numpy

        prefix = self._prefix
        begins = numpy.array([part.begin for part in parts])
        ends = numpy.array([part.end for part in parts])
        regions = numpy.array([part.start for part in parts])
        counts = ends - begins
        borders = numpy.concatenate([[0], counts.cumsum()])
        positions = numpy.arange(borders[-1]) + numpy.repeat(begins - borders[:-1], counts)
        whole = [number for number, part in enumerate(parts) if part.ends_prompt]
        fields = {
            "ids": numpy.concatenate([numpy.asarray(part.prompt.ids[part.begin : part.end]) for part in parts]),
            "positions": positions,
            "slots": positions + numpy.repeat(regions - prefix, counts),
            "borders": borders,
            "regions": numpy.append(regions, 0),
            "used": ends - prefix,
            "last": borders[1:][whole] - 1,
            "rows": [parts[number].row for number in whole],
            "lengths": ends[whole],
            "starts": regions[whole],
        }
        if self.settings.batch_invariant:
            fill = self.chunk_tokens - int(borders[-1])
            fields, counts = self._filled(fields, fill), numpy.append(counts, fill)
            self.computed_tokens += fill
        sent = self._send(fields)
        packed = PackedTokens(
            slots=sent["slots"], query_starts=sent["borders"].int(), region_starts=sent["regions"].int(),
            used=sent["used"].int(), max_new=int(counts.max()), prefix=prefix,
            max_used=max(int(ends.max()) - prefix, int(counts.max())),
        )  # fmt: skip
        self.useful_tokens += int(borders[-1])
        if self.pad is None:
            self.computed_tokens += int(borders[-1])
            with head_on(self.model, sent["last"]):
                logits = self._forward(sent["ids"], sent["positions"], packed)
            answers_at = sent["lengths"]
        else:
            padded = self.pad([part.prompt for part in parts])
            logits, answers_at = self._forward_padded(padded, packed, sent["last"], sent["lengths"])
        if whole:
            self._begin(sent, logits, [parts[number].prompt.key for number in whole], answers_at)

    def _filled(self, fields: dict[str, Any], fill: int) -> dict[str, Any]:
        """A forward of the usual shape: one more sequence, whose tokens go to the slot that is nobody's."""
        import numpy

        nothing = numpy.zeros(fill, dtype=numpy.int64)
        more = {
            "ids": nothing + self.tokens.pad,
            "positions": nothing,
            "slots": nothing,
            "borders": [self.chunk_tokens],
            "used": [min(fill, self.arena.slots)],
            "last": numpy.zeros(self.rows - len(fields["last"]), dtype=numpy.int64),
            "regions": [0],
        }
        return {name: numpy.concatenate([one, more[name]]) if name in more else one for name, one in fields.items()}

    def _begin(
        self, sent: dict[str, torch.Tensor], logits: torch.Tensor, keys: Sequence[int], answers_at: torch.Tensor
    ) -> None:
        """The rows whose prompts are read, and their first tokens."""
        state, rows = self._state, sent["rows"]
        uniform = None
        if state.uniform is not None:
            noise = uniforms(self.settings.seed, keys, state.uniform.shape[1])
            state.uniform[rows] = noise.to(self.device)
            uniform = state.uniform[rows, 0]
        state.start[rows] = sent["starts"].int()
        state.used[rows] = (sent["lengths"] - self._prefix).int()
        state.position[rows] = answers_at
        state.step[rows] = 0
        state.done[rows] = False
        self._accept(rows, self._chosen(logits, uniform, len(keys)))

    def _read_prefix(self, prefix: Sequence[int]) -> None:
        """Read what all prompts share, once; it has the first region."""
        start = self._regions.take(len(prefix))
        if start is None:
            raise ValueError(f"a prefix of {len(prefix)} tokens does not fit into {self._regions.slots} slots")
        with torch.inference_mode():
            for begin in range(0, len(prefix), self.chunk_tokens):
                end = min(len(prefix), begin + self.chunk_tokens)
                positions = torch.arange(begin, end, device=self.device)
                numbers = torch.tensor([0, end - begin, start, start, end], dtype=torch.int32, device=self.device)
                packed = PackedTokens(
                    slots=positions + start, query_starts=numbers[:2], region_starts=numbers[2:4], used=numbers[4:],
                    max_new=end - begin, max_used=end,
                )  # fmt: skip
                with head_on(self.model, positions[:1] - begin):
                    self._forward(torch.tensor(prefix[begin:end], device=self.device), positions, packed)
        self._prefix = len(prefix)

    def _send(self, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Arrays of whole numbers on the device, in one copy."""
        import numpy

        arrays = [numpy.asarray(one, dtype=numpy.int64) for one in fields.values()]
        joined = torch.from_numpy(numpy.concatenate(arrays))
        if self.device.type == "cuda":
            joined = joined.pin_memory().to(self.device, non_blocking=True)
        return dict(zip(fields, joined.split([len(one) for one in arrays]), strict=True))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """Logits, [tokens that the head runs on, vocabulary]."""
        inputs: dict[str, Any] = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        if "cache_position" in self._parameters:  # before transformers 5
            inputs["cache_position"] = positions
        with self.arena.packed(self._text_config, packed), self._norms:
            output = self.model(**inputs, past_key_values=self.arena.cache, use_cache=True)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _forward_padded(
        self, prompts: PaddedPrompts, packed: PackedTokens, last: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits after each prompt's last token, the `last` without padding, and the positions of their answers.

        A model whose images take fewer positions than tokens says by how many, in `rope_deltas`.
        """
        inputs, kept = dict(prompts.inputs), prompts.kept
        mask, shape = inputs.get("attention_mask"), inputs["input_ids"].shape
        self.computed_tokens += shape.numel()
        images = any(isinstance(one, torch.Tensor) and one.shape != shape for one in inputs.values())
        if self._mrope is not None:
            self._mrope.rope_deltas = None
        if mask is not None and "position_ids" in self._parameters and not (images and self._mrope is not None):
            inputs.setdefault("position_ids", (mask.cumsum(dim=1) - 1).clamp_min(0))
        with self.arena.storing(dataclasses.replace(packed, kept=kept)), self._norms, head_on(self.model, kept[last]):
            output = self.model(**inputs, past_key_values=self.arena.cache, use_cache=True)
        deltas = None if self._mrope is None else self._mrope.rope_deltas
        logits: torch.Tensor = output.logits[0]
        return logits, lengths if deltas is None else lengths + deltas.flatten()

    def _step(self, size: int, *, left: int) -> None:
        """One token for the first `size` rows."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
            return
        self._decode(size)
        if self._captures and left >= MIN_STEPS_TO_CAPTURE:
            self._capture(size)

    def _decode(self, size: int) -> None:
        state = self._state
        packed = PackedTokens(
            slots=(state.start[:size] + state.used[:size]).long(),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=self.device),
            region_starts=state.start[: size + 1], used=state.used[:size] + 1,
            max_new=1, max_used=self.longest - self._prefix + self.settings.max_new_tokens, prefix=self._prefix,
        )  # fmt: skip
        logits = self._forward(state.token[:size], state.position[:size], packed)
        uniform = None
        if state.uniform is not None:
            step = state.step[:size].clamp_max(state.uniform.shape[1] - 1)
            uniform = state.uniform[:size].gather(1, step.unsqueeze(1)).squeeze(1)
        active = ~state.done[:size]
        state.position[:size] += active
        state.used[:size] += active
        self._accept(self._numbers[:size], self._chosen(logits, uniform, size))

    def _chosen(self, logits: torch.Tensor, uniform: torch.Tensor | None, rows: int) -> torch.Tensor:
        """The next tokens of the first rows; what fills a forward up is chosen from with them, in the same shape."""
        if uniform is not None:
            uniform = torch.nn.functional.pad(uniform, (0, logits.shape[0] - rows))
        return self._chooser.choose(logits, tokens=None, uniform=uniform)[:rows]

    def _accept(self, rows: torch.Tensor, chosen: torch.Tensor) -> None:
        """Take the next token of some rows; a finished row gets padding, in the last column."""
        state, most = self._state, self.settings.max_new_tokens
        done, step = state.done[rows], state.step[rows]
        chosen = torch.where(done, self.tokens.pad, chosen)
        state.produced[rows, torch.where(done, most, step)] = chosen
        state.token[rows] = chosen
        step = step + ~done
        state.step[rows] = step
        state.done[rows] = done | (chosen.unsqueeze(1) == self._ends).any(dim=1) | (step >= most)

    def _graph_size(self, rows: int) -> int:
        """The number of rows that steps run on, 8, 12, 16, 24, 32, …: a captured step serves many."""
        size = self.rows if self.settings.batch_invariant else SMALLEST_GRAPH
        while size < rows:
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        return min(size, self.rows)

    def _capture(self, size: int) -> None:
        try:
            if self._graph_pool is None:
                self._graph_pool = shared_pool(self.device)
            self._graphs[size] = capture(lambda: self._decode(size), self._graph_pool)
        except CaptureFailedError as error:
            self._captures = False
            self.notes.append(f"decode steps run without CUDA graphs: capturing one failed ({error})")

    def _collect(self) -> list[PoolAnswer]:
        """Read which rows have ended, and their tokens; fill the gaps with the last rows."""
        if self.stopped is not None:
            self._stop()
        done = self._state.done[: self._top].tolist()
        rows = [row for row, ended in enumerate(done) if ended and self._occupants[row] is not None]
        if not rows:
            return []
        index = torch.tensor(rows, device=self.device)
        produced, steps = self._state.produced[index].tolist(), self._state.step[index].tolist()
        self._state.vacate(index)
        answers = [self._leave(*one) for one in zip(rows, produced, steps, strict=True)]
        self._close_gaps()
        return answers

    def _leave(self, row: int, produced: list[int], steps: int) -> PoolAnswer:
        one = self._occupants[row]
        assert one is not None
        self._occupants[row] = None
        self._regions.give_back(one.start)
        self.useful_tokens += steps - 1
        ended = produced[steps - 1] in self.tokens.ends
        tokens = produced[: steps - ended]
        return PoolAnswer(key=one.key, tokens=tokens, ended=ended, shared_with=one.shared_with)

    def _stop(self) -> None:
        """End the answers that need no further token."""
        assert self.stopped is not None
        rows = [row for row, one in enumerate(self._occupants[: self._top]) if one is not None]
        index = torch.tensor(rows, device=self.device)
        steps = self._state.step[index].tolist()
        made = self._state.produced[index].tolist()
        ended = self.stopped([tokens[:count] for tokens, count in zip(made, steps, strict=True)])
        self._state.done[index] |= torch.tensor(ended, device=self.device)

    def _close_gaps(self) -> None:
        """Move the last rows into free ones, so that steps run on as few rows as there are sequences."""
        free = [row for row in range(self._top) if self._occupants[row] is None]
        held = [row for row in range(self._top) if self._occupants[row] is not None]
        moves = [(old, new) for old, new in zip(reversed(held), free, strict=False) if old > new]
        self._top = len(held)
        if not moves:
            return
        both = torch.tensor(moves, device=self.device)
        self._state.move(both[:, 0], both[:, 1])
        for old, new in moves:
            self._occupants[new], self._occupants[old] = self._occupants[old], None
