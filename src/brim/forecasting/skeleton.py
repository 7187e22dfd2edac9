"""Building a model for its shapes alone: no time is spent on the values of its weights, and hardly any memory.

A forecast never looks at a weight. Inside `without_initialisation` the functions of `torch.nn.init` do nothing, and
large tensors that are to be filled with random numbers are left as they are: the system gives them memory only when it
is written to, so a model of 13 B parameters is built in a tenth of a second on a laptop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["without_initialisation"]

# From this size on the C library maps fresh pages, which read as zeros; smaller tensors may hold what was there
# before, and some ways to initialise draw again until every value is in range.
MAPPED_BYTES = 32 * 2**20


class _LeaveLargeTensors(TorchDispatchMode):
    """Skips random fills of large tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        aten = torch.ops.aten
        self._fills = {aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.random_.to}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._fills and args[0].untyped_storage().nbytes() >= MAPPED_BYTES:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave weights that are made inside the block as they come; nothing stays changed after it."""
    names = [
        name
        for name, value in vars(torch.nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(value)
    ]
    functions = vars(torch.nn.init)
    kept = {name: functions[name] for name in names}
    try:
        functions.update(dict.fromkeys(names, _left))
        with _LeaveLargeTensors():
            yield
    finally:
        functions.update(kept)


def _left(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
