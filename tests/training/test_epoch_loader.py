"""One loader for all epochs: its processes stay, and random draws depend on neither processes nor resuming."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from brim.data.base import ImageFile, Sample
from brim.running.loader import LoaderSettings
from brim.training.epoch_loader import EpochLoader, LoaderKeys, ValidationOrder
from brim.training.items import FactoryItems, ImageItems, seeded_rng
from brim.training.loop import Window, epoch_order
from tests.training.training_runs import StopsAt, Watcher, largest_difference, losses, run, settings_of, weights

COUNT = 12


class Draws(Sequence[Any]):
    """Samples that hold the process that prepared them and random numbers that were drawn for them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, item: Any) -> Any:
        if item >= COUNT:
            raise IndexError
        return item, os.getpid(), random.random(), float(np.random.rand()), float(torch.rand(()))


def epoch_loader(*, workers: int, epochs: int = 3, rank: int = 0, ranks: int = 1, seed: int = 5) -> EpochLoader:
    settings = LoaderSettings(num_workers=workers, prefetch_factor=2)
    items = FactoryItems(Draws(), label_dtype=None)
    keys = LoaderKeys(items=items, seed=seed, rank=rank, ranks=ranks, epochs=epochs)
    return EpochLoader(keys, settings, pin=False, note=print)


def epoch_of(loader: EpochLoader, epoch: int, *, position: int = 0, rank: int = 0, ranks: int = 1) -> list[Any]:
    """The samples of one epoch, taken in windows of four."""
    order = epoch_order(COUNT, seed=5, epoch=epoch)
    loader.begin(epoch, position)
    taken: list[Any] = []
    for start in range(position, COUNT, 4):
        share = Window(start=start, stop=min(start + 4, COUNT)).share(order, rank=rank, ranks=ranks)
        taken += loader.take(share)
        assert [one[0] for one in taken[len(taken) - len(share) :]] == share
        loader.done(share)
    loader.end()
    return taken


def test_processes_are_kept_between_epochs() -> None:
    loader = epoch_loader(workers=2)
    pids = [{one[1] for one in epoch_of(loader, epoch)} for epoch in range(3)]
    loader.close()
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]
    assert os.getpid() not in pids[0]
    assert loader.workers == 2
    assert loader.wait_seconds > 0


def test_a_killed_process_is_noted_and_replaced_in_the_next_epoch() -> None:
    loader = epoch_loader(workers=1)
    (pid,) = {one[1] for one in epoch_of(loader, 0)}
    os.kill(pid, signal.SIGKILL)
    assert os.getpid() in {one[1] for one in epoch_of(loader, 1)}
    (other,) = {one[1] for one in epoch_of(loader, 2)}
    loader.close()
    assert other not in (pid, os.getpid())
    assert len(loader.notes) == 1


def validated(loader: EpochLoader, epoch: int, **options: Any) -> list[Any]:
    """The samples of one validation, taken in batches of four; the second batch is tried again later."""
    held_out = loader.begin_validation(epoch, **options)
    taken = held_out.take(range(4))
    held_out.done(range(4))
    held_out.take(range(4, 8))
    held_out.set_aside(range(4, 8))
    taken += held_out.take(range(8, COUNT))
    held_out.done(range(8, COUNT))
    again = held_out.take(range(4, 8))
    held_out.done(range(4, 8))
    assert [one[0] for one in taken] == [*range(4), *range(8, COUNT)]
    assert {one[1] for one in again} == {os.getpid()}  # out of the order
    return taken


def held_out_loader(*, workers: int, every: int = 1, epochs: int = 3) -> EpochLoader:
    items = FactoryItems(Draws(), label_dtype=None)
    held_out = ValidationOrder(items=items, order=range(COUNT), follows=lambda epoch: (epoch + 1) % every == 0)
    keys = LoaderKeys(items=items, seed=5, rank=0, ranks=1, epochs=epochs, validation=held_out)
    return EpochLoader(keys, LoaderSettings(num_workers=workers, prefetch_factor=2), pin=False, note=print)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_processes_of_training_prepare_validation_too(workers: int) -> None:
    loader = held_out_loader(workers=workers)
    pids: list[set[int]] = []
    draws = []
    for epoch in range(3):
        pids.append({one[1] for one in epoch_of(loader, epoch)})
        held_out = validated(loader, epoch)
        pids.append({one[1] for one in held_out})
        draws.append([one[2:] for one in held_out])
    loader.close()
    assert all(found == pids[0] for found in pids)
    assert len(pids[0]) == max(workers, 1)
    assert draws[0] == draws[1] == draws[2]  # held-out samples are the same every time


def test_validation_after_some_epochs_and_one_that_nobody_expected() -> None:
    loader = held_out_loader(workers=1, every=2)
    for epoch in range(2):
        epoch_of(loader, epoch)
    first = {one[1] for one in validated(loader, 1)}
    loader.begin(2, 0)
    order = epoch_order(COUNT, seed=5, epoch=2)
    assert {one[1] for one in loader.take(order[:4])} == first
    other = {one[1] for one in validated(loader, 2, expected=False)}  # max_steps ends the run here
    assert other != first
    loader.close()


