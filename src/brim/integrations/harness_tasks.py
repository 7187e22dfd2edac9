"""What a harness asks of a language model, as tasks of an evaluation: continuations to score, prompts to continue.

Both come as token ids, and prompts with images as text; how they are made is the harness's matter. Answers are the
harness's too: of scores a log-likelihood and whether greedy decoding writes the same, of prompts the text before the
first stop string.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from brim.data.base import ImageFile, Sample, SampleSet
from brim.errors import RequestError
from brim.generation.arena import head_on
from brim.generation.likelihoods import (
    OptionRows,
    SharedContexts,
    joined_by_context,
    saves_enough,
    shared_prefix,
)
from brim.generation.settings import GenerationSettings, TokenIds
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.settings.caller import pair
from brim.tasks.base import Answer, LaterAnswers, Task, TaskSettings, padded
from brim.tasks.generate import GenerateTask
from brim.tasks.multimodal import MultimodalInputs
from brim.tasks.prompts import PromptWriter

__all__ = [
    "ContinueTask",
    "PicturePrompt",
    "PicturesTask",
    "RowGroups",
    "ScoreTask",
    "ScoredRow",
    "Writing",
    "generation_options",
    "numbered",
    "rows_that_share",
]

Tokens = tuple[int, ...]

SMALL_GROUP_TOKENS = 512  # so many a group may read, however short its rows are


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """What the model reads, and the continuations to score after it.

    Of a causal model the row ends before the last token of its continuations: those that differ in that token alone
    share a row. Of an encoder-decoder the row is what the encoder reads, with one continuation.
    """

    tokens: Tokens
    continuations: tuple[Tokens, ...]

    def options(self) -> tuple[list[list[int]], list[int]]:
        """Of a causal model: every continuation's whole row, and how many of its last tokens are scored."""
        return [[*self.tokens, one[-1]] for one in self.continuations], [len(one) for one in self.continuations]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Rows by what they share: the tokens that all begin with, and the numbers of those that are read together."""

    prefix: Tokens
    groups: list[list[int]]


def rows_that_share(rows: Sequence[ScoredRow]) -> RowGroups | None:
    """What rows of a causal model share; None where reading it once would save too little. The same on every rank.

    A group reads at most twice the tokens of the longest row: where that row fits alone, most groups do.
    """
    if len(rows) < 2:
        return None
    read = [row.tokens for row in rows]
    prefix = shared_prefix(read, most=min(len(row.tokens) - _places(row) for row in rows))
    most = max(2 * max(map(len, read)), SMALL_GROUP_TOKENS)
    groups = joined_by_context(read, prefix=prefix, most_tokens=most)
    tokens = prefix + sum(_question([rows[number] for number in group]).tokens_to_read(prefix) for group in groups)
    if not saves_enough(tokens, unshared=sum(map(len, read))):
        return None
    return RowGroups(prefix=rows[0].tokens[:prefix], groups=groups)


def _question(rows: Sequence[ScoredRow]) -> OptionRows:
    options = [row.options() for row in rows]
    return OptionRows(
        rows=[row for lines, _ in options for row in lines], scored=[count for _, counts in options for count in counts]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
    """How answers are written: up to which text, of how many tokens, and chosen how."""

    max_new_tokens: int
    until: tuple[str, ...] = ()
    end_text: str = ""  # of the end token, which a model may also write with other tokens
    temperature: float = 0.0
    top_p: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()  # of transformers' generation configuration
    think_end: str | int | None = None  # the answer begins after this text or token

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, so that a repeated request has an answer of its own."""
        return self.temperature > 0


def numbered(name: str, count: int) -> SampleSet:
    """Items without content of their own, as samples: the tasks here know them by their number."""
    samples = tuple(Sample(id=str(number)) for number in range(count))
    return SampleSet(name=name, format="requests", samples=samples, suggested_task="generate")


