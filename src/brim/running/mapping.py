"""`brim.map`: any function over any items, in batches that fit, every item once.

Torch is not needed: without a device, out-of-memory errors are still recognised by what the function raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from brim.errors import RequestError
from brim.records import BatchSizes
from brim.running.executor import BatchWork, ExecutionPolicy, Executor, Finished, ItemFailure
from brim.running.results import ExecutionFigures
from brim.settings.shared import check_functions, checked_batch_size
from brim.settings.sizes import parse_bytes
from brim.sizing.live import LiveSizer
from brim.sizing.priors import AvailableMemory, LiveRequest, Prior, start_live
from brim.storage.fingerprint import content_text, fingerprint
from brim.storage.journal import Journal

__all__ = ["MapResult", "map"]

MOST_COST = 2**48  # of one item; sums of many stay exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapResult(Sequence[Any]):
    """One result per item, in the caller's order; a failed item's place holds an `ItemFailure`.

    Examples:
        >>> results = brim.map(lambda texts: [int(text) for text in texts], ["1", "2", "three"])
        >>> results[1], results.failures[2].reason
        (2, 'error')
    """

    results: tuple[Any, ...]
    failures: dict[int, ItemFailure]
    batch_sizes: BatchSizes | None  # None when everything was in the journal already
    oom_events: int
    padding_fraction: float
    seconds: float
    resumed: int  # items that the journal had already
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    notes: tuple[str, ...] = ()  # on damaged lines of the journal, whose items were computed again

    @property
    def batch_size_used(self) -> int | None:
        """The size the run settled at: the batch size of the median item."""
        return None if self.batch_sizes is None else self.batch_sizes.median

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.results[index]


def map(
    function: Callable[[list[Any]], Sequence[Any]],
    items: Iterable[Any],
    *,
    batch_size: int | Literal["auto"] = "auto",
    cost: Callable[[Any], int] | None = None,
    device: Any = None,
    memory_limit: int | str | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    key: str | None = None,
    fail_fast: bool = False,
    fail_on_oom: bool = False,
    on_batch: Callable[[ExecutionFigures], None] | None = None,
) -> MapResult:
    """Call `function` on lists of items and return one result per item, in order, whatever happens on the way.

    As `[f(x) for x in items]`, but in batches that are found as it runs: costliest items first, larger batches while
    they pay, split on out-of-memory errors and grown back afterwards. An item that fails alone is recorded with its
    error and does not stop the rest (`fail_fast` stops instead); one that runs out of memory alone is first tried again
    after the others, and once more after a pause.

    Args:
        function: Takes a list of items and returns as many results.
        items: The items.
        batch_size: `auto`, or a ceiling in items.
        cost: The cost of an item (tokens, pixels): batches are then capped in padded cost, not in number.
        device: Where the function runs, for its memory; by default no device is watched.
        memory_limit: Use at most this much, such as `"24GiB"`.
        journal: Append results (JSON values) to this file as they are finished.
        resume: Continue where a killed run with this `journal` stopped.
        key: Names what the function does, so that a journal is not resumed by another one. Items are known to a
            journal by their content; where that cannot be read, `key` must change when they do.
        fail_fast: Stop at the first item that fails.
        fail_on_oom: Stop at the first out-of-memory error.
        on_batch: Is called after every batch with the figures so far.

    Returns:
        One result per item, in order, with `failures`, `batch_sizes`, `oom_events` and `seconds`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Not even the cheapest item fits alone.
        LostError: The device was lost; what was finished is in the journal.

    Examples:
        >>> lengths = brim.map(lambda words: [len(word) for word in words], ["to", "the", "brim"], cost=len)
        >>> list(lengths), lengths.failures
        ([2, 3, 4], {})
    """
    if not callable(function):
        raise RequestError(f"function={function!r}: give a function that takes a list of items")
    check_functions(cost=cost, on_batch=on_batch)
    ceiling = checked_batch_size(batch_size)
    try:
        iterator = iter(items)
    except TypeError as error:
        raise RequestError(f"items={items!r}: give a list, or anything else that can be iterated over") from error
    items = list(iterator)
    costs = _costs(items, cost)
    memory, limit_bytes = _memory(device, memory_limit)
    done: dict[int, Finished] = {}
    with contextlib.ExitStack() as stack:
        book = None
        if journal is not None:
            if not isinstance(journal, (str, Path)):
                raise RequestError(f"journal={journal!r}: give the path of a file")
            facts = {"count": len(items), "items": _digest(items, key), "key": key}
            check = functools.partial(_problem, count=len(items))
            book = Journal(Path(journal), fingerprint=fingerprint(facts), resume=resume, check=check)
            stack.enter_context(book)
            done.update((entry["item"], _done(entry)) for entry in book.entries)
        resumed = len(done)

        if memory is not None and limit_bytes is not None:
            stack.enter_context(memory.limited(limit_bytes))
        order = sorted((item for item in range(len(items)) if item not in done), key=lambda item: -costs[item])
        executor = Executor(
            BatchWork(launch=lambda batch: function([items[item] for item in batch]), costs=costs),
            sizer=_sizer(ceiling, [costs[item] for item in order], limit_bytes),
            memory=memory,
            metered=memory is not None and (not memory.meter_slows or memory_limit is not None),
            policy=ExecutionPolicy(by_count=ceiling is not None, fail_fast=fail_fast, fail_on_oom=fail_on_oom),
        )
        for finished in stack.enter_context(contextlib.closing(executor.run(order))):
            if book is not None:
                book.append(_entry(one) for one in finished)
            done.update((one.item, one) for one in finished)
            if on_batch is not None:
                on_batch(executor.figures)
    found = _result(done, executor.figures, resumed, measured=memory is not None)
    return found if book is None else dataclasses.replace(found, notes=tuple(book.notes))


def _sizer(ceiling: int | None, costs: Sequence[int], limit_bytes: int | None) -> LiveSizer:
    available = AvailableMemory(limit_bytes=limit_bytes, item_cost=max(costs, default=1))
    return start_live(LiveRequest(batch_size=ceiling), Prior(), available)


def _costs(items: Sequence[Any], cost: Callable[[Any], int] | None) -> list[int]:
    if cost is None:
        return [1] * len(items)
    costs = [cost(item) for item in items]
    for item, value in enumerate(costs):
        if not isinstance(value, numbers.Integral) or not 0 <= int(value) <= MOST_COST:
            raise RequestError(f"cost of item {item} is {value!r:.60}: it must be a whole number from 0 to {MOST_COST}")
    return [max(int(value), 1) for value in costs]


def _memory(device: Any, memory_limit: int | str | None) -> tuple[Any, int | None]:
    """The device's memory and the limit on it; neither, and no torch, when no device is named."""
    if device is None:
        if memory_limit is not None:
            raise RequestError("memory_limit needs device=, the device whose memory it limits")
        return None, None
    from brim.memory.devices import existing_device, memory_of, resolve_limit

    memory = memory_of(existing_device(device, argument="device="))
    asked = None if memory_limit is None else parse_bytes(memory_limit)
    limit = resolve_limit(memory, asked_bytes=asked, margin=None)
    return memory, limit.usable_bytes