def test_a_process_lost_in_a_validation_is_replaced_in_the_next_epoch() -> None:
    loader = held_out_loader(workers=1)
    (pid,) = {one[1] for one in epoch_of(loader, 0)}
    os.kill(pid, signal.SIGKILL)
    validated(loader, 0)
    (other,) = {one[1] for one in epoch_of(loader, 1)}
    assert other not in (pid, os.getpid())
    assert {one[1] for one in validated(loader, 1)} == {other}
    loader.close()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_rank_prepares_exactly_its_samples_of_every_epoch(ranks: int) -> None:
    for rank in range(ranks):
        loader = epoch_loader(workers=1, rank=rank, ranks=ranks)
        for epoch in range(3):
            epoch_of(loader, epoch, rank=rank, ranks=ranks)
        assert not loader._loader or not loader._loader._ready  # no prepared sample is left over
        loader.close()


@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_draws_depend_on_seed_epoch_and_sample_alone(workers: int, position: int) -> None:
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


def test_what_a_models_own_transform_draws_depends_on_seed_epoch_and_sample_alone() -> None:
    """A `py:` model turns pictures into its input itself, and may augment them there."""
    picture = ImageFile(decoded=lambda: PIL.Image.new("RGB", (2, 2)))
    samples = [Sample(id=str(place), images=(picture,)) for place in range(2)]
    items = ImageItems(samples, torch.zeros(2), transform=lambda _: torch.rand(3))
    items.is_random = True
    first, *others = (
        items.prepare_for_epoch(epoch, item, seed=seed).tolist()
        for epoch, item, seed in ((1, 0, 5), (1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6))
    )
    assert [first == other for other in others] == [True, False, False, False]


def test_seeded_rng_restores_generators_after_an_error() -> None:
    def broken() -> None:
        torch.rand(3)
        raise ValueError("broken")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="broken"), seeded_rng(1, 2):
        broken()
    assert torch.equal(torch.get_rng_state(), before)


def test_arrays_become_tensors_unless_the_user_collates() -> None:
    samples = [{"x": np.ones(2, dtype=np.float32), "name": np.array("one"), "pair": (1, np.zeros(1))}]
    made = FactoryItems(samples, label_dtype=None).prepare(0)
    assert torch.equal(made["x"], torch.ones(2))
    assert isinstance(made["name"], np.ndarray)
    assert isinstance(made["pair"][1], torch.Tensor)
    assert FactoryItems(samples, label_dtype=None, join=list).prepare(0) is samples[0]


@pytest.mark.parametrize("join", [None, list])
def test_samples_for_a_users_collate_are_not_in_reused_memory(join: Any) -> None:
    """The collate function may keep them."""
    items = FactoryItems([torch.full((4,), float(place)) for place in range(COUNT)], label_dtype=None, join=join)
    keys = LoaderKeys(items=items, seed=5, rank=0, ranks=1, epochs=1)
    loader = EpochLoader(keys, LoaderSettings(num_workers=1), pin=False, note=print)
    loader.begin(0, 0)
    loader.take([epoch_order(COUNT, seed=5, epoch=0)[0]])
    assert loader._loader is not None
    assert bool(loader._loader._packed) is (join is None)
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
def test_losses_do_not_depend_on_workers_or_resuming(tmp_path: Path) -> None:
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


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_a_lost_process_is_in_the_record_and_changes_no_loss(tmp_path: Path) -> None:
    dies = (
        "            if torch.utils.data.get_worker_info() and os.path.exists(DIES):\n"
        "                os.unlink(DIES)\n"
        "                os._exit(1)\n"
    )
    getter = "        def __getitem__(self, item):\n"
    head = f"import os\nDIES = {str(tmp_path / 'dies')!r}\n"
    (tmp_path / "own.py").write_text(head + OWN.replace(getter, getter + dies))
    changes = {"model__type": f"py:{tmp_path}/own.py:net", "data__type": f"py:{tmp_path}/own.py:noisy"}
    nested = settings_of(tmp_path, **changes, data__num_workers=1, hp__batch_size=8)
    del nested["data"]["root"], nested["model"]["params"]
    run({**nested, "task": "classify"}, tmp_path / "whole")
    (tmp_path / "dies").touch()
    watcher = Watcher()
    result = run({**nested, "task": "classify"}, tmp_path / "run", listener=watcher)
    lost = [note for note in watcher.notes if "a loading process was lost" in note]
    assert len(lost) == 1
    assert lost[0] in result.notes
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_memory_of_the_loading_processes_does_not_count_against_a_limit(tmp_path: Path) -> None:
    """Their pool has 64 MiB at least, of which validation's batches are a few bytes."""
    (tmp_path / "own.py").write_text(OWN)
    changes = {"model__type": f"py:{tmp_path}/own.py:net", "data__type": f"py:{tmp_path}/own.py:noisy"}
    nested = settings_of(tmp_path, **changes, data__num_workers=1, training__memory_limit="1MiB")
    del nested["data"]["root"], nested["model"]["params"]
    result = run({**nested, "task": "classify"}, tmp_path / "run")
    assert result.summary["oom_events"] == 0
