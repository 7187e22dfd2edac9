"""One batch of a loop of one's own: a block that may run out of memory, and the memory that it has.

The block's error is caught where the block ends, in `__exit__`; what follows from it is decided by whoever gives the
next batch (`batches.py`), when no traceback pins the failed block's tensors any more.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from brim.errors import RequestError
from brim.memory.failures import Failure, FailureKind, classify, without_tracebacks

__all__ = ["BatchAttempt", "BlockMemory"]

_SMALLER_HELPS = (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT, FailureKind.AMBIGUOUS)


class BatchAttempt:
    """One batch of `brim.batches`: a context manager that gives its data, and survives running out of memory.

    `with batch as data:` around everything that the loop does with it. What the block did before it failed stays done,
    so keep results at its end.
    """

    def __init__(self, data: Any, indices: Sequence[int], memory: BlockMemory) -> None:
        self.indices = tuple(indices)  # the places of its samples in the data set
        self.entered = False
        self.done = False  # its block has ended without an error
        self.failure: Failure | None = None  # why its samples come again, in smaller batches
        self.error: Exception | None = None
        self.seconds = 0.0
        self.reading: Any = None
        self._data = data
        self._memory = memory
        self._block = contextlib.ExitStack()
        self._started = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> NoReturn:
        """Taken for its data, as in `for images, labels in …`."""
        raise RequestError("a batch is not its data yet: write `with batch as data:` inside the loop")

    def __enter__(self) -> Any:
        if self.entered:
            raise RequestError("a batch is entered once: its block has ended, and the loop gives the next one")
        self.entered = True
        data, self._data = self._data, None
        self.reading = self._block.enter_context(self._memory.watched(data))
        self._started = time.perf_counter()
        return data

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Whether the error is one that smaller batches may not have: then it ends here."""
        if error is None:
            self._wait()
            self.seconds = time.perf_counter() - self._started
        try:
            self._block.__exit__(kind, error, trace)
        except Exception as changed:  # a limit's refusal, which a library had passed on as an error of its own
            error = changed
        if not isinstance(error, Exception):
            self.done = error is None
            return False
        failure = classify(error)
        alone = len(self.indices) == 1 and failure.kind is FailureKind.AMBIGUOUS
        if failure.kind not in _SMALLER_HELPS or alone:
            return False
        self.failure = failure
        self.error = without_tracebacks(error)
        return True

    def _wait(self) -> None:
        try:
            self._memory.drain()
        except BaseException as error:  # Ctrl-C most often lands here, and the limit must not outlive the block
            self._block.__exit__(type(error), error, error.__traceback__)
            raise


class BlockMemory:
    """The memory of the device that blocks run on: limited, measured and waited for, as far as that was asked for."""

    def __init__(self, memory: Any, *, limit_bytes: int | None, metered: bool) -> None:
        self.memory = memory
        self.timed = True  # whether the next block's time decides on a size
        self._limit_bytes = limit_bytes  # as named
        self._metered = metered and memory is not None

    @contextlib.contextmanager
    def watched(self, data: Any) -> Iterator[Any]:
        if not self._metered:
            yield None
            return
        limited = contextlib.nullcontext() if self._limit_bytes is None else self.memory.limited(self._limit_bytes)
        with limited, self.memory.metered(_tensors(data)) as reading:
            yield reading

    def drain(self) -> None:
        """Wait for the device, where the time is needed: a settled size is not held up."""
        if self.memory is not None and self.timed:
            self.memory.timed(_nothing, repeats=1)

    def left_by_others(self) -> int | None:
        left: int | None = None if self.memory is None else self.memory.left_by_others_bytes()
        return left

    def release(self) -> None:
        if self.memory is not None:
            self.memory.release()


def _tensors(data: Any) -> list[Any]:
    """The tensors of a batch, which are in memory before its block begins."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    if isinstance(data, torch.Tensor):
        return [data]
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _nothing() -> None:
    pass
