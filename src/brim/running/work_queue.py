"""Items that wait for their batch, costliest first, so that a lack of memory shows at once.

A batch weighs its padded cost: every item is padded to the costliest among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["WorkQueue", "padded_cost"]


def padded_cost(costs: Iterable[int], *, packed: bool = False) -> int:
    """The cost of a batch of items with these costs: every item is padded to the costliest, unless they are packed."""
    listed = list(costs)
    return sum(listed) if packed else len(listed) * max(listed, default=0)


class WorkQueue:
    """Items still to do, costliest first; batches that must be run as they are come before the rest."""

    def __init__(
        self, costs: Sequence[int], items: Iterable[int], *, by_count: bool = False, packed: bool = False
    ) -> None:
        self._costs = costs
        self._by_count = by_count  # the cap counts items
        self._packed = packed
        self._waiting = deque(sorted(items, key=lambda item: -costs[item]))  # equal costs keep the caller's order
        self._parts: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._parts)

    def take(self, cap: int) -> list[int]:
        """The next batch: as many items as stay within the cap in padded cost, at least one."""
        if self._parts:
            return self._parts.pop()
        if self._packed and not self._by_count:
            return self._take_sum(cap)
        costliest = 1 if self._by_count else self._costs[self._waiting[0]]
        count = max(cap // max(costliest, 1), 1)
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def _take_sum(self, cap: int) -> list[int]:
        taken = [self._waiting.popleft()]
        room = cap - self._costs[taken[0]]
        while self._waiting and self._costs[self._waiting[0]] <= room:
            taken.append(self._waiting.popleft())
            room -= self._costs[taken[-1]]
        return taken

    def put_back(self, batch: Sequence[int]) -> None:
        """Return a batch that was not done; its items are next, in the same order, under whatever cap holds then."""
        self._waiting.extendleft(reversed(batch))

    def add(self, items: Iterable[int]) -> None:
        """More items, each in its place among those that wait."""
        self._waiting = deque(sorted([*items, *self._waiting], key=lambda item: -self._costs[item]))

    def bring_cheapest(self) -> None:
        """Have the cheapest item run next, alone."""
        if self._waiting:
            self._parts.append([self._waiting.pop()])

    def split(self, batch: Sequence[int]) -> None:
        """Have a batch run again as two halves of its own, to find the item that spoils it."""
        middle = len(batch) // 2
        self._parts += [list(batch[middle:]), list(batch[:middle])]
