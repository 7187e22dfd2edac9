"""The AUROC of a whole stack of runs without leaving the device."""

from __future__ import annotations

import torch

__all__ = ["stacked_auroc"]


def stacked_auroc(inner: torch.Tensor, outer: torch.Tensor) -> list[float]:
    """The AUROC of each run from energies `[runs, n]` and `[runs, m]`; ties count one half, counted in whole numbers.

    Runs with an energy that is no number come out as nan.
    """
    inner, outer = inner.float() if inner.dtype.itemsize < 4 else inner, outer.to(inner.dtype)
    ordered = inner.sort(-1).values.contiguous()
    outer = outer.to(ordered.dtype).contiguous()
    below = torch.searchsorted(ordered, outer).sum(-1)
    not_above = torch.searchsorted(ordered, outer, right=True).sum(-1)
    known = ~(inner.isnan().any(-1) | outer.isnan().any(-1))
    twice = 2 * inner.shape[-1] * outer.shape[-1]
    wins = zip((below + not_above).tolist(), known.tolist(), strict=True)
    return [won / twice if good else float("nan") for won, good in wins]
