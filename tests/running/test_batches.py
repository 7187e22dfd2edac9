"""`brim.batches`: every sample once in a loop of one's own, whatever runs out of memory in its body."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import brim
from brim.memory.devices import CpuMemory
from brim.running import batches as module
from brim.running.batch_attempt import BatchAttempt, BlockMemory

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Looking for cycles takes a fifth of a second each time, and pauses take longer: nothing here depends on them."""
    waited: list[float] = []
    monkeypatch.setattr(CpuMemory, "release", lambda self, thorough=True: None)
    monkeypatch.setattr(module, "wait", waited.append)
    return waited


def silent(line: str) -> None:
    """Notes that a test does not read."""


def looped(loop: brim.Batches, body: Callable[[Any, Any], object]) -> None:
    """Somebody's loop."""
    for batch in loop:
        with batch as data:
            body(batch, data)


def raising(error: Exception) -> Callable[[Any, Any], object]:
    def body(batch: Any, data: Any) -> None:
        raise error

    return body


def test_every_sample_comes_once_and_in_order() -> None:
    seen: list[int] = []
    loop = brim.batches(list(range(100)))
    for batch in loop:
        with batch as numbers:
            assert numbers.tolist() == list(batch.indices)
            seen += numbers.tolist()
    assert seen == list(range(100))
    assert loop.oom_events == 0
    assert loop.figures.items == 100


def test_a_block_that_runs_out_of_memory_comes_again_in_smaller_batches() -> None:
    done: Counter[int] = Counter()
    notes: list[str] = []
    loop = brim.batches(list(range(100)), batch_size=32, note=notes.append)
    for batch in loop:
        with batch as numbers:
            if len(batch) > 7:
                raise RuntimeError(OOM)
            done.update(numbers.tolist())
    assert sorted(done) == list(range(100))
    assert set(done.values()) == {1}
    assert loop.oom_events == len(notes) >= 2
    assert "a batch of 32 failed (CUDA out of memory): its samples run again in smaller ones" in notes[0]
    assert loop.batch_sizes is not None
    assert loop.batch_sizes.largest <= 7


def test_a_real_limit_is_met_and_answers_are_those_of_one_big_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 2))
    rows = torch.randn(300, 16)
    found = torch.empty(300, 2)
    loop = brim.batches(rows, batch_size=300, device="cpu", memory_limit="128KiB", note=silent)
    for batch in loop:
        with batch as inputs, torch.no_grad():
            found[list(batch.indices)] = model(inputs)
    assert loop.oom_events > 0
    assert 0 < loop.figures.peak_allocated_bytes <= 128 * 1024
    with torch.no_grad():
        torch.testing.assert_close(found, model(rows))


def test_an_out_of_memory_error_while_a_batch_is_put_together_is_survived_too() -> None:
    def collate(samples: list[int]) -> list[int]:
        if len(samples) > 4:
            raise torch.OutOfMemoryError(OOM)
        return samples

    seen: list[int] = []
    for batch in brim.batches(list(range(20)), batch_size=16, collate_fn=collate, note=silent):
        with batch as numbers:
            seen += numbers
    assert sorted(seen) == list(range(20))


def test_a_sample_that_does_not_fit_alone_ends_the_loop_after_all_others(quick: list[float]) -> None:
    seen: list[int] = []
    tries = 0
    loop = brim.batches(list(range(20)), batch_size=8, note=silent)

    def body(batch: Any, numbers: torch.Tensor) -> None:
        nonlocal tries
        if 13 in batch.indices:
            tries += len(batch) == 1
            raise RuntimeError(OOM)
        seen.extend(numbers.tolist())

    with pytest.raises(brim.DoesNotFitError, match=r"1 sample of 20 did not fit, even alone \(number 13\)"):
        looped(loop, body)
    assert sorted(seen) == [number for number in range(20) if number != 13]
    assert tries == 3
    assert len(quick) == 1  # one pause: another process may have held the memory
    assert loop.failures[13].attempts == 3
    assert loop.failures[13].reason == "out_of_memory"


