"""Ranks that are there, failed, or are gone, told by what they left in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RankError
from brim.ranks import agreement as agreement_module
from brim.ranks import presence
from brim.ranks.agreement import Agreement
from brim.ranks.presence import Presence, WaitWatcher
from brim.ranks.world import World


class Store(dict[str, str]):
    """As torch's store, in memory; `broken` as one whose host has died."""

    broken = False

    def set(self, key: str, value: str) -> None:
        self._work()
        self[key] = value

    def get(self, key: str) -> Any:  # type: ignore[override]
        self._work()
        return self[key]

    def check(self, keys: list[str]) -> bool:
        self._work()
        return all(key in self for key in keys)

    def _work(self) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer\nmore")


def join(store: Store, rank: int, size: int = 2) -> Presence:
    return Presence(store, World(rank, size, rank), "votes")


def left_by(store: Store, rank: int, **changed: Any) -> None:
    """Change what a rank has said of itself."""
    key = f"votes/facts/{rank}"
    store[key] = json.dumps(json.loads(store[key]) | changed)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def other(store: Store) -> Any:
    """Rank 1, alive."""
    rank = join(store, 1)
    rank.start()
    yield rank
    rank.stop()


def test_a_living_rank_is_no_trouble(store: Store, other: Presence) -> None:
    rank = join(store, 0)
    assert rank.gone() is None
    assert rank.failure() is None


def test_a_failed_rank_is_reported_with_its_own_message_and_exit_code(store: Store, other: Presence) -> None:
    other.report_failure("no such file", 2)
    trouble = join(store, 0).failure()
    assert trouble is not None
    error = trouble.error("; stopped")
    assert (str(error), error.exit_code) == ("rank 1: no such file; stopped", 2)
    assert error.__cause__ is None


def test_a_process_that_has_ended_on_this_machine_is_gone_at_once(store: Store, other: Presence) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left_by(store, 1, process=ended.pid, log="logs/1/stderr.log")
    trouble = join(store, 0).gone()
    assert trouble is not None
    assert trouble.message == f"its process {ended.pid} has ended without a message (its log: logs/1/stderr.log)"
    assert trouble.error().exit_code == 4


def test_a_process_that_waits_for_its_parent_to_notice_is_gone_too(store: Store, other: Presence) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    with zombie.stdout:
        zombie.stdout.read()  # it has closed its output; its end is not waited for
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    left_by(store, 1, process=zombie.pid)
    assert join(store, 0).gone() is not None
    zombie.wait()


def test_a_rank_elsewhere_is_gone_when_its_signs_of_life_stay_away(
    store: Store, other: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by(store, 1, machine="elsewhere", process=2**22)
    rank = join(store, 0)
    clock = 1000.0
    monkeypatch.setattr(presence.time, "monotonic", lambda: clock)
    assert rank.gone() is None
    clock += presence.SILENT_SECONDS + 1
    store["votes/beat/1"] = "77"
    assert rank.gone() is None, "it has beaten since"
    clock += presence.SILENT_SECONDS + 1
    trouble = rank.gone()
    assert trouble is not None
    assert "no sign of life for 120 s" in trouble.message


def test_a_store_that_died_with_rank_0_makes_everyone_speak(store: Store, other: Presence) -> None:
    rank = join(store, 2, size=3)
    store.broken = True
    trouble = rank.gone()
    assert trouble is not None
    assert "common store is gone (Connection reset by peer)" in trouble.message
    assert isinstance(trouble.error().__cause__, Exception)
    store.broken = False


def test_a_busy_rank_learns_of_a_failure_at_its_next_check(
    store: Store, other: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = Agreement(patient=True)
    agreement.check()  # alone there is nobody to look at
    agreement._presence = join(store, 0)
    clock = 1000.0
    monkeypatch.setattr(agreement_module.time, "monotonic", lambda: clock)
    agreement.check()
    other.report_failure("no such file", 2)
    agreement.check()  # it has looked just now
    clock += agreement_module.FAILURE_CHECK_SECONDS
    with pytest.raises(RankError, match="rank 1: no such file") as caught:
        agreement.check()
    assert caught.value.exit_code == 2


def test_a_rank_that_ends_before_all_have_arrived_is_named_at_once(store: Store) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store["arrived/1"] = json.dumps(presence._own_facts() | {"process": ended.pid, "host": "here"})
    with pytest.raises(RankError, match=rf"rank 1 \(process {ended.pid} on here\) ended before all 3 ranks"):
        presence.await_arrival(store, World(0, 3, 0), WaitWatcher(), 60)


def test_torchruns_log_of_a_rank_is_named_if_it_writes_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for expected in (None, str(tmp_path / "stderr.log")):
        rank = join(store, 0)
        rank.start()
        rank.stop()
        assert json.loads(store["votes/facts/0"])["log"] == expected
        (tmp_path / "stderr.log").touch()
