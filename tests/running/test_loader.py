"""The loader: prepared ahead, in the order asked for, and nothing lost with a worker."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from brim.errors import RequestError
from brim.running import loader as loader_module
from brim.running.loader import Loader, LoaderSettings, NotPrepared, suggest_workers

ORDER = [4, 1, 3, 0, 2, 5, 7, 6]


def doubled(item: int) -> dict[str, Any]:
    if item == 3:
        raise ValueError("cannot read this one")
    return {"pixels": torch.full((2,), 2 * item), "name": f"item {item}", "parts": [torch.tensor(item)]}


def started(prepare: Any, workers: int, order: list[int] = ORDER, **options: Any) -> Loader:
    return Loader(prepare, order, LoaderSettings(num_workers=workers, prefetch_factor=2, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_items_come_in_the_order_asked_for_whatever_the_workers(workers: int) -> None:
    with started(doubled, workers) as loader:
        first = loader.take([1, 4])
        again = loader.take([4])  # a batch that was split is put together from what is here
        rest = loader.take([0, 3, 2])
        loader.done([0, 1, 2, 3, 4])
        last = loader.take([6, 5])
    assert [one["pixels"].tolist() for one in first] == [[2, 2], [8, 8]]
    assert again[0]["name"] == "item 4"
    assert rest[1] == NotPrepared("ValueError: cannot read this one")
    assert [one["name"] for one in (rest[0], rest[2], *last)] == ["item 0", "item 2", "item 6", "item 5"]
    assert loader.notes == []
    assert loader.wait_seconds > 0


@pytest.mark.parametrize("pool", ["for_device", "never", "always"])
def test_what_comes_in_the_ordinary_way_is_out_of_shared_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """Its file descriptors are few."""
    if pool == "always":  # a container's
        monkeypatch.setattr("brim.memory.pinned_shared_pool.free_shared_bytes", lambda: 1 << 20)
    with started(doubled, 2, pool=pool) as loader:
        (one,) = loader.take([1])
        assert loader._pool is None
        assert not one["pixels"].is_shared()
        assert not one["parts"][0].is_shared()


def test_small_items_come_through_the_pool_and_every_loader_has_its_own() -> None:
    with started(doubled, 1, pool="always") as first, started(doubled, 1, pool="always") as second:
        one, other = first.take([4]), second.take([4])
        assert len(first._packed) == len(second._packed) == 1
        one[0]["pixels"].zero_()
        assert other[0]["pixels"].tolist() == [8, 8]
        assert not first.holds_pinned_pool  # that is the locked one
        first.done([4])
        assert not first._packed


@pytest.mark.parametrize(
    ("ahead", "shm", "prefetch"), [(0, 1 << 34, 2), (32, 1 << 34, 16), (1000, 1 << 34, 64), (1000, 1 << 20, 2)]
)
def test_a_batch_is_prepared_ahead_where_it_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch, ahead: int, shm: int, prefetch: int
) -> None:
    monkeypatch.setattr(loader_module, "free_shared_bytes", lambda: shm)
    settings = LoaderSettings(num_workers=2, prefetch_factor=2, ahead=ahead, item_bytes=1 << 18)
    assert Loader(doubled, ORDER, settings)._prefetch(2) == prefetch


def pair(item: int) -> tuple[int, Any]:
    return item, np.full(2, item)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_is_what_it_was_prepared_as_wherever_that_was(workers: int) -> None:
    with started(pair, workers) as loader:
        ((number, array),) = taken = loader.take([4])
    assert isinstance(taken[0], tuple)
    assert isinstance(array, np.ndarray)
    assert (number, array.tolist()) == (4, [4, 4])


def test_starting_processes_draws_nothing_from_the_generator_of_the_run() -> None:
    before = torch.get_rng_state()
    with started(doubled, 1) as loader:
        loader.take([4])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_done_is_forgotten() -> None:
    calls: list[int] = []

    def counted(item: int) -> int:
        calls.append(item)
        return item

    with started(counted, 0) as loader:
        assert loader.take([1, 4]) == [1, 4]
        assert loader.take([1, 4]) == [1, 4]
        assert calls == [1, 4]
        loader.done([1, 4])
        assert loader._ready == {}
        loader.take([1])
        assert calls == [1, 4, 1]


def own_process(item: int) -> int:
    time.sleep(0.01)
    return os.getpid() if get_worker_info() is not None else -1


def test_a_worker_that_is_killed_is_replaced_by_this_process_and_noted() -> None:
    with started(own_process, 2, list(range(40))) as loader:
        (pid,) = loader.take([0])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:  # torch would raise here, in the middle of anything
            pass
        pids = loader.take(list(range(1, 40)))
    assert len(pids) == 39
    assert pids[-1] == -1
    assert len(loader.notes) == 1
    assert "a loading process was lost (DataLoader worker" in loader.notes[0]
    assert "in this one from here on" in loader.notes[0]


def test_workers_end_with_an_interrupt_and_do_not_hear_it_themselves() -> None:
    loader = started(own_process, 2, list(range(40)))
    pids: set[int] = set()
    with pytest.raises(KeyboardInterrupt):
        _interrupted(loader, pids)
    assert loader.notes == []
    assert -1 not in pids
    assert len(pids) == 2
    gone = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < gone, "a loading process was left behind"
        time.sleep(0.02)


def _interrupted(loader: Loader, pids: set[int]) -> None:
    with loader:
        pids.update(loader.take([0, 1, 2, 3]))
        for pid in pids:
            os.kill(pid, signal.SIGINT)  # Ctrl-C goes to the whole group
        pids.update(loader.take(list(range(4, 10))))
        raise KeyboardInterrupt


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "items", "cores", "workers"),
    [
        (0.0005, 100_000, 8, 0),  # next to nothing an item
        (0.01, 100, 8, 0),  # over before the processes are there
        (0.003, 10_000, 8, 5),  # 1,500 a second take five
        (0.01, 10_000, 8, 6),
        (0.5, 10_000, 8, 6),  # as many as the machine has cores, but for two: one of them feeds the device
        (0.5, 10_000, 4, 3),
        (0.5, 10_000, 64, 16),
        (3.0, 2, 8, 2),  # no more than items
        (0.5, 10_000, 1, 0),
        (0.5, 0, 8, 0),
    ],
)
def test_the_number_of_workers_follows_a_short_measurement(
    monkeypatch: pytest.MonkeyPatch, seconds: float, items: int, cores: int, workers: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(loader_module, "time", clock)
    prepared: list[int] = []

    def prepare(item: int) -> None:
        prepared.append(item)
        clock.now += seconds
        if item == 1:
            raise ValueError("an item that cannot be prepared is measured like any other")

    assert suggest_workers(prepare, range(items), cores=cores) == workers
    assert len(prepared) <= 3


def test_a_measurement_survives_an_item_that_takes_all_memory() -> None:
    def prepare(item: int) -> None:
        raise MemoryError

    assert suggest_workers(prepare, range(100), cores=8) == 0
    with started(prepare, 0) as loader, pytest.raises(MemoryError):
        loader.take([0])


def lacks_a_library(item: int) -> None:
    raise RequestError("images need Pillow: pip install pillow")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_the_request_is_no_items_own_failure(workers: int) -> None:
    with started(lacks_a_library, workers) as loader, pytest.raises(RequestError, match=r"^images need Pillow"):
        loader.take([4])


def test_the_warning_about_threads_and_forks_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later give it where a process with threads starts another; warnings are errors here."""
    fork = os.fork

    def warned() -> int:
        text = "This process (pid=7) is multi-threaded, use of fork() may lead to deadlocks in the child."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return fork()

    monkeypatch.setattr(os, "fork", warned)
    with started(doubled, 1) as loader:
        assert loader.take([1])[0]["name"] == "item 1"


