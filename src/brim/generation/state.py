"""The tensors of a batch or pool while it decodes, and a batch's answers on their way back to the host.

Fixed in size and place, so that a captured step can be replayed on them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from brim.generation.cache import Slots, make_cache
from brim.generation.settings import TokenIds

__all__ = ["Answers", "DecodeState", "PoolRows", "round_up"]

CAPACITY_STEP = 64  # slots are allocated in multiples of this


def round_up(value: int, step: int = CAPACITY_STEP) -> int:
    """The next multiple of `step`."""
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
        """Start a segment: the next key goes to `slot`; further rows are padding, and finished."""
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
        """Take the next token of every row; a finished row gets padding."""
        chosen = torch.where(self.finished, pad, chosen)
        self.produced.index_copy_(1, self.step, chosen.unsqueeze(1))
        self.token.copy_(chosen.unsqueeze(1))
        self.finished.logical_or_((chosen.unsqueeze(1) == ends).any(dim=1))
        self.step.add_(1)

    def advance(self) -> None:
        """The token's key is stored: move to the next slot and position."""
        self.slots.next.add_(1)
        self.position.add_(1)

    def noise(self) -> torch.Tensor | None:
        """This step's random number of each row, [rows]."""
        return None if self.uniform is None else self.uniform.index_select(1, self.step).squeeze(1)

    def carry_over(self, into: DecodeState, rows: torch.Tensor) -> None:
        """Copy the chosen rows, keys and values included, into a state with more slots."""
        count, held = rows.shape[0], self.capacity
        for old, new in zip(self.cache.layers, into.cache.layers, strict=True):
            if not old.is_initialized:  # a layer that shares another layer's keys and values
                continue
            new.lazy_initialization(old.keys, old.values)
            new.keys[:count, :, :held] = old.keys.index_select(0, rows)
            new.values[:count, :, :held] = old.values.index_select(0, rows)
            old.keys = old.values = None  # layer by layer, so that two copies never exist at once
        into.token[:count] = self.token.index_select(0, rows)
        into.position[:count] = self.position.index_select(0, rows)
        into.valid[:count, :held] = self.valid.index_select(0, rows)
        into.finished[:count] = False
        into.finished[count:] = True
        into.slots.next.copy_(self.slots.next)
        into.slots.decoding = True


class Answers:
    """The new tokens of every row, [rows, max_new_tokens], copied to the host without waiting until they are read."""

    def __init__(self, produced: torch.Tensor, tokens: TokenIds) -> None:
        self.tokens = tokens
        self._produced = produced
        self._host: torch.Tensor | None = None
        self._arrived: Any = None
        self._read: list[tuple[list[int], bool]] | None = None

    @classmethod
    def empty(cls, rows: int, max_new_tokens: int, tokens: TokenIds, device: torch.device) -> Answers:
        """Answers of which no token is written yet: all padding."""
        return cls(torch.full((rows, max_new_tokens), tokens.pad, dtype=torch.long, device=device), tokens)

    def write(self, rows: torch.Tensor, produced: torch.Tensor, *, at: int) -> None:
        """Write the tokens of a segment, from column `at`."""
        self._produced[rows, at : at + produced.shape[1]] = produced

    def written(self, rows: torch.Tensor, steps: int) -> torch.Tensor:
        """The first tokens of some rows, as written so far."""
        return self._produced[rows, :steps]

    def send(self, steps: int) -> None:
        """Start the copy to the host, without waiting."""
        part = self._produced[:, :steps]
        if part.device.type != "cuda":
            self._host = part
            return
        self._host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self._host.copy_(part, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(part.device))

    def token_lists(self) -> list[list[int]]:
        """The answers' tokens, cut before the end token; waits for the copy."""
        return [tokens for tokens, _ in self._rows()]

    def ended(self) -> list[bool]:
        """Which answers ended with an end token rather than at `max_new_tokens`."""
        return [ended for _, ended in self._rows()]

    def _rows(self) -> list[tuple[list[int], bool]]:
        """Every answer's tokens and whether it ended; computed on first use."""
        if self._read is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            assert self._host is not None, "send() was not called"
            self._read = [self._cut(row) for row in self._host.tolist()]
        return self._read

    def _cut(self, row: list[int]) -> tuple[list[int], bool]:
        for position, token in enumerate(row):
            if token in self.tokens.ends:
                return row[:position], True
        return row, False


@dataclasses.dataclass(kw_only=True)
class PoolRows:
    """What a step of a pool reads and writes of every row, at fixed addresses."""

    token: torch.Tensor  # [rows], the last token of each
    position: torch.Tensor  # [rows], its position in the text
    start: torch.Tensor  # [rows + 1], int32, the first slot of the row's region
    used: torch.Tensor  # [rows], int32, slots with a key
    step: torch.Tensor  # [rows], new tokens so far
    done: torch.Tensor  # [rows]
    produced: torch.Tensor  # [rows, max_new_tokens + 1]; the last column takes what finished rows write
    uniform: torch.Tensor | None  # [rows, max_new_tokens], the noise

    @classmethod
    def make(cls, rows: int, new_tokens: int, *, samples: bool, device: torch.device) -> PoolRows:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token=zeros(rows), position=zeros(rows), start=zeros(rows + 1, dtype=torch.int32),
            used=zeros(rows, dtype=torch.int32), step=zeros(rows), done=zeros(rows, dtype=torch.bool).fill_(True),
            produced=zeros(rows, new_tokens + 1),
            uniform=zeros(rows, new_tokens, dtype=torch.float32) if samples else None,
        )  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        return [one for one in vars(self).values() if one is not None]

    def vacate(self, rows: torch.Tensor) -> None:
        """Rows without a sequence write to the slot that is nobody's."""
        self.done[rows] = True
        self.start[rows] = 0
        self.used[rows] = 0

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put the sequences of some rows into others."""
        for tensor in self.tensors():
            tensor[new] = tensor[old]
        self.vacate(old)
