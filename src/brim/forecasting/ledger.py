"""The ledger of a trace: which blocks of memory are held, since when, and what for.

Knows nothing of operations or of what CUDA would do; it is given what is taken, notices what is released, and turns
both into events at the end.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable

import torch

from brim.forecasting.events import OUTSIDE, Category, Event
from brim.forecasting.torch_private import storage_address

__all__ = ["Block", "Ledger"]


class Block:
    """A block of memory; whatever is on it holds this object, and when the last one is gone so is the block."""

    __slots__ = ("_ledger", "number")

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger = ledger
        self.number = number

    def __del__(self) -> None:
        self._ledger.give_back(self.number)

    def is_in(self, ledger: Ledger) -> bool:
        """Whether it was taken there."""
        return self._ledger is ledger


class Ledger:
    """Numbers blocks as they are taken.

    Those that were there before the first step (`resident`) come first in the events, in whatever order a step
    happens to touch them. `owner` says to which module a block belongs that is taken now.
    """

    def __init__(self, owner: Callable[[], str] = lambda: OUTSIDE) -> None:
        self._owner = owner
        self.held = 0  # blocks that something still holds, also after the end
        self.pool = 0  # of the blocks to come: 1 while a CUDA graph would be captured
        self._closed = False
        self._bytes: list[int] = []  # of each block
        self._ops: list[str] = []
        self._pools: list[int] = []
        self._owners: list[str] = []
        self._labels: dict[int, Category] = {}
        self._resident: list[int] = []
        self._log: list[int] = []  # block + 1 taken, -(block + 1) given back
        self._backward_starts: list[int] = []  # positions in the log
        self._steps: list[int] = []
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}  # of real tensors, by address

    def take(self, nbytes: int, op: str) -> Block | None:
        """Take a block now; None for no bytes, for which torch does not call its allocator."""
        if nbytes == 0 or self._closed:
            return None
        number = self._number(nbytes, op)
        self._log.append(number + 1)
        return Block(self, number)

    def take_resident(self, nbytes: int, label: Category, owner: str | None = None) -> Block | None:
        """A block that was there before the first step."""
        if nbytes == 0 or self._closed:
            return None
        number = self._number(nbytes, "")
        self._resident.append(number)
        self._labels[number] = label
        if owner is not None:
            self._owners[number] = owner
        return Block(self, number)

    def give_back(self, number: int) -> None:
        """The block's last holder is gone."""
        self.held -= 1
        if not self._closed:
            self._log.append(-(number + 1))

    def bind(self, storage: torch.UntypedStorage, block: Block) -> None:
        """Let a real storage hold a block for as long as it lives."""
        address: int = storage_address(storage)
        storages = self._storages

        def gone(_: object) -> None:
            storages.pop(address, None)

        storages[address] = (weakref.ref(storage, gone), block)

    def bound(self, storage: torch.UntypedStorage) -> Block | None:
        """The block that a real storage holds."""
        held = self._storages.get(storage_address(storage))
        return None if held is None else held[1]

    def label(self, block: Block | None, category: Category, owner: str | None = None) -> None:
        """Say what a block is for, and whose it is; the first label stays."""
        if block is None or block.number in self._labels:
            return
        self._labels[block.number] = category
        if owner is not None:
            self._owners[block.number] = owner

    def op_of(self, block: Block | None) -> str:
        """The operation that took a block."""
        return "" if block is None else self._ops[block.number]

    def begin_step(self) -> None:
        """A step begins."""
        self._steps.append(len(self._log))

    @property
    def steps(self) -> int:
        """How many steps have begun."""
        return len(self._steps)

    def begin_backward(self) -> None:
        """A backward begins: what is held from before it is kept for it."""
        self._backward_starts.append(len(self._log))

    def repeat_first_step(self) -> dict[int, int] | None:
        """Log the first step again as the second, which has begun; the state that it made for an optimizer stays.

        The new position of every event that is repeated; None, and nothing is logged, where the first step kept
        something else for later ones, or gave back what was there before it.
        """
        first, second = self._steps[:2]
        entries = self._log[first:second]
        taken = {entry for entry in entries if entry > 0}
        kept = {entry: self._labels.get(entry - 1) for entry in taken - {-entry for entry in entries}}
        older = [entry for entry in entries if entry < 0 and -entry not in taken]
        if older or not set(kept.values()) <= {"optimizer", "gradients"}:
            return None
        copies: dict[int, int] = {}  # block of the first step: that of the second
        positions: dict[int, int] = {}
        for position, entry in enumerate(entries, start=first):
            positions[position] = len(self._log)
            if entry < 0:
                self._log.append(-(copies[-entry - 1] + 1))
            elif kept.get(entry) != "optimizer":
                copies[entry - 1] = self._copied(entry - 1)
                self._log.append(copies[entry - 1] + 1)
        self._backward_starts += [positions[start] for start in self._backward_starts if first <= start < second]
        return positions

    def position(self) -> int:
        """Where the next event will stand; `index_of` makes an index of it once all resident blocks are known."""
        return len(self._log)

    def close(self) -> None:
        """Notice nothing any more."""
        self._closed = True
        self._storages.clear()

    def events(self) -> tuple[Event, ...]:
        """All events in order, each with its category."""
        categories = self._categories()
        entries = [*(number + 1 for number in self._resident), *self._log]
        return tuple(
            Event(
                "alloc" if entry > 0 else "free",
                number := abs(entry) - 1,
                self._bytes[number],
                categories[number],
                self._ops[number],
                self._pools[number],
                self._owners[number],
            )
            for entry in entries
        )

    def index_of(self, position: int) -> int:
        """The index among the events of a position."""
        return len(self._resident) + position

    def step_starts(self) -> tuple[int, ...]:
        """The index of the first event of each step."""
        return tuple(self.index_of(position) for position in self._steps)

    def _number(self, nbytes: int, op: str) -> int:
        self._bytes.append(nbytes)
        self._ops.append(op)
        self._pools.append(self.pool)
        self._owners.append(self._owner())
        self.held += 1
        return len(self._bytes) - 1

    def _copied(self, number: int) -> int:
        for column in (self._bytes, self._pools):
            column.append(column[number])
        for texts in (self._ops, self._owners):
            texts.append(texts[number])
        copy = len(self._bytes) - 1
        if number in self._labels:
            self._labels[copy] = self._labels[number]
        return copy

    def _categories(self) -> list[Category]:
        """Labels where there are any; else whether a block outlived the start of a backward that it preceded."""
        came = {entry - 1: position for position, entry in enumerate(self._log) if entry > 0}
        went = {-entry - 1: position for position, entry in enumerate(self._log) if entry < 0}
        starts, end = self._backward_starts, len(self._log)
        categories: list[Category] = []
        for number in range(len(self._bytes)):
            label = self._labels.get(number)
            if label is None:
                following = bisect.bisect_right(starts, came.get(number, 0))
                kept = following < len(starts) and starts[following] <= went.get(number, end)
                label = "activations" if kept or not starts else "temporary"
            categories.append(label)
        return categories
