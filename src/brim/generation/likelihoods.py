"""Log-likelihoods of continuations, each token that several of them share read once.

    scorer = SharedContexts(model, prefix=tokens_of_every_question)
    scores = scorer.scores([question, ...])     # [continuations]
    scores, misses = scorer.scores_and_misses([question, ...])      # and how many tokens are not the likeliest

A question is the options of one context. All questions may begin with the same tokens (examples, an instruction): keys
and values of those are computed once and kept. A question's own context is read once for all its options: contexts and
what the options add to them are packed into one row without padding, and a token attends to the prefix, to its
question's context and to its own option in parts that are merged by their log-sum-exp. The head runs only where a
likelihood is read. Knows nothing of text, tasks or files.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from brim.generation.arena import KeyPart, TokenGroups, flash_works_on, head_on, packed_attention
from brim.generation.norms import fused_norms
from brim.generation.select import mixing_obstacle
from brim.generation.trial import logit_difference, trial_prompts

__all__ = [
    "OptionRows",
    "SharedContexts",
    "joined_by_context",
    "log_likelihood",
    "saves_enough",
    "shared_contexts_obstacle",
    "shared_prefix",
    "shared_tokens",
]

Row = TypeVar("Row", list[int], tuple[int, ...])

MIN_SHARED_PREFIX = 128  # tokens; a shorter prefix is not worth attention in two parts
MIN_SAVED_FRACTION = 0.25  # of the tokens; for less, padded rows and their faster attention do
CHECK_PREFIX = 4  # tokens that the questions of a trial share
MIN_CPU_PARAMETERS = 3_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionRows:
    """Options as whole rows of tokens, and how many of each row's last tokens are scored."""

    rows: Sequence[list[int]]
    scored: Sequence[int]

    @functools.cached_property
    def shared(self) -> int:
        """Tokens that all rows begin with, of those that are read: a row's last token is scored only."""
        return shared_tokens([row[:-1] for row in self.rows])

    @functools.cached_property
    def most_prefix(self) -> int:
        """How many tokens may be known before: one is read before the options part, and all that scores are read at."""
        return min(self.shared, *(len(row) - scored for row, scored in zip(self.rows, self.scored, strict=True))) - 1

    def tokens_to_read(self, prefix: int) -> int:
        """Tokens of a forward, once the prefix is known."""
        shared = self.shared
        return shared - prefix + sum(map(len, {tuple(row[shared:-1]) for row in self.rows}))


def shared_prefix(rows: Sequence[Row], *, most: int) -> int:
    """How many tokens, `most` at most, to read once for all rows; 0 where attention in two parts is not worth it."""
    prefix = min(shared_tokens(rows), most) if len(rows) > 1 else 0
    return prefix if prefix >= MIN_SHARED_PREFIX else 0


def saves_enough(tokens: int, *, unshared: int) -> bool:
    """Whether to read `tokens` with sharing, instead of so many without."""
    return tokens <= (1 - MIN_SAVED_FRACTION) * unshared


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Neighbours:
    """Rows that are read together, of those in order: what they share, and all their tokens, without the prefix."""

    first: int
    last: int
    shared: int
    tokens: int

    def joined(self, after: _Neighbours, common: int) -> _Neighbours:
        """With those after it, of which all share `common` tokens."""
        tokens = self._tokens_sharing(common) + after._tokens_sharing(common) - common
        return _Neighbours(first=self.first, last=after.last, shared=common, tokens=tokens)

    def _tokens_sharing(self, common: int) -> int:
        return self.tokens + (self.last - self.first) * (self.shared - common)


def joined_by_context(rows: Sequence[Row], *, prefix: int, most_tokens: int) -> list[list[int]]:
    """The numbers of rows that are read together, because reading what they share once saves enough of their tokens.

    Rows begin with `prefix` tokens that are known already. Those that share most are joined first: options of one
    question, then questions behind the same examples; a group of several rows reads `most_tokens` at most.
    """
    order = sorted(range(len(rows)), key=lambda number: array.array("i", rows[number]).tobytes())  # alike: neighbours
    lengths = [len(rows[number]) - prefix for number in order]
    alone = [_Neighbours(first=at, last=at, shared=length, tokens=length) for at, length in enumerate(lengths)]
    begins, ends = dict(enumerate(alone)), dict(enumerate(alone))  # groups by their first and last row
    common = [shared_tokens([rows[one], rows[other]]) - prefix for one, other in itertools.pairwise(order)]
    for border in sorted(range(len(common)), key=lambda border: -common[border]):
        before, after = ends[border], begins[border + 1]
        both = before.joined(after, common[border])
        saved = before.tokens + after.tokens - both.tokens
        if saved >= max(MIN_SAVED_FRACTION * min(before.tokens, after.tokens), 1) and both.tokens <= most_tokens:
            del ends[before.last], begins[after.first]
            begins[both.first] = ends[both.last] = both
    return [order[group.first : group.last + 1] for group in begins.values()]


