"""An item that runs out of memory alone is tried again after the others, and once more after a pause."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.running.executor import BatchWork, ExecutionPolicy, Executor
from brim.running.retries import ALL_PAUSES_SECONDS, ATTEMPTS, LONGEST_PAUSE_SECONDS
from brim.sizing.live import LiveSizer


class Neighbour:
    """Another process that holds the memory, until it has let go."""

    def __init__(self) -> None:
        self.holds = True
        self.tried: list[list[int]] = []

    def function(self, batch: list[int]) -> list[int]:
        self.tried.append(batch)
        if self.holds:
            raise MemoryError
        return [2 * item for item in batch]

    def lets_go(self, seconds: float) -> None:
        del seconds
        self.holds = False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long every pause was."""
    seen: list[float] = []
    monkeypatch.setattr("brim.running.executor.wait", seen.append)
    return seen


def test_another_process_that_holds_the_memory_for_a_moment_costs_no_item(pauses: list[float]) -> None:
    calls = 0

    def function(batch: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if 4 <= calls < 40:
            raise MemoryError
        return [2 * item for item in batch]

    result = brim.map(function, range(400), batch_size=32)
    assert list(result) == [2 * item for item in range(400)]
    assert result.oom_events == 36
    assert not pauses  # they ran in their second turn


def test_random_failures_cost_an_item_only_if_they_meet_it_three_times(pauses: list[float]) -> None:
    luck = random.Random(0)

    def function(batch: list[int]) -> list[int]:
        if luck.random() < 0.3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [2 * item for item in batch]

    result = brim.map(function, range(3000))
    assert len(result.failures) < 0.04 * 3000  # 0.3³ of the items, if every one of them ran alone
    assert {failure.attempts for failure in result.failures.values()} <= {ATTEMPTS}
    assert all(result[item] == 2 * item for item in range(3000) if item not in result.failures)
    assert len(pauses) <= 1


@pytest.mark.parametrize("error", ["CUDA out of memory", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"])
def test_an_item_that_never_fits_is_recorded_with_its_tries(pauses: list[float], error: str) -> None:
    ran: list[int] = []
    alone: list[int] = []  # how many had run when it was tried

    def function(batch: list[int]) -> list[int]:
        if 42 in batch:
            alone.extend([len(ran)] if len(batch) == 1 else [])
            raise RuntimeError(error)
        ran.extend(batch)
        return [2 * item for item in batch]

    result = brim.map(function, range(100), batch_size=10)
    assert set(result.failures) == {42}
    assert result.failures[42].attempts == ATTEMPTS == 3
    assert alone[0] < 99  # in its turn
    assert alone[1:] == [99, 99]  # after all the others
    assert pauses == [1.0]


def test_an_ordinary_error_of_an_item_is_recorded_at_once(pauses: list[float]) -> None:
    tried: Counter[int] = Counter()

    def function(batch: list[int]) -> list[int]:
        tried.update(batch if len(batch) == 1 else [])
        if 13 in batch:
            raise ValueError("cannot read this one")
        return batch

    result = brim.map(function, range(20), batch_size=8)
    assert result.failures[13].attempts == tried[13] == 1
    assert not pauses


def test_many_items_that_never_fit_wait_together_and_not_for_long(pauses: list[float]) -> None:
    calls = 0

    def function(batch: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if any(item < 1000 for item in batch):
            raise MemoryError
        return batch

    result = brim.map(function, range(1100), batch_size=1)
    assert len(result.failures) == 1000
    assert calls == ATTEMPTS * 1000 + 100
    assert pauses == [LONGEST_PAUSE_SECONDS]


def test_all_pauses_of_an_executor_together_are_bounded() -> None:
    neighbour, pauses = Neighbour(), []
    executor = Executor(
        BatchWork(launch=neighbour.function, costs=[1] * 60, pause=pauses.append), sizer=LiveSizer(first=1)
    )
    for start in range(0, 60, 10):  # as a worker of a cluster is given its shares
        list(executor.run(range(start, start + 10)))
    assert sum(pauses) == ALL_PAUSES_SECONDS
    assert executor.figures.failed == 60


def test_where_only_the_own_limit_is_the_reason_there_is_no_pause(pauses: list[float]) -> None:
    torch = pytest.importorskip("torch")

    def function(batch: list[int]) -> list[int]:
        return [int(torch.ones(2**20 if item == 7 else 2**10).sum()) for item in batch]

    result = brim.map(function, range(10), device="cpu", memory_limit="1MiB")
    assert set(result.failures) == {7}
    assert result.failures[7].attempts == ATTEMPTS
    assert not pauses


def test_a_run_that_seems_hopeless_continues_once_the_memory_is_given_back() -> None:
    neighbour = Neighbour()
    notes: list[str] = []
    executor = Executor(
        BatchWork(launch=neighbour.function, costs=list(range(1, 51)), note=notes.append, pause=neighbour.lets_go),
        sizer=LiveSizer(first=50),
        policy=ExecutionPolicy(stop_if_hopeless=True),
    )
    done = [one for some in executor.run(range(50)) for one in some]
    assert sorted(one.item for one in done) == list(range(50))
    assert all(one.result == 2 * one.item for one in done)
    assert any("4 samples do not fit alone" in line for line in notes)
    assert not any("not even the cheapest" in line for line in notes)


def test_the_last_resort_runs_after_all_tries(pauses: list[float]) -> None:
    neighbour = Neighbour()
    resorts: list[int] = []

    def last_resort() -> bool:
        resorts.append(len(neighbour.tried))
        neighbour.holds = False
        return len(resorts) == 1

    executor = Executor(
        BatchWork(launch=neighbour.function, costs=[1] * 20, last_resort=last_resort),
        sizer=LiveSizer(first=4),
        policy=ExecutionPolicy(stop_if_hopeless=True),
    )
    done = [one for some in executor.run(range(20)) for one in some]
    assert len(resorts) == len(pauses) == 1
    assert all(one.failure is None for one in done)
    assert sorted(one.item for one in done) == list(range(20))


def test_ctrl_c_ends_a_pause_at_once_and_the_item_is_left_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal.jsonl"
    slept: list[float] = []

    def interrupted(seconds: float) -> None:
        slept.append(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("brim.running.retries.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        brim.map(_all_but_three, range(10), journal=journal)
    assert len(slept) == 1
    result = brim.map(lambda batch: batch, range(10), journal=journal, resume=True)
    assert result.resumed == 9
    assert list(result) == list(range(10))


def test_a_recorded_failure_is_read_back_with_its_attempts(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    brim.map(_all_but_three, range(10), journal=journal)
    again = brim.map(_all_but_three, range(10), journal=journal, resume=True)
    assert again.resumed == 10
    assert again.failures[3].attempts == ATTEMPTS


@pytest.mark.parametrize("others", [True, False])
def test_batches_regain_their_size_once_other_processes_free_memory(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """On a device that says what other processes leave of it; a failure of our own keeps its caution."""
    pytest.importorskip("torch")
    from brim.memory.devices import CpuMemory

    plenty = 2**60
    sizes: list[int] = []
    calls = 0

    def function(batch: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if 4 <= calls < 30:
            raise MemoryError
        sizes.append(len(batch))
        return batch

    def left_by_others(memory: CpuMemory) -> int:
        return 0 if others and 4 <= calls < 30 else plenty

    monkeypatch.setattr(CpuMemory, "left_by_others_bytes", left_by_others)
    monkeypatch.setattr(CpuMemory, "release", lambda memory, thorough=True: None)
    result = brim.map(function, range(2000), batch_size=64, device="cpu")
    assert not result.failures
    assert list(result) == list(range(2000))
    assert sizes[:3] == [64] * 3
    assert (sizes[4:10] == [64] * 6) == others  # the one before was chosen while they held it


@pytest.mark.parametrize(("left_bytes", "waited"), [(2**60, []), (0, [1.0]), (None, [1.0])])
def test_others_are_waited_for_only_where_they_may_hold_the_memory(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], left_bytes: int | None, waited: list[float]
) -> None:
    pytest.importorskip("torch")
    from brim.memory.devices import CpuMemory

    monkeypatch.setattr(CpuMemory, "left_by_others_bytes", lambda memory: left_bytes)
    result = brim.map(_all_but_three, range(10), device="cpu")
    assert result.failures[3].attempts == ATTEMPTS
    assert pauses == waited


def _all_but_three(batch: list[Any]) -> list[Any]:
    if 3 in batch:
        raise MemoryError
    return batch