def _digest(items: Sequence[Any], key: str | None) -> str:
    """A fingerprint of the items by their content; those that have none, by their type and the caller's key."""
    texts = []
    for item in items:
        try:
            texts.append(content_text(item))
        except TypeError as error:
            if key is None:
                raise RequestError(
                    f"journal=: an item holds a value whose content cannot be read ({error}), so other items could not "
                    "be distinguished from these; give key=, a text that changes when the items do"
                ) from error
            texts.append(type(item).__name__)
    return fingerprint({"items": texts})


def _entry(done: Finished) -> dict[str, Any]:
    failure = None if done.failure is None else done.failure.to_json()
    return {"item": done.item, "result": done.result, "failure": failure, "batch_size": done.batch_size}


def _done(entry: Mapping[str, Any]) -> Finished:
    failure = None if entry["failure"] is None else ItemFailure(**entry["failure"])
    return Finished(item=entry["item"], result=entry["result"], failure=failure, batch_size=entry["batch_size"])


def _problem(entry: Mapping[str, Any], *, count: int) -> str | None:
    """Why a line of the journal is not that of one of `count` items; None: it is."""
    try:
        done = _done(entry)
    except (KeyError, TypeError):
        return "not the line of an item"
    if type(done.item) is not int or not 0 <= done.item < count:
        return f"no item {done.item!r} among {count}"
    return None


def _result(done: dict[int, Finished], figures: ExecutionFigures, resumed: int, *, measured: bool) -> MapResult:
    ordered = [done[item] for item in sorted(done)]
    return MapResult(
        results=tuple(one.result if one.failure is None else one.failure for one in ordered),
        failures={one.item: one.failure for one in ordered if one.failure is not None},
        batch_sizes=figures.batch_sizes(),
        oom_events=figures.oom_events,
        padding_fraction=figures.padding_fraction,
        seconds=figures.seconds,
        resumed=resumed,
        peak_allocated_bytes=figures.peak_allocated_bytes if measured else None,
        peak_reserved_bytes=figures.peak_reserved_bytes if measured else None,
    )