def shared_tokens(rows: Sequence[Row]) -> int:
    """With how many equal tokens the rows begin."""
    first, last = min(rows), max(rows)  # all others begin as both do
    counts = range(1, min(len(first), len(last)) + 1)
    return bisect.bisect_left(counts, True, key=lambda count: first[:count] != last[:count])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packed:
    """One forward: contexts end to end, then what the options add, in the same order."""

    ids: list[int]
    positions: list[int]
    borders: list[int]  # of contexts, then of options
    contexts: int  # of the sequences
    option_borders: list[int]  # by question, counted from the first option
    places: list[int]  # of the tokens that a scored token follows
    owners: list[int]  # the row of each scored token
    targets: list[int]


def _pack(questions: Sequence[OptionRows], prefix: int) -> _Packed:
    shared = [question.shared for question in questions]
    ids: list[int] = []
    positions: list[int] = []
    borders = [0]
    starts = []  # of each question's context
    for question, length in zip(questions, shared, strict=True):
        starts.append(len(ids))
        ids += question.rows[0][prefix:length]
        positions += range(prefix, length)
        borders.append(len(ids))
    context_tokens = len(ids)
    option_borders = [0]
    places: list[int] = []
    owners: list[int] = []
    targets: list[int] = []
    row_number = 0
    for question, length, start in zip(questions, shared, starts, strict=True):
        read: dict[tuple[int, ...], int] = {}  # where what an option adds begins: some differ in their last token only
        for row, scored in zip(question.rows, question.scored, strict=True):
            added = tuple(row[length:-1])
            own = read.setdefault(added, len(ids))
            if added and own == len(ids):
                ids += added
                positions += range(length, len(row) - 1)
                borders.append(len(ids))
            for place in range(len(row) - scored, len(row)):
                before = place - 1
                places.append(start + before - prefix if before < length else own + before - length)
            owners += [row_number] * scored
            targets += row[len(row) - scored :]
            row_number += 1
        option_borders.append(len(ids) - context_tokens)
    return _Packed(
        ids=ids, positions=positions, borders=borders, contexts=len(questions), option_borders=option_borders,
        places=places, owners=owners, targets=targets,
    )  # fmt: skip


