"""Prompts with images in a generation pool: read by the model's own forward, a few at a time, answered one by one.

How many tokens a prompt has is an estimate until it is prepared. A pool is therefore sized by estimates, and takes each
prompt by what it really has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from brim.generation.arena import ALIGNMENT
from brim.generation.loop import Padding
from brim.generation.pool import PaddedPrompts, PoolPrompt
from brim.generation.select import mixing_obstacle, pool_obstacle
from brim.generation.settings import GenerationSettings, TokenIds
from brim.generation.trial import PaddedTrial
from brim.sizing.pool import PoolSize
from brim.tasks.text_pools import ReadAnswers, TextPool, TextPools

__all__ = ["ImagePools", "ImagePrompts"]

NUMBERS_PER_TOKEN = 4 * 3 * 14 * 14  # of pixels that count as a token in a chunk: four patches of a usual vision tower
TRIED = 3  # samples of a kind in a trial, one read alone and two together …
MOST_PREPARED = 8  # … of so many that may have to be prepared
SPARE = 3  # columns of padding in a trial, where prompts may happen to be of one length


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePrompts:
    """A task's prompts with images: what is known of them, and how they become inputs of the model."""

    lengths: Sequence[int]  # tokens, by estimate; 0 for those that are never read
    with_images: Sequence[bool]
    prepare: Callable[[int], Mapping[str, Any]]
    join: Callable[[Sequence[int], Sequence[Mapping[str, Any]]], dict[str, Any]]  # one batch; ids are on the host
    send: Callable[[Mapping[str, Any]], dict[str, Any]]  # to the device
    seen: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]  # what is reported of its images

    def pool_prompt(self, item: int, prepared: Mapping[str, Any]) -> PoolPrompt:
        """A prepared sample as the pool takes it."""
        mask = prepared["attention_mask"][0].bool()
        floats = (one for one in prepared.values() if isinstance(one, torch.Tensor) and one.is_floating_point())
        return PoolPrompt(
            ids=prepared["input_ids"][0][mask].tolist(), key=item, inputs=prepared,
            weight=sum(one.numel() for one in floats) // NUMBERS_PER_TOKEN, kind=frozenset(prepared),
        )  # fmt: skip

    def pad(self, prompts: Sequence[PoolPrompt], *, side: Padding, spare: int = 0) -> PaddedPrompts:
        """Prompts as one batch of the model's own inputs; on the right `spare` columns are added to it."""
        batch = self.join([prompt.key for prompt in prompts], [prompt.inputs for prompt in prompts])
        if batch["attention_mask"].sum(dim=1).tolist() != [len(prompt.ids) for prompt in prompts]:
            raise ValueError("the processor makes prompts of other lengths together than one by one")
        if side == "right":
            batch = _moved_left(batch, spare)
        mask = batch.pop("attention_mask") if side == "right" else batch["attention_mask"]
        places = self.send({"kept": mask.flatten().nonzero().squeeze(1)})
        return PaddedPrompts(inputs=self.send(batch), kept=places["kept"])


def _moved_left(batch: Mapping[str, Any], spare: int) -> dict[str, Any]:
    """A batch with its padding behind the tokens."""
    mask = batch["attention_mask"]
    order = (1 - mask).argsort(dim=1, stable=True)  # [rows, length]: tokens first

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
            return value
        return torch.nn.functional.pad(value.gather(1, order), (0, spare))

    return {name: moved(value) for name, value in batch.items()}


class ImagePools(TextPools):
    """Pools for a task's prompts with images."""

    def __init__(
        self, model: Any, settings: GenerationSettings, tokens: TokenIds, *, prompts: ImagePrompts, read: ReadAnswers,
        stopped: Callable[[list[list[int]]], list[bool]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, settings, tokens, lengths=prompts.lengths, read=read, stopped=stopped)
        self.images = prompts
        self.portion = self.first_slots
        self.side: Padding = "right"

    def open(self, size: PoolSize) -> ImagePool:
        """An empty pool."""
        return ImagePool(self, size)

    def lengthen(self, longest: int) -> None:
        """A prompt is longer than any was thought to be: what the configuration rules out is looked up again."""
        if longest <= self.longest:
            return
        self.longest = longest
        obstacle = mixing_obstacle(self.model, longest + self.settings.max_new_tokens, positions_read=True)
        if obstacle is not None:
            raise ValueError(f"a prompt has {longest:,} tokens, more than expected: {obstacle}")

    def _obstacle(self, *, prefix: bool) -> str | None:
        """On the right if a trial agrees: then attention needs no mask. Otherwise on the left, as processors pad."""
        del prefix  # none is shared
        if self.settings.batch_invariant:
            return "prompts with images are read in forwards of many shapes"
        prompts = functools.cache(self._trial_prompts)
        why = self._trial_on("right", prompts)
        if why is not None:
            self.side = "left"
            why = self._trial_on("left", prompts)
        return why

    def _trial_on(self, side: Padding, prompts: Callable[[], list[list[PoolPrompt]]]) -> str | None:
        pad = functools.partial(self.images.pad, side=side, spare=SPARE)
        trial = PaddedTrial(prompts=prompts, pad=pad, own=lambda prompt: self.images.send(prompt.inputs))
        return pool_obstacle(self.model, self.settings, self.tokens, longest=self.longest, padded=trial)

    def _trial_prompts(self) -> list[list[PoolPrompt]]:
        """The shortest prompts with images, and without, where there are such."""
        kinds = []
        for wanted in (True, False):
            items = [
                item for item, images in enumerate(self.images.with_images) if images == wanted and self.lengths[item]
            ]
            shortest = sorted(items, key=lambda item: self.lengths[item])[:MOST_PREPARED]
            kinds.append(list(itertools.islice(self._prepared(shortest), TRIED)))
        return [kind for kind in kinds if kind]

    def _prepared(self, items: Sequence[int]) -> Iterator[PoolPrompt]:
        for item in items:
            with contextlib.suppress(Exception):  # it is that sample's failure when its turn comes
                yield self.images.pool_prompt(item, self.images.prepare(item))


class ImagePool(TextPool):
    """A generation pool over prompts with images."""

    def __init__(self, source: ImagePools, size: PoolSize) -> None:
        super().__init__(source, size)
        self._images = source
        self._pool.pad = functools.partial(source.images.pad, side=source.side)
        self._seen: dict[int, Mapping[str, Any]] = {}

    def admit(self, items: Sequence[int], prepared: Sequence[Any]) -> int:
        """Read prompts as far as there is room; an empty pool makes room for at least one."""
        images = self._images.images
        prompts = [images.pool_prompt(item, one) for item, one in zip(items, prepared, strict=True)]
        if not prompts:
            return 0
        self._images.lengthen(max(len(prompt.ids) for prompt in prompts))
        least = ALIGNMENT + self._pool.slots_of(len(prompts[0].ids))
        if not self.active and least > self.slots:
            self._pool.grow(least)
        admitted = self._pool.admit(prompts)
        for item, one in zip(items[:admitted], prepared, strict=False):
            self._seen[item] = images.seen(item, one)
        return admitted

    def details(self, item: int) -> Mapping[str, Any]:
        """What was seen of its images."""
        return self._seen.pop(item)
