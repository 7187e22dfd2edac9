"""Two real ranks on loopback: the same weights as one process alone, whatever runs out of memory where; and no hang.

The module is also the program of a rank: `python test_ranks.py FOLDER SCENARIO…`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script by its ranks

from brim.errors import BrimError, RequestError
from brim.memory.devices import CpuMemory
from brim.training import run_files
from brim.training.listener import TrainListener
from brim.training.objective import Batch, Classification, LossSum
from brim.training.run import run_training
from tests.monitor.sampling import published_ranks
from tests.training.training_runs import (
    StopsAt,
    Watcher,
    largest_difference,
    losses,
    record_of,
    request_of,
    run,
    settings_of,
    weights,
    write_features,
)

SHARDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)  # before, gloo cannot deal shards
ENOUGH_SECONDS = 120.0  # many times what it takes; a rank that waits for ever takes longer
STORM = {"hp__batch_size": 4, "hp__effective_batch": 32, "hp__epochs": 20}
INJECTED = 200  # out-of-memory errors over both ranks, at least


class Storm:
    """Raises out of memory at random micro-steps, in the forward or after a part of the backward."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.count = 0
        self.plain = Classification.loss

    def loss(self, objective: Classification, model: nn.Module, batch: Batch) -> LossSum:
        found = self.plain(objective, model, batch)
        assert batch.labels is not None
        if len(batch.labels) > 1 and self.draw.random() < 0.5:
            self.count += 1
            if self.count % 2:  # some gradients are there already, others are not
                torch.autograd.backward(found.total, inputs=list(model.parameters())[:1], retain_graph=True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found


def rank_number() -> int:
    return int(os.environ["RANK"])


class SeesRanks(Watcher):
    """Reads on rank 0 which processes the run publishes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.pids: list[int] = []

    def started(self, total_samples: int, done: int) -> None:
        self.pids = published_ranks(self.folder) if rank_number() == 0 else [os.getpid()]


# What each rank does, in this order, in one process: starting one takes longer than all of it.


def plain(folder: Path, features: Path) -> Any:
    run(settings_of(features, **STORM), folder / "plain")


def storm(folder: Path, features: Path) -> Any:
    """A fixed size: every window is tried in full again, so that it can fail again."""
    injected = Storm(seed=rank_number())
    CpuMemory.release = lambda self, thorough=True: None  # type: ignore[method-assign]  # a fifth of a second each
    Classification.loss = lambda self, model, batch: injected.loss(self, model, batch)  # type: ignore[method-assign]
    try:
        run(settings_of(features, **STORM), folder / "storm", fixed=True)
    finally:
        Classification.loss = injected.plain  # type: ignore[method-assign]
    return injected.count


def limited(folder: Path, features: Path) -> Any:
    """A real limit that only rank 1 has: it repeats its windows in smaller micro-batches, alone."""
    nested = settings_of(features, **(STORM | {"hp__batch_size": 16, "hp__epochs": 2}))
    if rank_number() == 1:
        nested["training"]["memory_limit"] = "9000"
    run(nested, folder / "limited")


def unlimited(folder: Path, features: Path) -> Any:
    run(settings_of(features, **(STORM | {"hp__batch_size": 16, "hp__epochs": 2})), folder / "unlimited")


def resumed(folder: Path, features: Path) -> Any:
    """Stopped after two epochs, then to the end."""
    nested = settings_of(features, **(STORM | {"hp__epochs": 4, "model__params.dropout": 0.3}))
    run(nested, folder / "whole")
    run(nested | {"hp": nested["hp"] | {"epochs": 2}}, folder / "parts")
    run(nested, folder / "parts", resume=True)


def normalised(folder: Path, features: Path) -> Any:
    """Batch normalisation: running statistics are made one."""
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def net(num_classes: int = 3):\n"
        "    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))\n",
        encoding="utf-8",
    )
    nested = settings_of(features, model__params={}, hp__epochs=2)
    nested["model"]["type"] = f"py:{folder / 'nets.py'}:net"
    nested["data"]["type"] = "features"
    watcher = SeesRanks(folder / "normalised")
    run_training(request_of(nested), output=folder / "normalised", listener=watcher)
    return {"notes": watcher.notes, "pids": watcher.pids}


def sharded(folder: Path, features: Path) -> Any:
    """FSDP2: weights, gradients and states dealt over the ranks; stopped half-way and resumed as well."""
    nested = settings_of(
        features, **(STORM | {"hp__epochs": 4, "training__fsdp": True, "training__gradient_clip": 0.5})
    )
    run(nested, folder / "sharded")
    run(nested | {"hp": nested["hp"] | {"epochs": 2}}, folder / "sharded-parts")
    run(nested, folder / "sharded-parts", resume=True)


def sharded_auto(folder: Path, features: Path) -> Any:
    """The micro-batch is found in step with the other rank."""
    nested = settings_of(features, training__fsdp=True, hp__effective_batch=32, hp__epochs=4)
    return run(nested, folder / "sharded-auto").summary.get("micro_batch_size")


def single_samples(folder: Path, features: Path) -> Any:
    """Windows of one sample: one of the two ranks has nothing to do in each, and weights by tokens all the same."""
    (folder / "own.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(3, 1)\n"
        "    def training_loss(self, rows):\n"
        "        errors = self.layer(rows)[:, 0].square()\n"
        "        return (errors * rows[:, 0]).sum(), rows[:, 0].sum()\n"
        "def own():\n"
        "    return Own()\n"
        "def rows():\n"
        "    draw = torch.Generator().manual_seed(0)\n"
        "    held = torch.rand(20, 3, generator=draw) + 0.5\n"
        "    return lambda split: [row for row in held] if split == 'train' else None\n",
        encoding="utf-8",
    )
    nested = settings_of(features, hp__epochs=2, hp__batch_size=1, hp__effective_batch=1, model__params={})
    nested["model"]["type"] = f"py:{folder / 'own.py'}:own"
    nested["data"] = {"type": f"py:{folder / 'own.py'}:rows", "num_workers": 0}
    (folder / "single.json").write_text(json.dumps(nested), encoding="utf-8")
    run(nested, folder / "single")


def disk_is_full(folder: Path, features: Path, listener: TrainListener | None = None) -> Any:
    """Rank 0 alone writes, and cannot."""

    def no_space(*_: Any, **__: Any) -> None:
        raise RequestError("cannot write: No space left on device")

    before = run_files.save_checkpoint
    run_files.save_checkpoint = no_space  # type: ignore[assignment]
    try:
        run(settings_of(features), folder / "full", listener=listener)
    finally:
        run_files.save_checkpoint = before


def disk_is_full_after_ctrl_c(folder: Path, features: Path) -> Any:
    """The checkpoint of an interrupted run cannot be written."""
    try:
        disk_is_full(folder, features, listener=StopsAt(2))
    except KeyboardInterrupt:
        return "interrupted"


def not_a_number(folder: Path, features: Path) -> Any:
    """Rank 1's share of a window has no finite loss."""

    def poisoned(self: Classification, model: nn.Module, batch: Batch) -> LossSum:
        found = before(self, model, batch)
        return LossSum(found.total * float("nan"), found.weight) if rank_number() == 1 else found

    before = Classification.loss
    Classification.loss = poisoned  # type: ignore[method-assign]
    try:
        run(settings_of(features), folder / "nan")
    finally:
        Classification.loss = before  # type: ignore[method-assign]


def sample_fails(folder: Path, features: Path) -> Any:
    """Rank 1's model raises in the middle of a window."""

    def broken(self: Classification, model: nn.Module, batch: Batch) -> LossSum:
        if rank_number() == 1:
            raise ValueError("an odd sample")
        return before(self, model, batch)

    before = Classification.loss
    Classification.loss = broken  # type: ignore[method-assign]
    try:
        run(settings_of(features), folder / "fails")
    finally:
        Classification.loss = before  # type: ignore[method-assign]


def killed(folder: Path, features: Path) -> Any:
    """Rank 1 dies without a word in its tenth window."""

    class Doomed(Watcher):
        def note(self, line: str) -> None:
            del line

    calls = 0

    def deadly(self: Classification, model: nn.Module, batch: Batch) -> LossSum:
        nonlocal calls
        calls += 1
        if rank_number() == 1 and calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, model, batch)

    before = Classification.loss
    Classification.loss = deadly  # type: ignore[method-assign]
    nested = settings_of(features, **(STORM | {"training__checkpoint_every": 2}))
    run(nested, folder / "killed")