def test_more_processes_than_cores_start_without_a_warning() -> None:
    """Warnings are errors here; samples that wait for a disk or the network need more processes than cores."""
    many = len(os.sched_getaffinity(0)) + 1
    with started(doubled, many) as loader:
        assert loader.take([4])[0]["name"] == "item 4"


def test_a_chosen_number_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "suggest_workers", lambda *_: 0)
    with Loader(doubled, ORDER, LoaderSettings()) as loader:
        assert loader.workers == 0


def test_workers_read_files_as_this_process_would(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("there")

    def read(item: int) -> str:
        return (tmp_path / str(item)).read_text()

    with started(read, 1, [0, 1]) as loader:
        found, missing = loader.take([0, 1])
    assert found == "there"
    assert isinstance(missing, NotPrepared)
    assert missing.message.startswith("FileNotFoundError")


def megabyte(item: int) -> torch.Tensor:
    return torch.full((1 << 18,), float(item))


@pytest.mark.parametrize(("free", "workers"), [(64 << 20, 2), (8 << 20, 1), (2 << 20, 0)])
def test_no_more_processes_than_shared_memory_holds_samples_of(
    monkeypatch: pytest.MonkeyPatch, free: int, workers: int
) -> None:
    """A container has 64 MB of it unless it was asked for more, and a process that meets the end of it is killed."""
    monkeypatch.setattr(loader_module, "free_shared_bytes", lambda: free)
    settings = LoaderSettings(num_workers=2, prefetch_factor=4, item_bytes=1 << 20)
    with Loader(megabyte, range(12), settings) as loader:
        assert loader.workers == workers
        assert [float(one[0]) for one in loader.take(range(12))] == list(range(12))
    assert bool(loader.notes) is (workers < 2)
    if workers < 2:
        assert f"hold what {workers} loading processes prepare, not 2" in loader.notes[0]
        assert "--shm-size" in loader.notes[0]


def test_a_loader_that_cannot_start_gives_back_what_it_was_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Loader, workers: int) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(Loader, "_start", broken)
    with pytest.raises(OSError, match="no more processes"), Loader(doubled, ORDER, LoaderSettings(num_workers=2)):
        pass
