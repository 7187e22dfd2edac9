"""One loader for all epochs: processes that stay, numbers that do not mix epochs up, draws that follow from neither."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brim.running.loader import LoaderSettings
from brim.training.draws import drawing_from
from brim.training.epoch_loader import EpochLoader
from brim.training.items import OwnItems
from brim.training.loop import Window, epoch_order
from tests.training.training_runs import StopsAt, largest_difference, losses, run, settings_of, weights

COUNT = 12


class Draws(Sequence[Any]):
    """Samples that say where they were prepared, and what was drawn for them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, item: Any) -> Any:
        if item >= COUNT:
            raise IndexError
        return item, os.getpid(), random.random(), float(np.random.rand()), float(torch.rand(()))


def epoch_loader(*, workers: int, epochs: int = 3, rank: int = 0, ranks: int = 1, seed: int = 5) -> EpochLoader:
    settings = LoaderSettings(num_workers=workers, prefetch_factor=2)
    notes: list[str] = []
    loader = EpochLoader(
        OwnItems(Draws(), label_dtype=None), settings, seed=seed, epochs=epochs, rank=rank, ranks=ranks, pin=False,
        tell=notes.append,
    )  # fmt: skip
    loader.notes = notes  # type: ignore[attr-defined]
    return loader


def epoch_of(loader: EpochLoader, epoch: int, *, position: int = 0, rank: int = 0, ranks: int = 1) -> list[Any]:
    """One epoch in windows of four, as the loop takes them."""
    order = epoch_order(COUNT, seed=5, epoch=epoch)
    loader.begin(epoch, position)
    taken: list[Any] = []
    for start in range(position, COUNT, 4):
        share = Window(start=start, stop=min(start + 4, COUNT)).share(order, rank=rank, ranks=ranks)
        taken += loader.take(share)
        assert [one[0] for one in taken[len(taken) - len(share) :]] == share
        loader.done(share)
    loader.end(another=True)
    return taken


def test_processes_stay_from_epoch_to_epoch() -> None:
    loader = epoch_loader(workers=2)
    pids = [{one[1] for one in epoch_of(loader, epoch)} for epoch in range(3)]
    loader.close()
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]
    assert os.getpid() not in pids[0]
    assert loader.workers == 2
    assert loader.wait_seconds > 0


def test_a_process_that_was_lost_is_noted_and_the_next_epoch_has_new_ones() -> None:
    loader = epoch_loader(workers=1)
    (pid,) = {one[1] for one in epoch_of(loader, 0)}
    os.kill(pid, signal.SIGKILL)
    assert os.getpid() in {one[1] for one in epoch_of(loader, 1)}
    (other,) = {one[1] for one in epoch_of(loader, 2)}
    loader.close()
    assert other not in (pid, os.getpid())
    assert len(loader.notes) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("room", [False, True])
def test_only_a_loader_that_holds_the_locked_room_makes_way_for_another(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    loader = epoch_loader(workers=1)
    first = {one[1] for one in epoch_of(loader, 0)}
    monkeypatch.setattr("brim.running.loader.Loader.holds_room", room)
    loader.end(another=False)
    loader.end(another=True)
    assert ({one[1] for one in epoch_of(loader, 1)} == first) is not room
    loader.close()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_have_every_sample_of_every_epoch_once(ranks: int) -> None:
    for rank in range(ranks):
        loader = epoch_loader(workers=1, rank=rank, ranks=ranks)
        for epoch in range(3):
            epoch_of(loader, epoch, rank=rank, ranks=ranks)
        assert not loader._loader or not loader._loader._ready  # nothing was prepared that nobody asked for
        loader.close()


@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_drawn_follows_from_seed_epoch_and_sample_alone(workers: int, position: int) -> None:
    whole = epoch_loader(workers=0)
    expected = {epoch: {one[0]: one[2:] for one in epoch_of(whole, epoch)} for epoch in range(3)}
    assert expected[0] != expected[1]
    loader = epoch_loader(workers=workers)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    for epoch, start in ((1, position), (2, 0)):
        found = {one[0]: one[2:] for one in epoch_of(loader, epoch, position=start)}
        assert found == {item: expected[epoch][item] for item in found}
    loader.close()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index]


def test_draws_leave_generators_as_they_were_even_after_an_error() -> None:
    def broken() -> None:
        torch.rand(3)
        raise ValueError("broken")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="broken"), drawing_from(1, 2):
        broken()
    assert torch.equal(torch.get_rng_state(), before)


def test_arrays_are_tensors_unless_the_factory_joins_samples_itself() -> None:
    samples = [{"x": np.ones(2, dtype=np.float32), "name": np.array("one"), "pair": (1, np.zeros(1))}]
    made = OwnItems(samples, label_dtype=None).prepare(0)
    assert torch.equal(made["x"], torch.ones(2))
    assert isinstance(made["name"], np.ndarray)
    assert isinstance(made["pair"][1], torch.Tensor)
    assert OwnItems(samples, label_dtype=None, join=list).prepare(0) is samples[0]


@pytest.mark.parametrize("join", [None, list])
def test_samples_that_the_factory_joins_itself_do_not_lie_in_room_that_is_used_again(join: Any) -> None:
    """It may keep them."""
    items = OwnItems([torch.full((4,), float(place)) for place in range(COUNT)], label_dtype=None, join=join)
    loader = EpochLoader(items, LoaderSettings(num_workers=1), seed=5, epochs=1, rank=0, ranks=1, pin=False, tell=print)
    loader.begin(0, 0)
    (sample,) = loader.take([epoch_order(COUNT, seed=5, epoch=0)[0]])
    assert sample.is_shared() is (join is None)
    loader.close()


OWN = """
import torch
from torch import nn

def noisy(count: int = 40):
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))

    class Noisy:
        def __len__(self):
            return count

        def __getitem__(self, item):
            return rows[item] + 0.1 * torch.randn(6), int(rows[item, 0] > 0)

    return lambda split: Noisy()

def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 2))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_augmented_samples_and_dropout_give_the_same_losses_however_they_are_loaded_or_resumed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def nested(workers: int) -> dict[str, Any]:
        changes = {"model__type": f"py:{tmp_path}/own.py:net", "data__type": f"py:{tmp_path}/own.py:noisy"}
        settings = settings_of(tmp_path, **changes, data__num_workers=workers, hp__batch_size=8, task__x=None)
        del settings["data"]["root"], settings["model"]["params"], settings["task"]
        return {**settings, "task": "classify"}

    run(nested(0), tmp_path / "alone")
    run(nested(2), tmp_path / "whole")
    assert losses(tmp_path / "alone") == losses(tmp_path / "whole")
    for stop in (1, 4):
        parts = tmp_path / f"parts-{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(nested(2), parts, listener=StopsAt(stop))
        assert len(losses(parts)) < len(losses(tmp_path / "whole"))
        run(nested(1), parts, resume=True)
        assert losses(parts) == losses(tmp_path / "whole")
        assert largest_difference(weights(parts), weights(tmp_path / "whole")) == 0
