"""Going back to the beginning of a window: random generators and buffers, so that it can be run again.

Weights and optimizer state do not change within a window, and gradients are zeroed; what else a forward changes is the
random generators and the buffers. Running statistics are copied at every mark. Of other buffers (tables, masks, which
may be large) only those that the first window changed, or that torch has counted a write to since: it counts all writes
but those of its own normalisation layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from brim.memory.snapshot import StateSnapshot

__all__ = ["Rewinder"]

_NORMALISATION = nn.modules.batchnorm._NormBase


class Rewinder:
    """Marks a moment, and goes back to it as often as asked.

    rewinder.mark()
    ...                  # forwards and backwards, perhaps cut short
    rewinder.rewind()    # as at the mark
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._moving = {place for place, (module, _) in enumerate(self._places) if isinstance(module, _NORMALISATION)}
        self._compared = False
        self._versions: list[int] = []
        self._held: list[torch.Tensor] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._rng: StateSnapshot | None = None

    def mark(self) -> None:
        """Remember the present moment."""
        first = not self._versions
        self._moving |= self._changed()
        self._rng = StateSnapshot.take()  # of nothing but the random generators
        self._held = list(self._buffers())
        self._versions = [buffer._version for buffer in self._held]
        kept = range(len(self._held)) if first else sorted(self._moving)
        self._copies = {place: self._held[place].detach().clone() for place in kept}

    def rewind(self) -> None:
        """Back to the mark: the same objects in their places, with the bytes that they had."""
        assert self._rng is not None, "rewind() before mark()"
        with torch.no_grad():
            for place, (module, name) in enumerate(self._places):
                module._buffers[name] = self._held[place]
                if place in self._copies:
                    self._held[place].copy_(self._copies[place])
        self._rng.restore()

    def moving(self) -> list[int]:
        """The places of buffers that some window has been seen to change."""
        self._moving |= self._changed()
        return sorted(self._moving)

    def buffers_at(self, places: Iterable[int]) -> list[torch.Tensor]:
        """The buffers at these places, as they are now."""
        buffers = list(self._buffers())
        return [buffers[place] for place in places]

    def _changed(self) -> set[int]:
        """The places of buffers that were written to, or replaced, since the mark."""
        changed = zip(self._buffers(), self._held, self._versions, strict=False)
        found = {
            place for place, (now, held, version) in enumerate(changed) if now is not held or now._version != version
        }
        if self._held and not self._compared:  # after the first window, when there is a copy of everything
            self._compared = True
            buffers = list(self._buffers())
            found |= {place for place, copy in self._copies.items() if not torch.equal(buffers[place], copy)}
        return found

    def _buffers(self) -> Iterable[torch.Tensor]:
        for module, name in self._places:
            buffer = module._buffers[name]
            assert buffer is not None
            yield buffer
