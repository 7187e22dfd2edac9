"""Samples sharded over ranks or workers so that all finish together. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["shard_by_cost", "shards_in_rounds"]

ROUNDS = 4


def shard_by_cost(items: Sequence[int], costs: Sequence[int], shards: int) -> list[list[int]]:
    """So many lists of items, costliest first: each item goes to the shard whose total cost is smallest so far.

    Every item is in exactly one shard, whatever their number; none is repeated to make the shards even. Their total
    costs differ by at most that of the costliest item. The same on every rank.
    """
    sharded: list[list[int]] = [[] for _ in range(shards)]
    totals = [(0, shard) for shard in range(shards)]  # a heap
    for item in sorted(items, key=lambda item: -costs[item]):
        total, shard = totals[0]
        sharded[shard].append(item)
        heapq.heapreplace(totals, (total + costs[item], shard))
    return sharded


def shards_in_rounds(items: Sequence[int], costs: Sequence[int], workers: int, *, smallest: int = 1) -> list[list[int]]:
    """Shards for whichever worker is free next, in this order: large and costly ones first, small ones last.

    Each round has a shard for every worker and half of the remaining cost, the last round all of it. So batches are
    large at first, and at the end a slow worker, or the loss of one, keeps the others waiting only briefly. A round
    that would leave less than `smallest` items for each worker is the last, because every shard ends with a batch that
    is not full.
    """
    ordered = sorted(items, key=lambda item: -costs[item])
    shards: list[list[int]] = []
    for later in range(ROUNDS - 1, -1, -1):
        wanted = sum(costs[item] for item in ordered) / 2
        taken = total = 0
        while taken < len(ordered) and total < wanted:
            total += costs[ordered[taken]]
            taken += 1
        if later == 0 or len(ordered) - taken < smallest * workers:
            taken = len(ordered)
        shards += [shard for shard in shard_by_cost(ordered[:taken], costs, workers) if shard]
        ordered = ordered[taken:]
    return shards
