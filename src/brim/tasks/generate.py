"""Free answers: the model reads a prompt and writes until it ends, a stop string appears, or the tokens are used up."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.data.base import SampleSet
from brim.errors import RequestError, plural
from brim.generation.loop import CHECK_STEPS, PromptBatch
from brim.generation.select import Decoder, make_decoder
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.state import Answers
from brim.models.base import LoadedModel
from brim.running.executor import Pending
from brim.running.pooled import PoolSource
from brim.settings.caller import given, named, switched_off, written
from brim.tasks.base import Answer, LaterAnswers, Task, TaskSettings
from brim.tasks.image_pools import ImagePools, ImagePrompts
from brim.tasks.multimodal import MultimodalInputs
from brim.tasks.prompts import PromptWriter
from brim.tasks.text_pools import TextPools

__all__ = ["GenerateTask", "VqaTask"]

DEFAULT_NEW_TOKENS = 256
TOKENS_WITHOUT_TEXT = 8  # that may stand inside a stop string


class GenerateTask(Task):
    """Text in, text out; with a vision-language model, images and text in."""

    name = "generate"
    default_metrics = ("exact_match", "normalised_match", "token_f1")
    unit = "tokens"
    default_new_tokens = DEFAULT_NEW_TOKENS

    def __init__(self, model: LoadedModel, data: SampleSet, settings: TaskSettings) -> None:
        super().__init__(model, data, settings)
        if model.kind not in ("language", "seq2seq", "vision_language"):
            raise RequestError(
                f"{given('task', self.name)}: {model.name} is a {model.kind.replace('_', ' ')}, it does not write "
                f"text; use {written('task', 'classify')}, or a language model"
            )
        new_tokens = settings.max_new_tokens or self.default_new_tokens
        chosen = settings.generation or GenerationSettings(max_new_tokens=new_tokens)
        self.generation = dataclasses.replace(chosen, max_new_tokens=new_tokens)
        self._writer = PromptWriter(model.tokenizer, model.processor, settings)
        self._tokens = TokenIds.of(model.module.generation_config, model.tokenizer)
        self._lengths: list[int] = []
        self._ids: list[list[int]] = []
        self._multimodal: MultimodalInputs | None = None
        self._decoder: Decoder | None = None

    def setup(self) -> None:
        """Tokenise every prompt: batches are formed by their lengths."""
        missing = [sample.id for sample in self.samples if sample.prompt is None and not sample.images]
        if missing:
            raise RequestError(
                f"{given('task', self.name)}: {plural(len(missing), 'sample has', 'samples have')} no prompt (the "
                f"first is {missing[0]!r}); name the column with {written('map', 'prompt=COLUMN')}"
            )
        if self.model.kind == "vision_language":
            self._multimodal = MultimodalInputs(self.model, self.data, self._writer, self.settings)
            self._multimodal.notes = self.notes
            self._lengths = self._multimodal.lengths()
        else:
            if any(sample.images for sample in self.samples):
                self.notes.append(f"{self.model.name} reads no images: only the text of the samples is used")
            texts = [self._writer.text(sample.prompt or "") for sample in self.samples]
            self._ids = self._writer.token_ids(texts)
            self._lengths = [len(ids) for ids in self._ids]
        self._refuse_without_room()
        if self._writer.chat:
            self.notes.append(
                f"prompts are put into the model's chat template ({switched_off('chat')} leaves them as they are)"
            )

    def _refuse_without_room(self) -> None:
        """Refuse a request under which not even the shortest prompt and its answer fit the model's positions."""
        new, room, shortest = self.generation.max_new_tokens, self.model.positions, min(self._lengths, default=0)
        apart = self.model.kind == "seq2seq"  # encoder and decoder have separate positions
        if room is None or (max(shortest, new) if apart else shortest + new) <= room:
            return
        asked = given("max_tokens", new) + ("" if self.settings.max_new_tokens else " (the default)")
        largest = room if apart else room - shortest
        if shortest > room or largest < 1:
            raise RequestError(
                f"{named('data')}: the shortest prompt has {shortest} tokens and {self.model.name} has {room} "
                "positions, which leaves none for an answer; use shorter prompts or a model with more positions"
            )
        raise RequestError(
            f"{asked}: the shortest prompt has {shortest} tokens and {self.model.name} has {room} positions, so no "
            f"sample can run; use {given('max_tokens', largest)} or less"
        )

    def _without_room(self, item: int) -> str | None:
        """Why the prompt and its longest answer do not fit the model's positions; None if they do."""
        length, new, room = self._lengths[item], self.generation.max_new_tokens, self.model.positions
        if room is None:
            return None
        if self.model.kind == "seq2seq":  # prompt and answer apart
            if max(length, new) <= room:
                return None
            return f"the prompt has {length} tokens, the answer up to {new}; the model has {room} positions"
        if length + new <= room:
            return None
        return f"the prompt has {length} tokens; with {new} new ones that is more than the model's {room} positions"

    def _lengths_read(self) -> list[int]:
        """Tokens of each prompt as far as they are read; of one that does not fit, which will fail, none."""
        return [0 if self._without_room(item) else length for item, length in enumerate(self._lengths)]

    def cost(self, item: int) -> int:
        """Tokens of the prompt and of the longest answer."""
        return self._lengths[item] + self.generation.max_new_tokens

    def prepare(self, item: int) -> Any:
        """Token ids; for a vision-language model all inputs that its processor makes."""
        problem = self._without_room(item)
        if problem is not None:
            raise ValueError(problem)
        if self._multimodal is not None:
            return self._multimodal.prepare(item)
        if self._lengths[item] == 0:
            raise ValueError("the prompt has no tokens")
        return self._ids[item]

    def launch(self, items: Sequence[int], prepared: Sequence[Any]) -> Pending:
        """Start generating; the text is decoded and cut when its tokens are on the host."""
        decoder = self.decoder()
        seen: Sequence[Mapping[str, Any]] = [{}] * len(items)
        if self._multimodal is not None:
            seen = [self._multimodal.seen(item, one) for item, one in zip(items, prepared, strict=True)]
            inputs = self.to_device(self._multimodal.batch(items, prepared, device=self.joined_on))
            batch = PromptBatch(inputs=inputs, keys=items)
        else:
            batch = self._text_batch(items, prepared, decoder)
        answers = decoder.generate(batch)
        return LaterAnswers(lambda: self._read(answers, seen))

    def never_end(self) -> None:
        """From now on every answer uses all its tokens: the worst case, for a search."""
        self._tokens = TokenIds(ends=(), pad=self._tokens.pad)
        self._decoder = None

    def decoder(self) -> Decoder:
        """The decoder, chosen at the first batch."""
        if self._decoder is None:
            images = self.model.kind == "vision_language"
            longest = max(self._lengths_read(), default=0)
            settings = self.generation
            self._decoder = make_decoder(self.model.module, settings, self._tokens, images=images, longest=longest)
            if settings.stop_strings:
                self._decoder.stopped = self._stopped
            self.notes.extend(self._decoder.notes)
        return self._decoder

    def release(self) -> None:
        """Free keys, values and graphs."""
        if self._decoder is not None:
            self._decoder.release()

    def identity(self) -> Mapping[str, Any]:
        """The way prompts are written and answers chosen."""
        generation = dataclasses.asdict(self.generation)
        for how in ("graphs", "own_loop", "pool"):  # they change the speed, not the answers
            del generation[how]
        if not self.generation.batch_invariant:  # a run of before this setting can be resumed
            del generation["batch_invariant"]
        options = dict(self.settings.processor_options)
        return {"task": self.name, "chat": self._writer.chat, "system": self.settings.system, "options": options,
                "generation": generation}  # fmt: skip

    def pool_source(self) -> PoolSource | None:
        """Answers end one by one, where that is faster and a trial agrees with the model's own logits."""
        model, settings, tokens = self.model.module, self.generation, self._tokens
        stopped = self._stopped if settings.stop_strings else None
        source: TextPools
        if self._multimodal is not None:
            prompts = self._image_prompts(self._multimodal)
            source = ImagePools(model, settings, tokens, prompts=prompts, read=self._texts, stopped=stopped)
        else:
            source = TextPools(
                model, settings, tokens, prompts=self._ids, lengths=self._lengths_read(), read=self._texts,
                stopped=stopped,
            )  # fmt: skip
        obstacle = source.obstacle()
        if obstacle and settings.batch_invariant:
            raise RequestError(
                f"{named('batch_invariant')}: only answers that are generated in a pool are independent of the batch, "
                f"and these cannot be: {obstacle}"
            )
        if obstacle:
            self.notes.append(f"answers are made in whole batches, not in a pool, which is slower: {obstacle}")
        return source if obstacle is None else None

    def _image_prompts(self, inputs: MultimodalInputs) -> ImagePrompts:
        return ImagePrompts(
            lengths=self._lengths_read(),
            with_images=[bool(sample.images) for sample in self.samples],
            prepare=self.prepare,
            join=lambda items, prepared: inputs.batch(items, prepared, device=self.joined_on),
            send=self.to_device,
            seen=inputs.seen,
        )

    def _text_batch(self, keys: Sequence[int], ids: Sequence[Sequence[int]], decoder: Decoder) -> PromptBatch:
        """Token ids as one batch on the device, padded on the side that the decoder expects."""
        longest = max(len(row) for row in ids)
        pad = self.model.tokenizer.pad_token_id or 0
        right = decoder.padding == "right"
        fills = [[pad] * (longest - len(row)) for row in ids]
        rows = [[*row, *fill] if right else [*fill, *row] for row, fill in zip(ids, fills, strict=True)]
        tensors = {"input_ids": torch.tensor(rows, dtype=torch.long)}
        if right and self.model.kind != "seq2seq":
            tensors["lengths"] = torch.tensor([len(row) for row in ids], dtype=torch.long)
        else:
            masks = [[1] * len(row) + [0] * (longest - len(row)) for row in ids]
            tensors["attention_mask"] = torch.tensor(masks if right else [mask[::-1] for mask in masks])
        moved = self.to_device(tensors)
        return PromptBatch(lengths=moved.pop("lengths", None), inputs=moved, keys=keys)

    def _read(self, answers: Answers, seen: Sequence[Mapping[str, Any]]) -> list[Answer]:
        return self._texts(answers.token_lists(), answers.ended(), seen)

    def _texts(
        self, tokens: Sequence[list[int]], ended: Sequence[bool], seen: Sequence[Mapping[str, Any]]
    ) -> list[Answer]:
        """Answers from their tokens."""
        texts = self.model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [self._answer(*one) for one in zip(texts, tokens, ended, seen, strict=True)]

    def _answer(self, text: str, tokens: list[int], ended: bool, details: Mapping[str, Any]) -> Answer:
        cut = self._stop_at(text)
        if cut is None:
            return Answer(prediction=text.strip(), tokens=len(tokens), truncated=not ended, details=details)
        return Answer(prediction=text[:cut].strip(), tokens=self._tokens_to_stop(tokens), details=details)

    def _stopped(self, answers: list[list[int]]) -> list[bool]:
        """Which answers contain a stop string; what follows it would be cut off.

        This is asked every few tokens, so the last ones are decoded; an answer seems complete by them, or is by all.
        """
        bytes_of_stops = max(len(stop.encode()) for stop in self.generation.stop_strings)  # a token has one or more
        last = 2 * CHECK_STEPS + bytes_of_stops + TOKENS_WITHOUT_TEXT  # two, where a segment ends between two checks
        decode = functools.partial(self.model.tokenizer.batch_decode, skip_special_tokens=True)
        seems = [self._stop_at(text) is not None for text in decode([tokens[-last:] for tokens in answers])]
        whole = iter(decode([tokens for tokens, complete in zip(answers, seems, strict=True) if complete]))
        return [complete and self._stop_at(next(whole)) is not None for complete in seems]

    def _stop_at(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((place for stop in self.generation.stop_strings if (place := text.find(stop)) >= 0), default=None)

    def _tokens_to_stop(self, tokens: list[int]) -> int:
        """How many tokens it took until a stop string was complete: the answer's length if it had ended there."""

        def stopped(count: int) -> bool:
            text = self.model.tokenizer.decode(tokens[:count], skip_special_tokens=True)
            return self._stop_at(text) is not None

        return bisect.bisect_left(range(len(tokens)), True, key=stopped)


class VqaTask(GenerateTask):
    """As `generate`, but answers are a few words: 16 new tokens by default (99.9 % have at most 9)."""

    name = "vqa"
    default_metrics = ("vqa_accuracy", "vqa_accuracy_simple", "exact_match")
    default_new_tokens = 16
