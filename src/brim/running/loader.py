"""The loader: items prepared ahead of need, in worker processes, in the order in which they will be asked for.

It hands out single items, not batches: a batch that is split or made smaller after an out-of-memory error is put
together again from what is here already. What one item's preparation raises is that item's failure. Processes are
torch's own (`DataLoader`); with no workers an item is prepared when it is asked for. Items may come through memory that
is shared once, and pinned where a GPU reads from it (`memory/pinned_shared_pool.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from brim.errors import BrimError
from brim.monitor.host import free_shared_bytes, own_cores
from brim.settings.sizes import format_bytes

if TYPE_CHECKING:
    from brim.memory.pinned_shared_pool import Packed, PinnedSharedPool

__all__ = ["Loader", "LoaderSettings", "NotPrepared", "Order", "suggest_workers"]

CHEAP_SECONDS = 0.002  # an item prepared in less is not worth a process …
CHEAP_SECONDS_BESIDE_GPU = 0.0005  # … or in less than this, where a GPU computes: it waits while the host prepares
MOST_WORKERS = 16
TRIAL_SECONDS = 0.5  # items that take longer want as many processes as there are, whatever the next one takes
SHARE_OF_SHM = 0.8  # of what is free
KEPT_BYTES = 1 << 29  # that a loading process keeps for itself at most
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
MANY_CORES = 4
AHEAD_BYTES = 1 << 28  # of items that are to be ahead
MOST_AHEAD = 64  # in one process: each takes a file descriptor or two
ITEMS_PER_SECOND = 1500.0  # what a fast device may ask for, if the machine has the cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How items are prepared; None: chosen by a short measurement."""

    num_workers: int | None = None
    pin_memory: bool = True
    prefetch_factor: int = 4  # items that each process prepares ahead
    ahead: int = 0  # items that all of them prepare ahead, if that is more and they are small
    item_bytes: int | None = None  # of the tensors of a usual item
    # Whether items may lie in a pool whose slots are written again once they are done: "for_device" where a GPU copies.
    pool: Literal["for_device", "always", "never"] = "for_device"


class Order(Protocol):
    """Items as they will be asked for; there may be too many for a list."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


@dataclasses.dataclass(frozen=True)
class NotPrepared:
    """Why an item could not be prepared, by the message of its error."""

    message: str


def suggest_workers(prepare: Callable[[int], Any], items: Order, *, cores: int | None = None) -> int:
    """Prepare a few items here: how many processes would keep up, 0 where that takes next to no time."""
    return _try_items(prepare, items, own_cores() if cores is None else cores).workers


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What a few items showed: how many processes would keep up, and how large an item is."""

    workers: int
    item_bytes: int


def _try_items(
    prepare: Callable[[int], Any], items: Order, cores: int, *, cheap_seconds: float = CHEAP_SECONDS
) -> _Trial:
    from brim.memory.pinned_shared_pool import tensor_bytes

    trial = _first(items, 3)
    if not trial or cores < 2:
        return _Trial(0, 0)
    largest, tried, spent = 0, 0, 0.0
    started = time.perf_counter()
    while tried < len(trial) and spent < TRIAL_SECONDS:
        with contextlib.suppress(MemoryError):  # it will happen again in `take`, where it can be handled
            largest = max(largest, tensor_bytes(_prepared(prepare, trial[tried])))
        tried, spent = tried + 1, time.perf_counter() - started
    seconds = spent / tried
    if seconds < cheap_seconds or seconds * len(items) < 2.0:  # the processes take as long to start
        return _Trial(0, largest)
    spare = 1 if cores <= MANY_CORES else 2  # for the one that feeds the device, and for what it is fed by
    wanted = math.ceil(seconds * ITEMS_PER_SECOND)
    return _Trial(max(min(wanted, cores - spare, MOST_WORKERS, len(items)), 1), largest)


