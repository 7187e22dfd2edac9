"""The device's memory with a model in it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from brim.memory.devices import DeviceMemory

__all__ = ["ModelMemory"]


class ModelMemory:
    """As the device's own memory, but the model's weights and buffers count in every reading and against the limit.

    On a GPU the allocator counts them anyway; on the CPU the meter has to be told that they are there.
    """

    def __init__(self, memory: DeviceMemory, module: Any) -> None:
        self._memory = memory
        self._module = module if isinstance(module, torch.nn.Module) else None

    def metered(self) -> contextlib.AbstractContextManager[Any]:
        """Measure what runs inside."""
        if self._module is None:
            return self._memory.metered()
        return self._memory.metered([*self._module.parameters(), *self._module.buffers()])

    def left_by_others_bytes(self) -> int | None:
        """What other processes leave of the device now; None: not known."""
        return self._memory.left_by_others_bytes()

    def release(self, *, thorough: bool = True) -> None:
        """Give back what nothing refers to any more."""
        self._memory.release(thorough=thorough)