class ScoreTask(Task):
    """The log-likelihood of every continuation of a row, and whether each of its tokens is the likeliest.

    An item is a row, or with `shared` a group of rows, whose answers then follow each other.
    """

    name = "loglikelihood"
    unit = "tokens"
    default_metrics = ()

    def __init__(
        self,
        model: LoadedModel,
        rows: Sequence[ScoredRow],
        settings: TaskSettings,
        *,
        shared: RowGroups | None = None,
    ) -> None:
        groups = [[number] for number in range(len(rows))] if shared is None else shared.groups
        super().__init__(model, numbered(self.name, len(groups)), settings)
        self._rows = [[rows[number] for number in group] for group in groups]
        self._shared: SharedContexts | None = None
        if shared is not None:
            self._shared = SharedContexts(model.module, prefix=shared.prefix)
            self.packs = True

    def cost(self, item: int) -> int:
        """The tokens that are read."""
        if self._shared is not None:
            return _question(self._rows[item]).tokens_to_read(len(self._shared.prefix))
        (row,) = self._rows[item]
        return len(row.tokens) + (len(row.continuations[0]) if self.model.kind == "seq2seq" else 0)

    def prepare(self, item: int) -> Sequence[ScoredRow]:
        """The item's rows."""
        return self._rows[item]

    def launch(self, items: Sequence[int], prepared: Sequence[Sequence[ScoredRow]]) -> Pending:
        """One forward over all rows."""
        del items
        if self._shared is not None:
            sums, misses = self._shared.scores_and_misses([_question(rows) for rows in prepared])
        else:
            rows = [row for group in prepared for row in group]
            logits_of = self._seq2seq_logits if self.model.kind == "seq2seq" else self._causal_logits
            with torch.inference_mode():
                sums, misses = _scores(logits_of(rows), rows)

        def read() -> list[Answer]:
            scores = iter(zip(sums.tolist(), misses.tolist(), strict=True))
            found = [[next(scores) for row in rows for _ in row.continuations] for rows in prepared]
            return [Answer(prediction=[[value, missed == 0] for value, missed in rows]) for rows in found]

        return LaterAnswers(read)

    def release(self) -> None:
        """Free the keys and values of what all rows begin with."""
        if self._shared is not None:
            self._shared.release()

    def identity(self) -> Mapping[str, Any]:
        """A size found for groups is not one for padded rows."""
        return {**super().identity(), **({} if self._shared is None else {"shared": True})}

    def shown_input(self, item: int) -> Any:
        """Nothing: the harness has the text."""
        del item

    def _causal_logits(self, rows: Sequence[ScoredRow]) -> torch.Tensor:
        """Logits at the places that the continuations are read off, [places, vocabulary]: of each row its last ones."""
        ids = padded([row.tokens for row in rows], self.model.tokenizer.pad_token_id or 0)
        ends = [number * ids.shape[1] + len(row.tokens) for number, row in enumerate(rows)]
        place = [spot for row, end in zip(rows, ends, strict=True) for spot in range(end - _places(row), end)]
        moved = self.to_device({"ids": ids, "place": torch.tensor(place)})
        # Padded on the right, so that a causal model needs no mask: nothing attends to what comes after it.
        with head_on(self.model.module, moved["place"]):
            logits: torch.Tensor = self.model.module(input_ids=moved["ids"], use_cache=False).logits[0]
        return logits

    def _seq2seq_logits(self, rows: Sequence[ScoredRow]) -> torch.Tensor:
        """Logits of every token of the continuations, [places, vocabulary]."""
        continuations = [row.continuations[0] for row in rows]
        tensors = {
            "input_ids": padded([row.tokens for row in rows], self.model.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(row.tokens) for row in rows], 0),
            "labels": padded(continuations, -100),
        }
        moved = self.to_device(tensors)
        logits: torch.Tensor = self.model.module(**moved).logits  # [rows, longest continuation, vocabulary]
        return logits[moved["labels"] >= 0]


def _places(row: ScoredRow) -> int:
    return max(map(len, row.continuations))


