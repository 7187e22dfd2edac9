"""The tensors of a batch while it decodes: fixed in size and place, so that a captured step can be replayed on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from brim.generation.cache import Slots, make_cache

__all__ = ["DecodeState", "round_up"]

CAPACITY_STEP = 64  # slots are allocated in multiples of this


def round_up(value: int, step: int = CAPACITY_STEP) -> int:
    """The next multiple."""
    return -(-value // step) * step


@dataclasses.dataclass
class DecodeState:
    """Room for `rows` sequences of `capacity` slots, of which `segment` are for tokens yet to come."""

    rows: int
    capacity: int
    segment: int
    slots: Slots
    cache: Any
    token: torch.Tensor  # [rows, 1], the last token of each row
    position: torch.Tensor  # [rows, 1], its position in the row's own text
    valid: torch.Tensor  # [rows, capacity], 0 where a slot holds padding
    finished: torch.Tensor  # [rows]
    produced: torch.Tensor  # [rows, segment], the tokens of this segment
    uniform: torch.Tensor | None  # [rows, segment], the noise of this segment
    step: torch.Tensor  # [1], how many tokens of the segment are there
    logits: torch.Tensor | None = None  # [rows, vocabulary], where a captured step leaves them
    graph: Any = None

    @classmethod
    def make(
        cls, *, layers: int, rows: int, capacity: int, segment: int, samples: bool, device: torch.device
    ) -> DecodeState:
        """Empty buffers; keys and values are allocated when the first prompt is read."""
        slots = Slots(capacity, device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            rows=rows,
            capacity=capacity,
            segment=segment,
            slots=slots,
            cache=make_cache(layers, rows, slots),
            token=zeros(rows, 1),
            position=zeros(rows, 1),
            valid=torch.ones(rows, capacity, dtype=torch.long, device=device),
            finished=torch.zeros(rows, dtype=torch.bool, device=device),
            produced=zeros(rows, segment),
            uniform=torch.zeros(rows, segment, device=device) if samples else None,
            step=zeros(1),
        )

    def begin(self, *, slot: int, position: torch.Tensor, valid: torch.Tensor) -> None:
        """Start a segment: the next key goes to `slot`; the rows beyond `position`'s are padding and finished."""
        rows = position.shape[0]
        self.slots.next.fill_(slot)
        self.step.zero_()
        self.position[:rows, 0] = position
        self.position[rows:] = 0
        self.valid.fill_(1)
        self.valid[:rows, : valid.shape[1]] = valid
        self.finished[:rows] = False
        self.finished[rows:] = True

    def accept(self, chosen: torch.Tensor, ends: torch.Tensor, pad: int) -> None:
        """Take the next token of every row; a finished row goes on with padding."""
        chosen = torch.where(self.finished, pad, chosen)
        self.produced.index_copy_(1, self.step, chosen.unsqueeze(1))
        self.token.copy_(chosen.unsqueeze(1))
        self.finished.logical_or_((chosen.unsqueeze(1) == ends).any(dim=1))
        self.step.add_(1)

    def advance(self) -> None:
        """The token's key is stored: the next one goes a slot and a position further."""
        self.slots.next.add_(1)
        self.position.add_(1)

    def noise(self) -> torch.Tensor | None:
        """This step's number of each row, [rows]."""
        return None if self.uniform is None else self.uniform.index_select(1, self.step).squeeze(1)

    def carry_over(self, into: DecodeState, rows: torch.Tensor) -> None:
        """Copy the chosen rows, keys and values included, into a state with room for more."""
        count, held = rows.shape[0], self.capacity
        for old, new in zip(self.cache.layers, into.cache.layers, strict=True):
            if not old.is_initialized:  # a layer that reads another's keys and values
                continue
            new.lazy_initialization(old.keys, old.values)
            new.keys[:count, :, :held] = old.keys.index_select(0, rows)
            new.values[:count, :, :held] = old.values.index_select(0, rows)
            old.keys = old.values = None  # layer by layer, so that both copies never stand side by side
        into.token[:count] = self.token.index_select(0, rows)
        into.position[:count] = self.position.index_select(0, rows)
        into.valid[:count, :held] = self.valid.index_select(0, rows)
        into.finished[:count] = False
        into.finished[count:] = True
        into.slots.next.copy_(self.slots.next)
        into.slots.decoding = True
