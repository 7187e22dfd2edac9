"""`brim.accumulate` on two real ranks with `DistributedDataParallel`: one process's gradients, and no rank left behind.

The module is also the program of a rank: `python test_own_loop_ranks.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script by its ranks

import brim

ENOUGH_SECONDS = 120.0  # many times what it takes; a rank that waits for ever takes longer
COUNT, WINDOW = 41, 16  # three windows, of which the last has nine samples: four and five


def network(*, normalise: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(16)] if normalise else []
    return nn.Sequential(nn.Linear(6, 16), *norm, nn.ReLU(), nn.Linear(16, 3)).double()


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(COUNT, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (COUNT,), generator=draw))


def loss_of(
    model: nn.Module, fault: Callable[[int, int], Exception | None] = lambda call, length: None
) -> Callable[[Any], Any]:
    calls = 0

    def loss(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = functional.cross_entropy(model(batch[0]), batch[1])
        if (error := fault(calls, len(batch[0]))) is not None:
            raise error
        return found

    return loss


def steps(model: nn.Module, loss: Callable[[Any], Any]) -> dict[str, Any]:
    """Two epochs of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    windows = brim.accumulate(
        loss, rows(), model=model, effective_batch_size=WINDOW, batch_size=8, shuffle=True, optimizer=optimizer,
        note=lambda line: None,
    )  # fmt: skip
    losses = []
    for _ in range(2):
        for mean in windows:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(mean))
    state = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state, "oom_events": windows.oom_events}


def rank() -> int:
    return int(os.environ["RANK"])


def storm() -> dict[str, Any]:
    """Rank 1 alone runs out of memory: twice in its first window, and in the second."""
    model = DistributedDataParallel(network())

    def fault(call: int, length: int) -> Exception | None:
        failing = rank() == 1 and length > 1 and call in (1, 3, 9)
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB") if failing else None

    return steps(model, loss_of(model, fault))


def statistics() -> dict[str, Any]:
    model = DistributedDataParallel(network(normalise=True))
    return steps(model, loss_of(model))


def own_model() -> dict[str, Any]:
    """Not wrapped: gradients are this rank's, and nobody waits for anybody."""
    model = network()
    windows = brim.accumulate(loss_of(model), model=model)
    for _ in range(1 + rank()):
        windows(rows()[: 8 + rank()])
    return {"windows": 1 + rank()}


def broken() -> dict[str, Any]:
    """An error of rank 1's own, while rank 0 is well."""
    model = DistributedDataParallel(network())
    try:
        steps(model, loss_of(model, lambda call, length: ValueError("a bug") if rank() == 1 and call == 2 else None))
    except brim.RankError as error:
        return {"error": str(error), "gradients": [parameter.grad is not None for parameter in model.parameters()]}
    return {}


def sharded() -> dict[str, Any]:
    """Sizes of a rank's own would leave the others waiting inside a forward."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    try:
        brim.accumulate(loss_of(model), rows(), model=model, effective_batch_size=WINDOW)
    except brim.RequestError as error:
        return {"error": str(error)}
    return {}


SCENARIOS = {one.__name__: one for one in (storm, statistics, own_model, broken, sharded)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    from tests.rank_processes import run_ranks  # a rank runs this file without the package around it

    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    run_ranks([__file__, str(folder)], seconds=ENOUGH_SECONDS, environment={"PYTHONPATH": paths})
    return [json.loads((folder / f"found.{one}").read_text(encoding="utf-8")) for one in range(2)]


def test_two_ranks_learn_what_one_process_learns_alone_though_one_runs_out_of_memory(
    ranks: list[dict[str, Any]],
) -> None:
    model = network()
    alone = steps(model, loss_of(model))
    for found in ranks:
        assert found["storm"]["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        for name, value in alone["state"].items():
            torch.testing.assert_close(torch.tensor(found["storm"]["state"][name]), torch.tensor(value))
    assert [found["storm"]["oom_events"] for found in ranks] == [0, 3]


def test_statistics_are_those_of_rank_zero_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["statistics"] for found in ranks)
    assert first["state"] == second["state"]
    assert any(first["state"]["1.running_mean"])


def test_a_model_that_is_not_wrapped_is_its_ranks_own(ranks: list[dict[str, Any]]) -> None:
    assert [found["own_model"]["windows"] for found in ranks] == [1, 2]


def test_a_model_that_is_sharded_over_the_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "is sharded over ranks" in found["sharded"]["error"]


def test_an_error_of_one_rank_is_raised_on_all_and_no_gradient_is_left(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "rank 1: ValueError: a bug" in found["broken"]["error"]
        assert not any(found["broken"]["gradients"])


def main() -> None:
    torch.distributed.init_process_group("gloo")
    found = {name: scenario() for name, scenario in SCENARIOS.items()}
    Path(sys.argv[1], f"found.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