def _scores(logits: torch.Tensor, rows: Sequence[ScoredRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every continuation the sum of its tokens' log-likelihoods, and how many of them are not the likeliest."""
    owner: list[int] = []
    place: list[int] = []
    target: list[int] = []
    start = number = 0
    for row in rows:
        end = start + _places(row)  # every continuation ends with the row
        for continuation in row.continuations:
            owner += [number] * len(continuation)
            place += range(end - len(continuation), end)
            target += continuation
            number += 1
        start = end
    device = logits.device
    owners, places, targets = (torch.tensor(numbers, device=device) for numbers in (owner, place, target))
    likeliest = logits.argmax(dim=-1)[places]
    logits = logits.float()
    values = logits[places, targets] - logits.logsumexp(dim=-1)[places]
    sums = torch.zeros(number, device=device).index_add_(0, owners, values)
    misses = torch.zeros(number, dtype=torch.long, device=device)
    return sums, misses.index_add_(0, owners, (likeliest != targets).long())


class ContinueTask(GenerateTask):
    """Continues prompts until a stop string, as the harness cuts answers: white space stays, what was thought goes."""

    name = "generate_until"

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[list[int]],
        writing: Writing,
        settings: TaskSettings,
        *,
        data: SampleSet | None = None,
    ) -> None:
        chosen = dataclasses.replace(
            settings.generation or GenerationSettings(max_new_tokens=1),
            temperature=writing.temperature,
            top_p=writing.top_p,
            stop_strings=tuple(stop for stop in writing.until if stop),
        )
        settings = dataclasses.replace(settings, generation=chosen, max_new_tokens=writing.max_new_tokens)
        super().__init__(model, numbered(self.name, len(prompts)) if data is None else data, settings)
        self.writing = writing
        self._ids = list(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        self._stops = (*self.generation.stop_strings, *([writing.end_text] if writing.end_text else []))
        own, last = self._tokens, model.tokenizer.eos_token_id
        ends = dict.fromkeys((*own.ends, *([] if last is None else [last])))
        # An end token that is text stays in the answer, as transformers' generate leaves it: it is a stop, not an end.
        self._text_ends = frozenset(
            token for token in ends if model.tokenizer.decode([token], skip_special_tokens=True)
        )
        self._tokens = TokenIds(ends=tuple(token for token in ends if token not in self._text_ends), pad=own.pad)

    def setup(self) -> None:
        """Nothing: prompts come as tokens."""

    def shown_input(self, item: int) -> Any:
        """Nothing: the harness has the text."""
        del item

    def identity(self) -> Mapping[str, Any]:
        """As of `generate`, with what is set of the generation configuration."""
        return {**super().identity(), "configured": dict(self.writing.options)}

    def _texts(
        self, tokens: Sequence[list[int]], ended: Sequence[bool], seen: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Answer]:
        """Answers from their tokens."""
        del seen
        return [self._cut_answer(one, end) for one, end in zip(tokens, ended, strict=True)]

    def _stopped(self, answers: list[list[int]]) -> list[bool]:
        """Which answers contain a stop string; some stop strings are special tokens."""
        return [self._has_stop(answer) for answer in answers]

    def _has_stop(self, tokens: list[int]) -> bool:
        if not self._text_ends.isdisjoint(tokens):
            return True
        text = self.model.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self._stops)

    def _cut_answer(self, tokens: list[int], ended: bool) -> Answer:
        if stopped := self._has_stop(tokens):
            count = bisect.bisect_left(
                range(len(tokens)), True, key=lambda count: self._has_stop(tokens[:count])
            )  # at which the first stop string is complete
            tokens = tokens[:count]
        return Answer(prediction=self._answer_text(tokens), tokens=len(tokens), truncated=not (ended or stopped))

    def _answer_text(self, tokens: list[int]) -> str:
        """The text without what was thought before it, up to the first stop string."""
        think_end = self.writing.think_end
        if isinstance(think_end, int) and think_end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(think_end) :]
        text: str = self.model.tokenizer.decode(tokens, skip_special_tokens=True)
        if isinstance(think_end, int):
            text = text.lstrip()
        elif think_end:
            text = text.split(think_end)[-1].lstrip()
        for stop in self._stops:
            text = text.split(stop)[0]
        return text


@dataclasses.dataclass(frozen=True)
class PicturePrompt:
    """A text with a placeholder for each image, as the model's processor reads it, and the images in their order.

    Two prompts of the same `key` are the same, whatever objects they hold.
    """

    key: str
    text: str = dataclasses.field(compare=False)
    images: tuple[ImageFile, ...] = dataclasses.field(default=(), compare=False)


class _AsWritten(PromptWriter):
    """Prompts that are written already; those of a chat template contain their special tokens."""

    def __init__(self, model: LoadedModel, *, templated: bool) -> None:
        super().__init__(model.tokenizer, model.processor, TaskSettings(chat=False))
        self.chat = templated

    def text(self, prompt: str, *, images: int = 0) -> str:
        """As it is."""
        del images
        return prompt


class PicturesTask(ContinueTask):
    """Continues prompts with images, by a vision-language model."""

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[PicturePrompt],
        writing: Writing,
        settings: TaskSettings,
        *,
        templated: bool,
    ) -> None:
        samples = tuple(
            Sample(id=str(number), prompt=prompt.text, images=prompt.images) for number, prompt in enumerate(prompts)
        )
        data = SampleSet(name=self.name, format="requests", samples=samples, suggested_task="generate")
        super().__init__(model, [], writing, settings, data=data)
        self._multimodal = MultimodalInputs(model, data, _AsWritten(model, templated=templated), settings)
        self._multimodal.notes = self.notes
        self._lengths = self._multimodal.lengths()
        self._refuse_too_long()

    def _refuse_too_long(self) -> None:
        """Before anything is computed: an answer that has no room would be missing at the end."""
        room, new, longest = self.model.positions, self.writing.max_new_tokens, max(self._lengths, default=0)
        if room is None or longest + new <= room:
            return
        most = room - longest
        remedy = f"use {pair('gen_kwargs', 'max_new_tokens', most)} or less" if most > 0 else "leave it out"
        raise RequestError(
            f"{pair('gen_kwargs', 'max_new_tokens', new)}: the longest prompt has {longest} tokens with its images, "
            f"and the model {room} positions, which leaves no room for such an answer; {remedy}"
        )


@contextlib.contextmanager
def generation_options(module: Any, options: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """While inside, the model's generation configuration has these values."""
    usual = module.generation_config
    if options:
        module.generation_config = copy.deepcopy(usual)
        for name, value in options:
            setattr(module.generation_config, name, value)
    try:
        yield
    finally:
        module.generation_config = usual
