"""Two real processes on loopback: they agree, they fail together, and none waits for one that is gone.

The module is also the program that each process runs: `python test_agreement.py SCENARIO OUTPUT`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.errors import BrimError, RankError, RequestError
from brim.ranks import presence
from brim.ranks.agreement import Agreement, Vote, stop_signal_as_error
from brim.ranks.world import World


def raise_(error: Exception) -> Any:
    raise error


def caught(function: Callable[[], Any]) -> dict[str, Any]:
    """What came of a call: the result, or the error as a rank would show it."""
    try:
        return {"value": function()}
    except BrimError as error:
        return {"error": str(error), "exit_code": error.exit_code, "cause": type(error.__cause__).__name__}


def on_all(agreement: Agreement, function: Callable[[], Any]) -> list[Any]:
    """What every rank's call gives."""
    with agreement.step(object) as step:
        step.value = function()
    return step.values


def votes(rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {}
    with Agreement(timeout_seconds=30) as agreement:
        found["world"] = [agreement.world.rank, agreement.world.size]
        found["values"] = on_all(agreement, lambda: {"rank": rank, "text": "é" * (1 + 50 * rank), "none": None})
        one = (lambda: raise_(ValueError("no such column"))) if rank == 1 else (lambda: 5)
        found["one_fails"] = caught(lambda: on_all(agreement, one))
        both = RequestError("fix it") if rank == 0 else OSError("disk")
        found["both_fail"] = caught(lambda: agreement.gather(Vote(error=both)))
        found["not_json"] = caught(lambda: agreement.gather(Vote(value=object() if rank == 1 else 1)))
        found["afterwards"] = agreement.gather(Vote(value=rank))
    found["left_initialised"] = dist.is_initialized()
    return found


def alone_in_ddp(rank: int) -> dict[str, Any]:
    """Rank 0 alone steps inside `without_collectives`; then both make an ordinary step together."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn

    from brim.ranks.unwrap import communication_bytes, without_collectives

    dist.init_process_group("gloo")  # as a user's own script does
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    reference = copy.deepcopy(plain)
    normalised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    torch.manual_seed(rank)
    batch = torch.randn(6, 4)

    def gradients(net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        net(batch).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    def step_together() -> list[torch.Tensor]:
        wrapped.module.load_state_dict(plain.state_dict())
        return gradients(wrapped)

    first = step_together()
    found: dict[str, Any] = {"bytes": [communication_bytes([plain]), communication_bytes([wrapped])]}
    if rank == 0:
        wrapped.module.load_state_dict(plain.state_dict())
        attributes = sorted(vars(wrapped))
        with without_collectives([wrapped, normalised]):
            local = gradients(wrapped)
            synced = gradients(normalised)
        expected = gradients(reference)
        found["local"] = all(map(torch.equal, local, expected))
        found["sync_batch_norm"] = all(map(torch.allclose, synced, expected))
        found["averaged_differs"] = not all(map(torch.allclose, local, first))
        found["restored"] = sorted(vars(wrapped)) == attributes and "forward" not in vars(normalised[1])
    found["step_repeats"] = all(map(torch.equal, step_together(), first))
    found["average"] = [gradient.flatten().tolist() for gradient in first]
    static = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    try:
        with without_collectives([static]):
            pass
    except RequestError as error:
        found["static_graph"] = str(error)
    return found


def inside_users_group(rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    with Agreement(timeout_seconds=30) as agreement:
        values = agreement.gather(Vote(value=rank))
    return {"values": values, "left_initialised": dist.is_initialized()}


def death(rank: int) -> dict[str, Any]:
    """Rank 1 dies without a message, inside the user's group."""
    found: dict[str, Any] = {}
    with Agreement(timeout_seconds=15) as agreement:
        agreement.gather(Vote())
        if rank == 1:
            os._exit(1)
        started = time.monotonic()
        found["lost"] = caught(lambda: agreement.gather(Vote(value=1)))
        found["lost_again"] = caught(lambda: agreement.gather(Vote(value=1)))
        found["own_error"] = caught(lambda: agreement.gather(Vote(error=RequestError("mine"))))
        found["seconds"] = time.monotonic() - started
    return found


def silence(rank: int) -> dict[str, Any]:
    """Rank 1 is alive but late: rank 0 gives it up, leaves, and takes the store with it."""
    with Agreement(timeout_seconds=2) as agreement:
        agreement.gather(Vote())
        if rank == 1:
            time.sleep(5)
        started = time.monotonic()
        lost = caught(lambda: agreement.gather(Vote(value=1)))
        return {"lost": lost, "seconds": time.monotonic() - started}


def late_start(rank: int) -> dict[str, Any]:
    """Rank 1 comes to the first agreement of all a while after rank 0."""
    presence.NOTICE_SECONDS, presence.WAIT_CHECK_SECONDS = 0.5, 0.1
    rank_0_is_there = Path(f"{sys.argv[2]}.rank-0-is-there")
    if rank == 0:
        rank_0_is_there.touch()
    else:
        while not rank_0_is_there.exists():
            time.sleep(0.05)
        time.sleep(3)
    with Agreement(timeout_seconds=40, purpose="a late start"):
        return {"process": os.getpid()}


def late_vote(rank: int) -> dict[str, Any]:
    """Rank 1 hangs for a while, alive, where rank 0 waits for its vote: with a time limit, and without one."""
    presence.NOTICE_SECONDS, presence.WAIT_CHECK_SECONDS = 0.5, 0.1
    for patient in (False, True):
        purpose = "a patient vote" if patient else "a limited vote"
        with Agreement(timeout_seconds=40, patient=patient, purpose=purpose) as agreement:
            agreement.gather(Vote())
            if rank == 1:
                time.sleep(3)
            agreement.gather(Vote())
    presence.NOTICE_SECONDS = 30.0
    return {"process": os.getpid()}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (votes, alone_in_ddp, inside_users_group, death, silence, late_start, late_vote)
}


