"""Samples dealt to those who evaluate them, so that all finish together. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["deal", "deal_in_rounds"]

ROUNDS = 4


def deal(items: Sequence[int], costs: Sequence[int], hands: int) -> list[list[int]]:
    """One list per hand, dearest first: each item goes to whoever has least so far.

    Every item goes to exactly one hand, whatever their number; none is repeated to even the hands out. The hands
    differ by at most the dearest item. The same on every rank.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    lightest = [(0, hand) for hand in range(hands)]
    for item in sorted(items, key=lambda item: -costs[item]):
        weight, hand = lightest[0]
        dealt[hand].append(item)
        heapq.heapreplace(lightest, (weight + costs[item], hand))
    return dealt


def deal_in_rounds(items: Sequence[int], costs: Sequence[int], workers: int, *, smallest: int = 1) -> list[list[int]]:
    """Shares to be handed to whichever worker is free, in this order: large and dear ones first, small ones last.

    Each round has a share for every worker and half of the cost that is left, the last all of it. So batches are
    large at first, and at the end a slow worker, or the loss of one, keeps the others waiting for little. A round
    that would leave less than `smallest` items for each worker is the last: every share ends with a batch that is
    not full.
    """
    ordered = sorted(items, key=lambda item: -costs[item])
    shares: list[list[int]] = []
    for later in range(ROUNDS - 1, -1, -1):
        wanted = sum(costs[item] for item in ordered) / 2
        taken = weight = 0
        while taken < len(ordered) and weight < wanted:
            weight += costs[ordered[taken]]
            taken += 1
        if later == 0 or len(ordered) - taken < smallest * workers:
            taken = len(ordered)
        shares += [share for share in deal(ordered[:taken], costs, workers) if share]
        ordered = ordered[taken:]
    return shares