class _Keys:
    """What the tokens of one forward attend to: their own sequence, the prefix, and options to their contexts."""

    def __init__(self, packed: _Packed, prefix: Sequence[tuple[torch.Tensor, torch.Tensor]], device: Any) -> None:
        borders = torch.tensor(packed.borders, dtype=torch.int32)
        lengths, count = borders.diff(), packed.contexts
        own = torch.tensor(packed.option_borders, dtype=torch.int32)
        counts = own.diff()
        # Questions whose options have tokens: where none has several, flash attention takes each to have one.
        asking = counts.nonzero().squeeze(1).tolist()
        fields = [borders, lengths, own[[0, *(one + 1 for one in asking)]], borders[[*asking, count]], lengths[asking]]
        sent = torch.cat(fields).to(device).split([len(field) for field in fields])
        longest = int(lengths.max())
        self._own = TokenGroups(
            query_starts=sent[0], region_starts=sent[0], used=sent[1], max_new=longest, max_used=longest
        )
        self._options = int(borders[count])  # the first token of an option
        self._contexts = TokenGroups(
            query_starts=sent[2], region_starts=sent[3], used=sent[4], max_new=int(counts.max()),
            max_used=int(lengths[:count].max()),
        )  # fmt: skip
        self._prefix = prefix
        self._over_prefix = None
        if prefix:
            self._over_prefix = TokenGroups.one(
                len(packed.ids), start=0, used=prefix[0][0].shape[0], device=sent[0].device
            )

    def parts(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[KeyPart]:
        """Of one attention layer."""
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [tokens, kv_heads, head_dim]
        found = [KeyPart(keys=keys, values=values, tokens=self._own, causal=True)]
        if self._over_prefix is not None:
            before = self._prefix[layer.layer_idx]
            found.append(KeyPart(keys=before[0], values=before[1], tokens=self._over_prefix, causal=False))
        if self._options < query.shape[0]:
            found.append(KeyPart(keys=keys, values=values, tokens=self._contexts, causal=False, first=self._options))
        return found


class SharedContexts:
    """Scores continuations with one causal model; `prefix` are the tokens with which every row begins.

    Every question has at least one token of its own before its options part.
    """

    def __init__(self, model: Any, *, prefix: Sequence[int] = ()) -> None:
        self.model, self.prefix = model, list(prefix)
        self.device = next(model.parameters()).device
        self._text_config = model.config.get_text_config(decoder=True)
        self._takes_cache_position = "cache_position" in inspect.signature(model.forward).parameters
        self._norms = fused_norms(model)
        self._prefix_keys: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def scores(self, questions: Sequence[OptionRows]) -> torch.Tensor:
        """The log-likelihood of every row's scored tokens, [rows], on the device."""
        logits, owners, targets = self._read(questions)
        return _summed(log_likelihood(logits, targets), owners, questions)

    @torch.inference_mode()
    def scores_and_misses(self, questions: Sequence[OptionRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and how many of every row's scored tokens are not the likeliest, [rows]."""
        logits, owners, targets = self._read(questions)
        misses = (logits.argmax(dim=-1) != targets).long()
        return _summed(log_likelihood(logits, targets), owners, questions), _summed(misses, owners, questions)

    def release(self) -> None:
        """Free the keys and values of the prefix; they are computed again when they are needed."""
        self._prefix_keys = []

    def _read(self, questions: Sequence[OptionRows]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_logits`, with the keys and values of the prefix computed where they are not there."""
        if self.prefix and not self._prefix_keys:
            self._prefix_keys = self._read_prefix()
        return self._logits(_pack(questions, len(self.prefix)))

    def _logits(self, packed: _Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits where a scored token follows, [scored tokens, vocabulary], the rows of those tokens and themselves."""
        fields = [packed.ids, packed.positions, packed.places, packed.owners, packed.targets]
        joined = torch.tensor([number for field in fields for number in field])
        if self.device.type == "cuda":
            joined = joined.pin_memory().to(self.device, non_blocking=True)
        ids, positions, places, owners, targets = joined.split([len(field) for field in fields])
        inputs = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        if self._takes_cache_position:  # before transformers 5
            inputs["cache_position"] = positions
        keys = _Keys(packed, self._prefix_keys, self.device)
        with packed_attention(self._text_config, keys), self._norms, head_on(self.model, places):
            logits: torch.Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits, owners, targets

    def _read_prefix(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the prefix by layer, [tokens, kv_heads, head_dim], by the model's own attention."""
        ids = torch.tensor([self.prefix], device=self.device)
        with head_on(self.model, torch.zeros(1, dtype=torch.long, device=self.device)), self._norms:
            cache = self.model(input_ids=ids, use_cache=True).past_key_values
        return [
            (layer.keys[0].transpose(0, 1).contiguous(), layer.values[0].transpose(0, 1).contiguous())
            for layer in cache.layers
        ]


def _summed(values: torch.Tensor, owners: torch.Tensor, questions: Sequence[OptionRows]) -> torch.Tensor:
    """Values of scored tokens, by row."""
    rows = sum(len(question.rows) for question in questions)
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add_(0, owners, values)


def log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of targets [tokens] under logits [tokens, vocabulary]."""
    logits = logits.float()
    chosen: torch.Tensor = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def shared_contexts_obstacle(model: Any, *, longest: int) -> str | None:
    """Why a model cannot score this way: "" where it would not pay, else its configuration or a trial; None if it can.

    It pays on a GPU with flash attention. On the CPU attention goes sequence by sequence, which pays where the rest of
    the model is much more work.
    """
    parameter = next(model.parameters())
    if parameter.device.type == "cpu":
        if sum(one.numel() for one in model.parameters()) < MIN_CPU_PARAMETERS:
            return ""
    elif not flash_works_on(parameter.device, parameter.dtype):
        return ""
    obstacle = mixing_obstacle(model, longest)
    return _trial(model) or None if obstacle is None else obstacle


@torch.inference_mode()
def _trial(model: Any) -> str:
    """How the logits of two questions with two options each differ from the model's own, each option alone."""
    device = next(model.parameters()).device
    some, more = (prompt.tolist() for prompt in trial_prompts(model, device))
    prefix = more[:CHECK_PREFIX]
    questions = [
        OptionRows(rows=[[*prefix, *some, *more], [*prefix, *some, *reversed(more)]], scored=[3, len(more)]),
        OptionRows(rows=[[*prefix, *more, *some], [*prefix, *more, some[0] + 1, *some]], scored=[2, 3]),
    ]

    def trials() -> Iterator[tuple[torch.Tensor, Any]]:
        scorer = SharedContexts(model, prefix=prefix)
        scorer._prefix_keys = scorer._read_prefix()
        ours, _, _ = scorer._logits(_pack(questions, len(prefix)))
        rows = [row for question in questions for row in question.rows]
        counts = [scored for question in questions for scored in question.scored]
        for found, row, scored in zip(ours.float().split(counts), rows, counts, strict=True):
            ids = torch.tensor([row], device=device)
            yield found, lambda ids=ids, scored=scored: model(input_ids=ids).logits[0, -scored - 1 : -1].float()

    return logit_difference(model, trials)