def test_a_sample_that_fits_at_last_is_done() -> None:
    tries: Counter[int] = Counter()
    seen: list[int] = []
    for batch in brim.batches([0, 1, 2], batch_size=1, note=silent):
        with batch as numbers:
            tries.update(batch.indices)
            if batch.indices == (1,) and tries[1] < 3:
                raise RuntimeError(OOM)
            seen += numbers.tolist()
    assert seen == [0, 2, 1]


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("CUDA error: an illegal memory access")])
def test_any_other_error_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        looped(brim.batches(list(range(8))), raising(error))
    assert caught.value is error


def test_a_batch_whose_error_the_caller_handles_says_nothing_of_its_size() -> None:
    seen: list[int] = []
    alone: set[int] = set()
    loop = brim.batches(list(range(20)), batch_size=4, note=silent)
    for batch in loop:
        with contextlib.suppress(ValueError), batch as numbers:
            if 6 in batch.indices and len(batch) > 1:
                raise RuntimeError(OOM)
            if batch.indices == (6,) and 6 not in alone:
                alone.add(6)
                raise RuntimeError(OOM)  # it is tried once more after the others
            if 6 in batch.indices or 13 in batch.indices:
                raise ValueError("this picture is broken")
            seen += numbers.tolist()
    assert not {6, 13} & set(seen)
    assert loop.figures.items == len(seen) == len(set(seen)) > 0
    assert not loop.failures


def test_an_error_that_may_not_be_memory_is_raised_once_it_is_one_samples() -> None:
    sizes: list[int] = []

    def body(batch: Any, data: Any) -> None:
        sizes.append(len(batch))
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")

    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        looped(brim.batches(list(range(4)), batch_size=4, note=silent), body)
    assert sizes == [4, 2, 1]


def test_a_batch_that_is_never_entered_is_a_mistake_that_is_named() -> None:
    with pytest.raises(brim.RequestError, match="with batch as data:"):
        list(brim.batches([1, 2, 3]))


def test_a_batch_that_is_taken_for_its_data_says_how_to_get_it() -> None:
    with pytest.raises(brim.RequestError, match="write `with batch as data:`"):
        for _inputs, _labels in brim.batches([(1, 2), (3, 4)]):
            pass


def test_a_batch_is_entered_once() -> None:
    for batch in brim.batches([1]):
        with batch:
            pass
        with pytest.raises(brim.RequestError, match="entered once"), batch:
            pass


def test_a_loop_may_stop_early_and_start_again_at_the_size_found() -> None:
    loop = brim.batches(list(range(64)), batch_size=16, note=silent)
    for batch in loop:
        with batch:
            if len(batch) > 4:
                raise RuntimeError(OOM)
            break
    first = next(iter(loop))
    assert len(first) == 4
    assert loop.figures.items == 4  # the block that was left early is done
    other = brim.batches(list(range(64)), loop.sizer, batch_size=16)
    assert len(next(iter(other))) == 4
    smaller = brim.batches(list(range(64)), loop.sizer, batch_size=2)
    assert len(next(iter(smaller))) == 2


def test_costs_cap_the_padded_cost_and_bring_the_costliest_first() -> None:
    costs = [1 + number % 9 for number in range(60)]
    seen: list[int] = []
    largest = 0
    for batch in brim.batches([torch.ones(cost) for cost in costs], costs=costs, collate_fn=list, note=silent):
        with batch as rows:
            padded = len(rows) * max(len(row) for row in rows)
            if padded > 40:
                raise RuntimeError(OOM)
            largest = max(largest, padded)
            seen += batch.indices
    assert sorted(seen) == list(range(60))
    assert [costs[number] for number in seen] == sorted(costs, reverse=True)
    assert largest <= 40