class Loader:
    """Prepared items by number.

        with Loader(prepare, order, LoaderSettings(), pin=True) as loader:
            ready = loader.take([4, 9])      # in the order asked for; a NotPrepared where that failed
            loader.done([4, 9])              # they will not be asked for again

    `wait_seconds` is how long `take` had to wait.
    """

    def __init__(
        self, prepare: Callable[[int], Any], order: Order, settings: LoaderSettings, *, pin: bool = False
    ) -> None:
        self._prepare = prepare
        self._order = order
        self._settings = settings
        self._pin = pin and settings.pin_memory
        self.workers = settings.num_workers
        self.item_bytes = settings.item_bytes
        self.wait_seconds = 0.0
        self.notes: list[str] = []
        self._ready: dict[int, Any] = {}
        self._aside: set[int] = set()  # arrived, forgotten, and to be asked for again
        self._coming: Iterator[tuple[int, Any]] | None = None
        self._pool: PinnedSharedPool | None = None
        self._packed: dict[int, Packed] = {}  # what lies in the pool, by item

    def __enter__(self) -> Self:
        if self.workers is None:
            cheap = CHEAP_SECONDS_BESIDE_GPU if self._pin else CHEAP_SECONDS
            trial = _try_items(self._prepare, self._order, own_cores(), cheap_seconds=cheap)
            self.workers, self.item_bytes = trial.workers, trial.item_bytes
        self.workers = self._affordable(self.workers)
        if self.workers > 0 and len(self._order) > 0:
            try:
                self._coming = self._start(self.workers)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._coming = None  # the processes end with their iterator
        self._ready.clear()
        self._aside.clear()
        self._packed.clear()
        if self._pool is not None:
            self._pool.release()

    @property
    def running(self) -> bool:
        """Whether its processes are at work still."""
        return self._coming is not None

    @property
    def holds_pinned_pool(self) -> bool:
        """Whether it has the pinned pool, of which a process has one."""
        return self._pool is not None and self._pool.is_pinned

    def take(self, items: Sequence[int]) -> list[Any]:
        """The prepared items; waits for those that are not here yet."""
        started = time.perf_counter()
        missing = {item for item in items if item not in self._ready}
        again = missing & self._aside
        missing -= again
        while missing and self._coming is not None:
            try:
                item, prepared = next(self._coming)
            except StopIteration:
                self._coming = None
            except RuntimeError as error:  # a worker was killed, or ran out of shared memory
                self._coming = None
                first = str(error).strip().splitlines()[0]
                self.notes.append(f"a loading process was lost ({first}); items are prepared in this one from here on")
            else:
                self._ready[item] = self._unpacked(item, prepared)
                missing.discard(item)
        for item in missing | again:
            self._ready[item] = _prepared(self._prepare, item)
        self.wait_seconds += time.perf_counter() - started
        ready = [self._ready[item] for item in items]
        for prepared in ready:
            if isinstance(prepared, BrimError):  # a library is missing, say: not this item's own failure
                raise prepared
        return ready

    def done(self, items: Sequence[int]) -> None:
        """Forget items that will not be asked for again."""
        for item in items:
            self._ready.pop(item, None)
        if self._pool is not None:
            self._pool.free([self._packed.pop(item) for item in items if item in self._packed])

    def set_aside(self, items: Sequence[int]) -> None:
        """Forget items for now; those that are asked for again are prepared here, out of the order."""
        self.done(items)
        self._aside.update(items)

    def _affordable(self, workers: int) -> int:
        """As many processes as there is shared memory for what they prepare ahead: a container may have 64 MB of it."""
        free = free_shared_bytes()
        each = (self._settings.prefetch_factor + 1) * (self.item_bytes or 0)
        if free is None or workers * each <= SHARE_OF_SHM * free:
            return workers
        fewer = int(SHARE_OF_SHM * free / each)
        self.notes.append(
            f"{format_bytes(free)} of shared memory hold what {fewer} loading processes prepare, not {workers}; a "
            "container gets more with --shm-size=8g"
        )
        return fewer

    def _prefetch(self, workers: int) -> int:
        """Items that each process prepares ahead: a batch in all, where that is wanted and takes little memory."""
        least, each = self._settings.prefetch_factor, max(self.item_bytes or 0, 1)
        free = free_shared_bytes()
        available = AHEAD_BYTES if free is None else min(AHEAD_BYTES, SHARE_OF_SHM * free)
        return max(least, min(math.ceil(min(self._settings.ahead, available / each) / workers), MOST_AHEAD))

    def _unpacked(self, item: int, prepared: Any) -> Any:
        from brim.memory.pinned_shared_pool import Packed

        if self._pool is None or not isinstance(prepared, Packed):
            return prepared
        self._packed[item] = prepared
        return self._pool.unpack(prepared)

    def _start(self, workers: int) -> Iterator[tuple[int, Any]]:
        import torch
        from torch.utils.data import DataLoader

        from brim.memory.pinned_shared_pool import PinnedSharedPool

        pooled = self._settings.pool == "always" or (self._settings.pool == "for_device" and self._pin)
        if self.item_bytes is None and (pooled or self._settings.ahead > 0):
            self.item_bytes = _try_items(self._prepare, _first(self._order, 1), cores=2).item_bytes
        prefetch, batches = self._prefetch(workers), 2 * self._settings.ahead  # of which one is on the device
        if pooled:
            self._pool = PinnedSharedPool.acquire(
                self.item_bytes or 0, workers=workers, pin=self._pin, items=workers * prefetch + batches
            )
        if self.holds_pinned_pool and self._pool is not None:
            ahead = self._pool.items_held(self.item_bytes or 0) - batches
            prefetch = max(min(prefetch, ahead // workers), self._settings.prefetch_factor)
        with warnings.catch_warnings():
            # From Python 3.12 on, forking a process that has threads warns. The workers prepare items on the host and
            # touch neither the device nor the locks of our threads, as DataLoader workers have always done.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            # More processes than cores are asked for on purpose, where samples wait for disks or the network.
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            loader: Any = DataLoader(
                _Items(self._prepare, self._pool),  # type: ignore[arg-type]  # a map of item numbers, as torch asks for
                batch_size=None,
                collate_fn=_as_it_is,  # torch would make lists of tuples, which the same item prepared here is not
                sampler=self._order,
                generator=torch.Generator(),  # not the run's own: a draw from that would change what the run draws
                num_workers=workers,
                prefetch_factor=prefetch,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
            )
            coming = iter(loader)
        _watch_no_more(coming)
        return self._arriving(coming)

    def _arriving(self, coming: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for item, prepared in coming:
            # Out of shared memory at once: its file descriptors are few.
            yield item, prepared if self._pin else _cloned(prepared)


def _as_it_is(item: Any) -> Any:
    return item


def _first(items: Iterable[int], count: int) -> list[int]:
    return list(itertools.islice(items, count))


def _watch_no_more(coming: Any) -> None:
    """Have a lost worker noticed where its items are waited for, in `take`.

    torch notices at once, and raises in the main thread wherever it happens to be: in the middle of a batch, which
    would be taken for out of memory, or of a line of the journal.
    """
    from torch._C import _remove_worker_pids

    if getattr(coming, "_worker_pids_set", False):
        _remove_worker_pids(id(coming))
        coming._worker_pids_set = False


class _Items:
    """Items as a DataLoader's dataset: every item gives something, if only the reason why not."""

    def __init__(self, prepare: Callable[[int], Any], pool: PinnedSharedPool | None) -> None:
        self._prepare = prepare
        self._pool = pool

    def __getitem__(self, item: int) -> tuple[int, Any]:
        prepared = _prepared(self._prepare, item)
        if self._pool is None:
            return item, prepared
        from torch.utils.data import get_worker_info

        own = get_worker_info()
        return item, prepared if own is None else self._pool.pack(prepared, worker=own.id)


def _prepared(prepare: Callable[[int], Any], item: int) -> Any:
    try:
        return prepare(item)
    except MemoryError:
        raise
    except BrimError as error:
        return error
    except Exception as error:
        if _ran_out(error):
            raise
        return NotPrepared(f"{type(error).__name__}: {error}")


def _ran_out(error: Exception) -> bool:
    """Whether it is torch's: samples that are prepared in this process count against its memory limit."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _start_worker(worker: int) -> None:
    """One thread each: the processes are the parallelism. An interrupt is the main process's to handle."""
    import signal

    import torch

    del worker
    torch.set_num_threads(1)
    _keep_freed_memory()
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _keep_freed_memory() -> None:
    """Have glibc reuse what large tensors leave behind instead of handing it back to the system.

    A picture passes through several of them, and allocating every page again took a third of the time.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def _cloned(value: Any) -> Any:
    import torch

    from brim.memory.transfer import replaced

    return replaced(value, torch.Tensor, torch.clone)