def main(scenarios: str, output: str) -> None:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name in scenarios.split(","):
        found[name] = SCENARIOS[name](rank)
        Path(f"{output}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a group whose peer died cannot be taken down in order


def run_pair(folder: Path, *scenarios: str) -> list[dict[str, Any]]:
    """Run the scenarios on two ranks; what each rank found, by scenario."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    output = folder / "found"
    command = [sys.executable, __file__, ",".join(scenarios), str(output)]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE)
        for r in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    files = [Path(f"{output}.{r}") for r in (0, 1)]
    assert all(file.exists() for file in files), errors
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert list(found[0]) == list(scenarios), errors[0]
    for one, error in zip(found, errors, strict=True):
        one["warnings"] = [line for line in error.splitlines() if "has waited" in line]
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    scenarios = ("late_start", "late_vote", "votes", "alone_in_ddp", "inside_users_group", "death")
    return run_pair(tmp_path_factory.mktemp("ranks"), *scenarios)


def test_every_rank_gets_every_value_in_rank_order(pair: list[dict[str, Any]]) -> None:
    first, second = (found["votes"] for found in pair)
    assert (first["world"], second["world"]) == ([0, 2], [1, 2])
    expected = [{"rank": r, "text": "é" * (1 + 50 * r), "none": None} for r in (0, 1)]
    assert first["values"] == second["values"] == expected


def test_one_failing_rank_makes_all_raise_the_same_error(pair: list[dict[str, Any]]) -> None:
    first, second = (found["votes"]["one_fails"] for found in pair)
    assert first["error"] == second["error"] == "rank 1: ValueError: no such column"
    assert first["exit_code"] == second["exit_code"] == 4
    assert (first["cause"], second["cause"]) == ("NoneType", "ValueError")


def test_the_first_failing_rank_gives_message_and_exit_code(pair: list[dict[str, Any]]) -> None:
    first, second = (found["votes"]["both_fail"] for found in pair)
    assert first["error"] == second["error"] == "rank 0: fix it (1 other rank failed too)"
    assert first["exit_code"] == second["exit_code"] == RequestError.exit_code
    assert (first["cause"], second["cause"]) == ("RequestError", "OSError")


def test_a_value_that_is_not_json_fails_on_all_ranks_and_keeps_the_group(pair: list[dict[str, Any]]) -> None:
    first, second = (found["votes"] for found in pair)
    assert first["not_json"]["error"] == second["not_json"]["error"]
    assert "rank 1: TypeError" in first["not_json"]["error"]
    assert first["afterwards"] == second["afterwards"] == [0, 1]


def test_a_default_group_is_destroyed_only_by_its_creator(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["votes"]["left_initialised"] is False
        assert found["inside_users_group"] == {"values": [0, 1], "left_initialised": True}


def test_one_rank_alone_gets_local_gradients_and_leaves_ddp_as_it_was(pair: list[dict[str, Any]]) -> None:
    first, second = (found["alone_in_ddp"] for found in pair)
    for fact in ("local", "sync_batch_norm", "averaged_differs", "restored", "step_repeats"):
        assert first[fact] is True, fact
    assert second["step_repeats"] is True
    assert first["average"] == second["average"]
    assert first["bytes"] == second["bytes"] == [(16 + 4 + 4 + 4 + 4 + 1) * 4, 0]
    assert "search before wrapping" in first["static_graph"]


def test_a_dead_rank_is_named_long_before_the_timeout(pair: list[dict[str, Any]]) -> None:
    found = pair[0]["death"]
    assert "rank 1 did not answer" in found["lost"]["error"]
    assert found["lost"]["exit_code"] == RankError.exit_code == 4
    assert found["lost_again"]["error"] == found["lost"]["error"]
    assert found["own_error"]["error"].startswith("rank 0: mine; besides")
    assert (found["own_error"]["exit_code"], found["own_error"]["cause"]) == (2, "RequestError")
    assert found["seconds"] < 10


def test_a_rank_that_waits_long_warns_once_for_whom_and_how_long_at_most(pair: list[dict[str, Any]]) -> None:
    first, second = (found["warnings"] for found in pair)
    assert second == [], "rank 0 says it for all"
    start, limited, patient = first
    missing = f"rank 1 (process {pair[1]['late_vote']['process']} on {socket.gethostname()})"
    assert "for rank 1 to start" in start
    assert "gives up after 40 s" in start
    assert f"{missing} in a limited vote" in limited
    assert "gives up after 40 s" in limited
    assert f"{missing} in a patient vote" in patient
    assert "no time limit while a rank's process lives" in patient


def test_a_silent_rank_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    first, second = (found["silence"] for found in run_pair(tmp_path, "silence"))
    assert "rank 1 did not answer" in first["lost"]["error"]
    assert first["lost"]["exit_code"] == second["lost"]["exit_code"] == 4
    assert 1 < first["seconds"] < 30  # it would wait for ever
    assert second["seconds"] < 30


def test_a_rank_whose_peers_never_come_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    missing = "2 ranks did not all connect within 1 s: rank 1 did not"
    with pytest.raises(RankError, match=missing), Agreement(timeout_seconds=1):
        pass
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RequestError, match="MASTER_PORT"), Agreement(timeout_seconds=1):
        pass


def test_where_rank_0_never_comes_the_others_name_it_and_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(presence, "NOTICE_SECONDS", 0.3)
    monkeypatch.setattr(presence, "WAIT_CHECK_SECONDS", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="2 ranks did not all connect within 2 s"), Agreement(timeout_seconds=2):
        pass
    (line,) = [record.getMessage() for record in caplog.records if record.name == "brim.ranks"]
    assert f"rank 1 of 2 has waited 0 s for rank 0 at 127.0.0.1:{port}" in line
    assert "gives up after 2 s" in line


def test_alone_nothing_is_started_and_errors_keep_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    value = object()
    with Agreement() as agreement:
        assert agreement.world.size == 1
        assert agreement.gather(Vote(value=value)) == [value]
        assert on_all(agreement, lambda: (1, 2)) == [(1, 2)]
        with pytest.raises(ZeroDivisionError):
            on_all(agreement, lambda: 1 // 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_processes_forked_by_a_rank_end_by_the_stop_signal() -> None:
    """A pool that ends its workers by it waits for them: one that took it for an error of this rank would stay."""
    agreement = Agreement()
    agreement.world = World(rank=0, size=2, local_rank=0)
    usual = signal.getsignal(signal.SIGTERM)
    with stop_signal_as_error(agreement):
        assert signal.getsignal(signal.SIGTERM) is not usual
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(signal.getsignal, (signal.SIGTERM,)) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is usual


if __name__ == "__main__":
    main(*sys.argv[1:])