def test_what_a_failed_block_held_is_gone_when_the_next_batch_comes() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    gone: list[bool] = []

    def step(numbers: torch.Tensor) -> None:
        gone.extend(one() is None for one in held)
        activations = numbers.float()
        held.append(weakref.ref(activations))
        if len(numbers) > 2:
            raise torch.OutOfMemoryError(OOM)

    for batch in brim.batches(list(range(4)), batch_size=4, note=silent):
        with batch as numbers:
            step(numbers)
    assert gone == [True, True, True]


def test_fail_on_oom_stops_at_once() -> None:
    with pytest.raises(brim.DoesNotFitError, match="a batch of 8 does not fit") as caught:
        looped(brim.batches(list(range(8)), batch_size=8, fail_on_oom=True), raising(RuntimeError(OOM)))
    assert OOM in str(caught.value.__cause__)


def test_an_interrupt_at_the_end_of_a_block_lifts_its_limit() -> None:
    class Interrupted(CpuMemory):
        def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
            raise KeyboardInterrupt

    attempt = BatchAttempt(
        torch.ones(2), [0, 1], BlockMemory(Interrupted(torch.device("cpu")), limit_bytes=2**10, metered=True)
    )
    with pytest.raises(KeyboardInterrupt), attempt:
        pass
    assert not attempt.done
    torch.ones(2**10)  # four times the limit


class Rows(Dataset[Any]):
    """Samples by number, one of which may be broken."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __getitem__(self, item: int) -> torch.Tensor:
        if item == self.broken:
            raise ValueError("this file is not a picture")
        return torch.full((3,), float(item))

    def __len__(self) -> int:
        return 12


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_loading_processes_prepare_samples_and_name_those_they_cannot_read() -> None:
    total = 0.0
    for batch in brim.batches(Rows(), num_workers=1, batch_size=5):
        with batch as rows:
            assert rows.shape == (len(batch), 3)
            total += float(rows[:, 0].sum())
    assert total == sum(range(12))
    with pytest.raises(brim.RequestError, match=r"sample 3 of the data set cannot be read: ValueError: this file"):
        next(iter(brim.batches(Rows(broken=3), num_workers=1, batch_size=12)))
    with pytest.raises(ValueError, match="this file is not a picture"):
        next(iter(brim.batches(Rows(broken=0))))


def test_a_plan_is_where_sizes_start() -> None:
    model = nn.Linear(4, 4)
    plan = brim.find(
        step=model, make_batch=lambda count: torch.ones(count, 4), device="cpu", max_batch_size=8, no_cache=True
    )
    first = next(iter(brim.batches(torch.ones(64, 4), plan)))
    assert len(first) == plan.batch_size
    with pytest.raises(brim.RequestError, match="counts samples and these batches count tokens"):
        brim.batches(torch.ones(4, 4), plan, costs=[3, 3, 3, 3])


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (DataLoader([1, 2]), {}, "give its data set"),
        (iter([1]), {}, "give a list"),
        (Stream(), {}, "give a list"),
        ({"inputs": torch.ones(4)}, {}, "give a list"),
        ([1, 2], {"batch_size": 0}, "batch_size=0"),
        ([1, 2], {"batch_size": True}, "batch_size=True"),
        ([1, 2], {"costs": [1]}, "there are 1 for 2 samples"),
        ([1, 2], {"costs": ["a", None]}, "costs=: .* give a whole number for each sample"),
        ([1, 2], {"costs": [1, float("inf")]}, "costs=: .* give a whole number for each sample"),
        ([1, 2], {"costs": len}, "costs=.*: give a list"),
        ([1, 2], {"sizer": 3}, "sizer=3"),
        ([1, 2], {"collate_fn": 3}, "collate_fn=3: give a function"),
        ([1, 2], {"num_workers": -1}, "num_workers=-1: it must be a whole number from 0"),
        ([1, 2], {"memory_limit": "1GiB"}, "memory_limit needs device="),
        ([1, 2], {"device": "nowhere"}, "device="),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(brim.RequestError, match=message):
        brim.batches(dataset, **options)