SCENARIOS: dict[str, Callable[[Path, Path], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        plain,
        single_samples,
        storm,
        limited,
        unlimited,
        resumed,
        normalised,
        sharded,
        sharded_auto,
        disk_is_full,
        disk_is_full_after_ctrl_c,
        not_a_number,
        sample_fails,
        killed,
    )
}


def main(folder: Path, names: list[str]) -> None:
    gc.freeze()  # the storm collects garbage 200 times: not through all that is loaded
    found: dict[str, Any] = {}
    for name in names:
        started = time.monotonic()
        try:
            found[name] = {"value": SCENARIOS[name](folder, folder / "features.npz")}
        except BrimError as error:
            found[name] = {"error": str(error), "exit_code": error.exit_code}
        found[name]["seconds"] = time.monotonic() - started
        (folder / f"found.{rank_number()}").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a group whose peer died cannot be taken down in order


def start_ranks(folder: Path, *scenarios: str) -> list[dict[str, Any]]:
    """What each of two ranks found, without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), *scenarios]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | world | loopback | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(ENOUGH_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"found.{rank}").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    write_features(folder / "features.npz", count=112)
    return folder, start_ranks(folder, *(name for name in SCENARIOS if SHARDS or not name.startswith("sharded")))


Ranks = tuple[Path, list[dict[str, Any]]]


def test_two_ranks_learn_what_one_process_learns_alone(ranks: Ranks, tmp_path: Path) -> None:
    folder, _ = ranks
    run(settings_of(folder / "features.npz", **STORM), tmp_path / "alone")
    assert largest_difference(weights(tmp_path / "alone"), weights(folder / "plain")) < 1e-10
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "alone"), losses(folder / "plain"), strict=True)) < 1e-10


def test_a_rank_without_samples_still_takes_part(ranks: Ranks, tmp_path: Path) -> None:
    folder, (first, _) = ranks
    assert "error" not in first["single_samples"]
    run(json.loads((folder / "single.json").read_text(encoding="utf-8")), tmp_path / "alone")
    assert len(losses(folder / "single")) == 40
    assert largest_difference(weights(tmp_path / "alone"), weights(folder / "single")) < 1e-10


def test_out_of_memory_at_200_random_micro_steps_changes_no_weight(ranks: Ranks) -> None:
    folder, (first, second) = ranks
    assert first["storm"]["value"] + second["storm"]["value"] >= INJECTED
    assert min(first["storm"]["value"], second["storm"]["value"]) > 50  # on both ranks
    assert largest_difference(weights(folder / "plain"), weights(folder / "storm")) < 1e-10
    summary = record_of(folder / "storm")["summary"]
    assert summary["oom_events"] == first["storm"]["value"] + second["storm"]["value"]
    assert summary["steps"] == record_of(folder / "plain")["summary"]["steps"]
    assert summary["samples"] == record_of(folder / "plain")["summary"]["samples"]


def test_a_rank_with_less_memory_repeats_its_windows_alone(ranks: Ranks) -> None:
    folder, _ = ranks
    summary = record_of(folder / "limited")["summary"]
    assert summary["oom_events"] > 0
    assert largest_difference(weights(folder / "limited"), weights(folder / "unlimited")) < 1e-10
    sizes = record_of(folder / "limited")["plan"]["batch_sizes_per_rank"]
    assert sizes[0] == sizes[1] < 16  # all ranks agree on the smallest


def test_two_ranks_resume_with_the_same_losses(ranks: Ranks) -> None:
    folder, (first, _) = ranks
    assert "error" not in first["resumed"]
    assert losses(folder / "parts") == losses(folder / "whole")
    assert largest_difference(weights(folder / "parts"), weights(folder / "whole")) == 0


def test_the_processes_of_all_ranks_are_published(ranks: Ranks) -> None:
    first, second = (rank["normalised"]["value"]["pids"] for rank in ranks[1])
    assert len(set(first)) == 2
    assert first[1:] == second


def test_running_statistics_are_averaged_over_the_ranks(ranks: Ranks) -> None:
    folder, (first, _) = ranks
    assert "error" not in first["normalised"]
    assert any("batch normalisation" in note for note in first["normalised"]["value"]["notes"])
    found = weights(folder / "normalised")
    assert torch.isfinite(found["1.running_mean"]).all()
    assert found["1.running_mean"].abs().max() > 0


@pytest.mark.skipif(not SHARDS, reason="gloo cannot deal shards in this torch")
def test_a_sharded_model_learns_what_one_process_learns_alone(ranks: Ranks, tmp_path: Path) -> None:
    folder, (first, _) = ranks
    assert "error" not in first["sharded"]
    changes = STORM | {"hp__epochs": 4, "training__gradient_clip": 0.5}
    run(settings_of(folder / "features.npz", **changes), tmp_path / "alone")
    assert largest_difference(weights(tmp_path / "alone"), weights(folder / "sharded")) < 1e-10
    alone, shards = record_of(tmp_path / "alone")["summary"], record_of(folder / "sharded")["summary"]
    assert shards["metrics"]["val_loss"]["mean"] == pytest.approx(alone["metrics"]["val_loss"]["mean"], abs=1e-10)


@pytest.mark.skipif(not SHARDS, reason="gloo cannot deal shards in this torch")
def test_a_sharded_run_resumes_with_the_same_losses(ranks: Ranks) -> None:
    folder, (first, _) = ranks
    assert losses(folder / "sharded-parts") == losses(folder / "sharded")
    assert largest_difference(weights(folder / "sharded-parts"), weights(folder / "sharded")) == 0
    assert first["sharded_auto"]["value"] >= 2


def test_an_error_on_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    _, found = ranks
    for rank in found:
        assert "rank 1: ValueError: an odd sample" in rank["sample_fails"]["error"]
        assert rank["sample_fails"]["seconds"] < 30


def test_what_only_rank_0_does_fails_on_all(ranks: Ranks) -> None:
    _, found = ranks
    for rank in found:
        for scenario in ("disk_is_full", "disk_is_full_after_ctrl_c"):
            assert rank[scenario]["error"] == "rank 0: cannot write: No space left on device"
            assert rank[scenario]["exit_code"] == 2
            assert rank[scenario]["seconds"] < 30


def test_a_nan_loss_names_the_samples_of_its_rank(ranks: Ranks) -> None:
    folder, found = ranks
    told = json.loads((folder / "nan" / "bad_batch.json").read_text(encoding="utf-8"))
    assert len(told["ids"]) == 8  # rank 1's half of the window of 16
    for rank in found:
        assert rank["not_a_number"]["exit_code"] == 1
        assert "step 1: the loss is nan" in rank["not_a_number"]["error"]


def test_a_rank_that_dies_ends_the_run_with_its_checkpoint_kept(ranks: Ranks) -> None:
    folder, (first, _) = ranks
    assert first["killed"]["exit_code"] == 4
    assert first["killed"]["seconds"] < 60
    assert f"resume=True, output='{folder / 'killed'}'" in first["killed"]["error"]
    assert json.loads((folder / "killed" / "checkpoint.json").read_text(encoding="utf-8"))["step"] > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
