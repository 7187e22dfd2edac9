"""Two gloo ranks under Lightning's ddp on the CPU: one size for both, and none waits for one that failed.

The module is also the program that each rank runs: `python -m tests.integrations.test_lightning_ranks OUTPUT`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

KIB = 1024


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def scenarios() -> dict[str, Any]:
    """What this rank saw; rank 1 may use less memory than rank 0."""
    import torch
    from torch import nn

    from brim.integrations.lightning import BatchSize
    from tests.integrations.lightning_modules import Plain, Remember, differences, samples, trainer

    class Gathering(Plain):
        """Has buffers that ddp broadcasts, and gathers in its step: collectives that a trial must not enter."""

        def __init__(self) -> None:
            super().__init__(2, data=samples(256))
            self.net.insert(1, nn.BatchNorm1d(64))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.gathered = tuple(self.all_gather(loss.detach()).shape)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

    def ddp(*callbacks: Any, **settings: Any) -> Any:
        return trainer(*callbacks, devices=2, strategy="ddp", use_distributed_sampler=True, **settings)

    limit = (512, 160)[rank()] * KIB
    before, after = Remember(), Remember()
    callback = BatchSize(objective="largest", memory_limit=limit)
    module = Gathering()
    ran = ddp(before, callback, after, limit_val_batches=0)
    ran.fit(module)
    found: dict[str, Any] = {
        "sizes": [callback.batch_size, module.batch_size, ran.train_dataloader.batch_size],
        "per_rank": callback.plan.batch_sizes_per_rank,
        "changed": list(differences(before.states["fit"], after.states["fit"])),
        "steps": ran.global_step,
        "gathered": module.gathered,
        "weights": float(sum(parameter.double().sum() for parameter in module.parameters())),
    }

    validated = BatchSize(objective="largest", memory_limit=limit)
    ddp(validated).validate(module, verbose=False)
    found["validated"] = [validated.batch_size, validated.plan.batch_sizes_per_rank]

    kept = Plain(32, data=samples(256))
    ran = ddp(BatchSize(effective_batch=64, max_batch_size=8, objective="largest"), limit_val_batches=0)
    ran.fit(kept)
    found["effective"] = [kept.batch_size, ran.accumulate_grad_batches, ran.global_step]

    class Broken(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            if rank() == 1:
                raise ValueError("column 7 is missing")
            return super().loss(batch)

    try:
        ddp(BatchSize(max_batch_size=8), limit_val_batches=0).fit(Broken(2))
    except Exception as error:
        found["error"] = [type(error).__name__, str(error)]

    class Pressed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if rank() == 1 and batch_idx == 1 and not self.trainer.sanity_checking and callback.plan is not None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)

    callback = BatchSize(max_batch_size=8)
    try:
        ddp(callback, limit_val_batches=0).fit(Pressed(2))
    except Exception as error:
        found["lost"] = [type(error).__name__, *getattr(error, "__notes__", [])]
    return found


def main(output: str) -> None:
    warnings.simplefilter("ignore")
    found = scenarios()
    Path(f"{output}.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # as a rank that is lost does: without a farewell to the group


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "NODE_RANK": "0",
        "XDG_CACHE_HOME": str(folder / "cache"), "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.test_lightning_ranks", str(folder / "found")],
            env=os.environ | shared | {"LOCAL_RANK": str(place)},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
        )
        for place in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((folder / f"found.{place}").read_text(encoding="utf-8")) for place in (0, 1)]


def test_both_ranks_train_at_the_size_that_the_smaller_one_can_take(ranks: list[dict[str, Any]]) -> None:
    per_rank = ranks[0]["per_rank"]
    assert per_rank == ranks[1]["per_rank"]
    assert per_rank[1] < per_rank[0]
    for one in ranks:
        assert one["sizes"] == [per_rank[1]] * 3
        assert one["steps"] == -(-128 // per_rank[1])


def test_trials_on_ranks_leave_everything_as_it_was(ranks: list[dict[str, Any]]) -> None:
    assert [one["changed"] for one in ranks] == [[], []]
    assert ranks[0]["weights"] == ranks[1]["weights"]  # they were averaged in every step
    assert [one["gathered"] for one in ranks] == [[2], [2]]


def test_both_ranks_validate_at_one_size(ranks: list[dict[str, Any]]) -> None:
    (size, per_rank), other = ranks[0]["validated"], ranks[1]["validated"]
    assert other == [size, per_rank]
    assert size == min(per_rank)


def test_an_effective_batch_is_that_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [one["effective"] for one in ranks] == [[8, 4, 4]] * 2  # 8 x 4 x 2 ranks


def test_where_one_rank_fails_both_do_with_the_same_message(ranks: list[dict[str, Any]]) -> None:
    assert [one["error"] for one in ranks] == [["RankError", "rank 1: ValueError: column 7 is missing"]] * 2


def test_a_rank_that_runs_out_of_memory_later_is_named_and_no_other_waits_for_it(ranks: list[dict[str, Any]]) -> None:
    kind, note = ranks[1]["lost"]
    assert kind == "OutOfMemoryError"
    assert "rank 1 of 2 ran out of memory" in note
    assert "continue from the last checkpoint" in note
    assert "lost" in ranks[0]


if __name__ == "__main__":
    main(sys.argv[1])
