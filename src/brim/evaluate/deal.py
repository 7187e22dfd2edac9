"""Samples dealt to ranks so that all finish together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from brim.ranks.world import World

__all__ = ["deal"]


def deal(items: Sequence[int], costs: Sequence[int], world: World) -> list[int]:
    """This rank's share, dearest first: like cards, dealt to and fro, so that no rank gets every round's dearest.

    Every item goes to exactly one rank, whatever the number of ranks; none is repeated to fill a round.
    """
    ordered = sorted(items, key=lambda item: -costs[item])
    share = []
    for place, item in enumerate(ordered):
        row, column = divmod(place, world.size)
        owner = column if row % 2 == 0 else world.size - 1 - column
        if owner == world.rank:
            share.append(item)
    return share
