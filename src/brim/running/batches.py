"""`brim.batches`: the batches of somebody's own loop, in sizes that fit, every sample once.

    for batch in brim.batches(dataset, device="cuda"):
        with batch as (images, labels):
            correct += (model(images).argmax(1) == labels).sum().item()

A generator cannot catch what the body of its loop raises, so the body says where a batch may fail: a `with` block, as
retrying libraries have it. A block that is left without an error is done; one that runs out of memory ends quietly, and
its samples come again in smaller batches. The pieces are the executor's (`executor.py`), turned inside out: there brim
calls a function, here the loop is the caller's. Torch is not needed until a device is named or a batch is put together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import DoesNotFitError, RequestError, plural
from brim.memory.failures import Failure, FailureKind, classify, without_tracebacks
from brim.records import BatchSizes, Plan
from brim.running.batch_attempt import BatchAttempt, BlockMemory
from brim.running.executor import ItemFailure
from brim.running.loader import Loader, LoaderSettings, NotPrepared
from brim.running.notes import log_note
from brim.running.results import ExecutionFigures
from brim.running.retries import Retries, wait
from brim.running.work_queue import WorkQueue, padded_cost
from brim.settings.setting_checks import whole
from brim.settings.shared import check_functions, checked, checked_batch_size
from brim.settings.sizes import parse_bytes
from brim.sizing.live import LiveSizer
from brim.sizing.priors import AvailableMemory, LiveRequest, Prior, start_live
from brim.sizing.sizer import Trial

if TYPE_CHECKING:
    import torch

__all__ = ["Batches", "batches"]

MOST_NAMED = 10  # samples that an error lists


class Batches:
    """The batches of a data set in sizes that fit, found on the way; made by `brim.batches`.

    Iterating gives a `BatchAttempt` after the other until every sample is done. A second iteration is another pass, at
    the size found. `sizer` can be given to `brim.batches` of other data of the same kind.

    Examples:
        >>> loop = brim.batches(list(range(100)), batch_size=32)
        >>> total = 0
        >>> for batch in loop:
        ...     with batch as numbers:
        ...         total += int(numbers.sum())
        >>> total, loop.batch_sizes.largest
        (4950, 32)
    """

    def __init__(
        self,
        data: Any,
        *,
        costs: Sequence[int],
        sizer: LiveSizer,
        memory: BlockMemory,
        ceiling: int | None,
        fail_on_oom: bool,
        collate: Callable[[list[Any]], Any] | None,
        device: Any,
        num_workers: int,
        note: Callable[[str], None],
    ) -> None:
        self.sizer = sizer
        self.figures = ExecutionFigures()
        self.failures: dict[int, ItemFailure] = {}  # samples that did not fit alone, by their place
        self.notes: list[str] = []
        self._data = data
        self._costs = costs
        self._memory = memory
        self._ceiling = ceiling
        self._by_count = ceiling is not None  # else by cost
        self._fail_on_oom = fail_on_oom
        self._collate = collate
        self._device = device
        self._num_workers = num_workers
        self._report = note
        self._retries = Retries()

    @property
    def batch_sizes(self) -> BatchSizes | None:
        """The sizes of the batches that were done, of all passes; None before the first."""
        return self.figures.batch_sizes()

    @property
    def oom_events(self) -> int:
        """How often a batch ran out of memory, and came again in smaller ones."""
        return self.figures.oom_events

    def __iter__(self) -> Iterator[BatchAttempt]:
        """Every sample once; a `DoesNotFitError` at the end if some do not fit alone."""
        self._retries = Retries()
        self.failures = {}
        order = sorted(range(len(self._costs)), key=lambda item: -self._costs[item])
        queue = WorkQueue(self._costs, order, by_count=self._by_count)
        with self._loader(order) as loader:
            yield from self._all(queue, loader)
            while self._retries:
                yield from self._again(queue, loader)
                yield from self._all(queue, loader)
        if self.failures:
            shown = ", ".join(map(str, sorted(self.failures)[:MOST_NAMED]))
            more = f" and {len(self.failures) - MOST_NAMED} more" if len(self.failures) > MOST_NAMED else ""
            raise DoesNotFitError(
                f"{plural(len(self.failures), 'sample')} of {len(self._costs)} did not fit, even alone (number {shown}"
                f"{more}); all others are done, and `failures` says why"
            )

    def _loader(self, order: Sequence[int]) -> Loader:
        settings = LoaderSettings(num_workers=self._num_workers, pin_memory=False, pool="never")
        return Loader(self._data.__getitem__, order, settings)

    def _all(self, queue: WorkQueue, loader: Loader) -> Iterator[BatchAttempt]:
        while queue:
            if self.sizer.disturbed and self.sizer.return_after_others(self._memory.left_by_others()):
                self._note("other processes have given memory back: batches are as large as before again")
            yield from self._one(queue, queue.take(self._size()), loader)

    def _size(self) -> int:
        size = self.sizer.next_size()
        return size if self._ceiling is None else min(size, self._ceiling)

    def _again(self, queue: WorkQueue, loader: Loader) -> Iterator[BatchAttempt]:
        """The samples that did not fit alone: now that all others are done, and once more after a pause."""
        for last in (False, True):
            seconds = self._retries.next_pause() if last and self._retries else 0.0
            if seconds > 0:
                self._note(f"{plural(len(self._retries), 'sample')} did not fit alone: once more in {seconds:g} s")
                wait(seconds)
            for item in self._retries.items:
                if item in self._retries:
                    yield from self._one(queue, [item], loader)

    def _one(self, queue: WorkQueue, batch: list[int], loader: Loader) -> Iterator[BatchAttempt]:
        """One batch: put together, given out, and counted or put back."""
        self._memory.timed = not self.sizer.settled
        attempt = self._prepared(batch, loader)
        if attempt.failure is None:
            try:
                yield attempt
            finally:  # a loop may be left for good at the end of a block
                if attempt.entered and attempt.failure is None:
                    self._count(attempt, batch, loader)
            if not attempt.entered:
                raise RequestError(
                    f"a batch of {len(batch)} was not used: write `with batch as data:` inside the loop, around what "
                    "is done with it; that is where running out of memory is survived"
                )
        if attempt.failure is not None:  # the block has ended: no traceback pins the batch's tensors any more
            self._failed(queue, batch, attempt.failure, attempt.error)

    def _prepared(self, batch: list[int], loader: Loader) -> BatchAttempt:
        """A batch on its device; what runs out of memory here is a failure of the batch as well."""
        failed: Failure | None = None
        data: Any = None
        raised: Exception | None = None
        try:
            data = self._put_together(batch, loader)
        except Exception as error:
            failed = classify(error)
            if failed.kind is not FailureKind.OUT_OF_MEMORY:
                raise
            raised = without_tracebacks(error)
        attempt = BatchAttempt(data, batch, self._memory)
        attempt.failure, attempt.error = failed, raised
        return attempt

    def _put_together(self, batch: list[int], loader: Loader) -> Any:
        if self._num_workers > 0:
            samples = loader.take(batch)
            for item, sample in zip(batch, samples, strict=True):
                if isinstance(sample, NotPrepared):
                    raise RequestError(f"sample {item} of the data set cannot be read: {sample.message}")
        else:
            samples = [self._data[item] for item in batch]
        data = _collated(samples) if self._collate is None else self._collate(samples)
        if self._device is None:
            return data
        from brim.memory.transfer import on_device

        return on_device(data, self._device)

    def _weight(self, batch: Sequence[int]) -> int:
        """The size of a batch in the unit of the sizer."""
        return len(batch) if self._by_count else padded_cost(self._costs[item] for item in batch)

    def _count(self, attempt: BatchAttempt, batch: list[int], loader: Loader) -> None:
        """A batch does not come again; one whose error the caller has handled says nothing of its size."""
        loader.done(batch)
        for item in batch:
            self._retries.ran(item)
        if not attempt.done:
            return
        figures, costs = self.figures, [self._costs[item] for item in batch]
        figures.items += len(batch)
        figures.batches += 1
        figures.seconds += attempt.seconds
        figures.cost += sum(costs)
        figures.padded_cost += padded_cost(costs)
        figures.batch_counts.append(len(batch))
        peak = None
        if attempt.reading is not None:
            figures.add_peak(attempt.reading)
            peak = attempt.reading.peak_reserved_bytes
        trial = Trial(size=self._weight(batch), seconds=attempt.seconds, peak_bytes=peak, costliest_item=max(costs))
        self.sizer.record(trial)

    def _failed(self, queue: WorkQueue, batch: list[int], failure: Failure, error: Exception | None) -> None:
        """Smaller from here on; a sample that fails alone is set aside, and at last given up."""
        left = self._memory.left_by_others()
        by_others = left is None or self.sizer.evidence.others_hold(left)
        self.sizer.note_others(left)
        self._memory.release()
        self.figures.oom_events += failure.kind is FailureKind.OUT_OF_MEMORY
        if self._fail_on_oom:
            raise DoesNotFitError(
                f"a batch of {len(batch)} does not fit: {failure.reason} (fail on OOM was asked)"
            ) from error
        if len(batch) > 1:
            self.sizer.record(Trial(size=self._weight(batch), verdict="oom"))
            self._note(f"a batch of {len(batch)} failed ({failure.reason}): its samples run again in smaller ones")
            if failure.kind is FailureKind.AMBIGUOUS:
                queue.split(batch)
            else:
                queue.put_back(batch)
            return
        (item,) = batch
        if item not in self._retries:  # else the sizer knows already
            if self._by_count:
                self.sizer.blame_item()
            else:
                self.sizer.record(Trial(size=self._weight(batch), verdict="oom"))
        if not self._retries.failed(item, failure, by_others=by_others and not failure.own_limit):
            self.figures.failed += 1
            self.failures[item] = ItemFailure(
                reason="size_limit" if failure.kind is FailureKind.SIZE_LIMIT else "out_of_memory",
                message=f"does not fit, even alone: {failure.reason}",
                needed_bytes=failure.requested_bytes,
                attempts=self._retries.attempts(item),
            )

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self._report(line)


def _collated(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


def batches(
    dataset: Any,
    sizer: Plan | LiveSizer | None = None,
    *,
    batch_size: int | Literal["auto"] = "auto",
    costs: Sequence[int] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    fail_on_oom: bool = False,
    note: Callable[[str], None] | None = None,
) -> Batches:
    """The batches of a data set for a loop of your own, in sizes that fit, found as the loop runs.

    Each batch is entered with `with batch as data:` around all that the loop does with it. A block that ends without an
    error is done. Where it runs out of memory the block ends, its memory is given back, and its samples come again in
    smaller batches; any other error is raised as it is. A sample that does not fit alone is tried again after all
    others, and once more after a pause; then a `DoesNotFitError` ends the loop, with everything else done.

    For inference. Gradients of a batch that is split are not those of the batch: train with `brim.accumulate`.

    Args:
        dataset: Samples by number, with a length: a torch `Dataset`, a list, a tensor.
        sizer: A plan of `brim.find` to start from, or the `sizer` of an earlier loop over the same kind of data (with
            `costs`, if that had them).
        batch_size: `auto`, or a ceiling in samples.
        costs: The cost of every sample (its tokens, pixels): batches are then capped in padded cost, and the costliest
            samples come first. Without, samples come in their order.
        collate_fn: Puts samples together; torch's by default.
        num_workers: Processes that load samples.
        device: Where batches are moved and memory is watched; by default they stay where they are, and the memory of
            a GPU in use is watched.
        memory_limit: Use at most this much inside the blocks, such as `"24GiB"`. On the CPU this bounds eager
            operations only.
        fail_on_oom: Stop at the first out-of-memory error.
        note: Is given a line for every batch that came again; by default the logger `brim` is.

    Returns:
        The batches, to iterate over; `indices` of a batch are the places of its samples.

    Raises:
        RequestError: The request is wrong, or a batch was not entered; the message says what to do.
        DoesNotFitError: Some samples do not fit, even alone; all others are done.

    Examples:
        >>> model, rows = torch.nn.Linear(4, 2), torch.randn(100, 4)
        >>> scores = torch.empty(100, 2)
        >>> for batch in brim.batches(rows):
        ...     with batch as inputs, torch.no_grad():
        ...         scores[list(batch.indices)] = model(inputs)
        >>> torch.allclose(scores, model(rows))
        True
    """
    _check(dataset, costs, sizer)
    check_functions(collate_fn=collate_fn, note=note)
    ceiling = checked_batch_size(batch_size)
    counted = [1] * len(dataset) if costs is None else _counted(costs)
    asked_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    memory, usable, place = _device_memory(device, asked_bytes)
    block = BlockMemory(
        memory,
        limit_bytes=None if asked_bytes is None else usable,
        metered=memory is not None and (not memory.meter_slows or asked_bytes is not None),
    )
    return Batches(
        dataset,
        costs=counted,
        sizer=sizer if isinstance(sizer, LiveSizer) else _sizer(sizer, ceiling, counted, usable, costs is not None),
        memory=block,
        ceiling=ceiling,
        fail_on_oom=fail_on_oom,
        collate=collate_fn,
        device=place,
        num_workers=checked("num_workers", num_workers, whole(0)) or 0,
        note=note or log_note,
    )


def _check(dataset: Any, costs: Any, sizer: Any) -> None:
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping)
    if not by_number or _is_stream(dataset):
        what = type(dataset).__name__
        loader = "; give its data set, with collate_fn= and num_workers= as it has them" if what == "DataLoader" else ""
        raise RequestError(
            f"dataset: a {what} has no samples by number, which a batch that is split needs{loader or '; give a list'}"
        )
    if costs is not None and not hasattr(costs, "__len__"):
        raise RequestError(f"costs={costs!r:.60}: give a list, such as [len(sample) for sample in dataset]")
    if costs is not None and len(costs) != len(dataset):
        raise RequestError(f"costs=: there are {len(costs)} for {len(dataset)} samples; give one for each")
    if sizer is not None and not isinstance(sizer, (Plan, LiveSizer)):
        raise RequestError(f"sizer={sizer!r:.60}: give a plan of brim.find, or the sizer of an earlier loop")


def _counted(costs: Sequence[Any]) -> list[int]:
    try:
        return [max(int(cost), 1) for cost in costs]
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"costs=: {error}; give a whole number for each sample, such as its tokens") from None


def _is_stream(dataset: Any) -> bool:
    """Whether it is a torch `IterableDataset`, which inherits a `__getitem__` that raises."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def _sizer(
    plan: Plan | None, ceiling: int | None, costs: Sequence[int], limit_bytes: int | None, by_cost: bool
) -> LiveSizer:
    """At the size asked for, at that of a plan in the same unit, or where a climb begins."""
    unit = "tokens" if by_cost and ceiling is None else "samples"
    if plan is not None and plan.unit != unit:
        raise RequestError(
            f"sizer=: the plan counts {plan.unit} and these batches count {unit}; "
            + ("give costs= as well" if plan.unit == "tokens" else "leave costs= out, or the plan")
        )
    asked = LiveRequest(batch_size=ceiling)
    prior = Prior(known_size=None if plan is None else plan.size)
    return start_live(asked, prior, AvailableMemory(limit_bytes=limit_bytes, item_cost=max(costs, default=1)))


def _device_memory(device: Any, asked_bytes: int | None) -> tuple[Any, int | None, Any]:
    """What memory is watched, what may be used of it, and where batches are moved; no torch where none is in use."""
    torch: Any = sys.modules.get("torch")
    if device is None and asked_bytes is not None:
        raise RequestError("memory_limit needs device=, the device whose memory it limits")
    if device is None and (torch is None or not torch.cuda.is_initialized()):
        return None, None, None
    from brim.memory.devices import existing_device, memory_of, resolve_limit

    place = None if device is None else existing_device(device, argument="device=")
    memory = memory_of("cuda" if place is None else place)
    usable = resolve_limit(memory, asked_bytes=asked_bytes, margin=None).usable_bytes
    return memory, usable, place
