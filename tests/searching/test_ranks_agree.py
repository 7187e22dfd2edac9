"""Two gloo ranks with different memory limits: one size for both in training, each its own where that is right.

The module is also the program that each rank runs: `python test_ranks_agree.py OUTPUT`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KIB = 1024


def caught(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"plan": function().to_json()}
    except Exception as error:
        return {"kind": type(error).__name__, "error": str(error), "exit_code": getattr(error, "exit_code", None)}


def search(*, mode: str, per_rank: bool = False, error: Exception | None = None) -> Any:
    """One search: rank 0 may use 64 KiB, rank 1 only 40 KiB, and a row takes 1 KiB twice; `error` is rank 1's own."""
    import torch

    from brim.searching.find import find_plan
    from brim.settings.find_settings import SearchSettings
    from brim.workloads.callables import CallableWorkload

    rank = int(os.environ["RANK"])

    def step(batch: torch.Tensor) -> torch.Tensor:
        if error is not None and rank == 1:
            raise error
        return batch * 2

    workload = CallableWorkload(step=step, make_batch=lambda n: torch.ones(n, 256), device="cpu", mode=mode)
    limit = (64, 40)[rank] * KIB
    return find_plan(
        workload, SearchSettings(objective="largest", memory_limit_bytes=limit, max_size=64, per_rank=per_rank)
    )


def in_the_users_group() -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")  # as a training script does
    found = {
        "train": caught(lambda: search(mode="train")),
        "per_rank": caught(lambda: search(mode="train", per_rank=True)),
        "forward": caught(lambda: search(mode="forward")),
        "foreign": caught(lambda: search(mode="train", error=ValueError("column 7 is missing"))),
        "afterwards": caught(lambda: search(mode="train")),
        "left_initialised": dist.is_initialized(),
    }
    dist.destroy_process_group()
    return found


def without_a_group() -> dict[str, Any]:
    return {name: caught(lambda: search(mode="train")) for name in ("first", "second", "third", "fourth")}


def main(output: str) -> None:
    import torch  # noqa: F401 — loaded, and then set aside: every probe collects garbage

    gc.freeze()
    found = in_the_users_group() | without_a_group()
    Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")


def run_pair(folder: Path, *, seconds: float) -> list[dict[str, Any]]:
    """What each of two ranks found; a pair that takes longer hangs."""
    from tests.rank_processes import run_ranks  # a rank runs this file without the package around it

    output = folder / "found"
    run_ranks([__file__, str(output)], seconds=seconds, environment={"XDG_CACHE_HOME": str(folder / "cache")})
    return [json.loads(Path(f"{output}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_pair(tmp_path_factory.mktemp("ranks"), seconds=90)


def test_training_ranks_agree_on_the_smaller_size(ranks: list[dict[str, Any]]) -> None:
    plans = [rank["train"]["plan"] for rank in ranks]
    assert [plan["batch_size"] for plan in plans] == [20, 20]
    assert [plan["batch_size_max"] for plan in plans] == [20, 20]
    assert [plan["batch_sizes_per_rank"] for plan in plans] == [[32, 20], [32, 20]]
    assert "rank 1 can take 20" in plans[0]["reason"]
    assert "all ranks use" not in plans[1]["reason"]


@pytest.mark.parametrize("search", ["per_rank", "forward"])
def test_ranks_keep_their_own_size_where_they_may(ranks: list[dict[str, Any]], search: str) -> None:
    plans = [rank[search]["plan"] for rank in ranks]
    assert [plan["batch_size"] for plan in plans] == [32, 20]
    assert [plan["batch_sizes_per_rank"] for plan in plans] == [[32, 20], [32, 20]]


def test_one_rank_with_an_error_of_its_own_makes_both_fail_alike(ranks: list[dict[str, Any]]) -> None:
    assert [rank["foreign"]["kind"] for rank in ranks] == ["RankError", "RankError"]
    assert {rank["foreign"]["error"] for rank in ranks} == {"rank 1: ValueError: column 7 is missing"}
    assert {rank["foreign"]["exit_code"] for rank in ranks} == {4}


def test_ranks_can_search_again_after_a_failure(ranks: list[dict[str, Any]]) -> None:
    assert [rank["afterwards"]["plan"]["batch_size"] for rank in ranks] == [20, 20]
    assert all(rank["left_initialised"] for rank in ranks)


def test_ranks_without_a_group_of_their_own_can_search_again_and_again(ranks: list[dict[str, Any]]) -> None:
    for name in ("first", "second", "third", "fourth"):
        assert [rank[name]["plan"]["batch_size"] for rank in ranks] == [20, 20]


if __name__ == "__main__":
    main(*sys.argv[1:])
