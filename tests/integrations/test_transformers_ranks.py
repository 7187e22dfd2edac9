"""Two gloo ranks: one size for both, training as usual, and a clear end where one of them runs out of memory.

The module is also the program that each rank runs: `python test_transformers_ranks.py OUTPUT`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

KIB = 2**10


def main(output: str) -> None:
    import brim.searching.find
    from brim.integrations.transformers import fit_to_memory
    from brim.searching.probe import ProbeSettings
    from tests.integrations.trainers import Neighbour, losses, make_sft, make_trainer

    gc.freeze()
    short = functools.partial(ProbeSettings, steady_seconds=0.001, max_steps=3)
    brim.searching.find.ProbeSettings = short  # type: ignore[misc, assignment]
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name, make, limits in (
        ("Trainer", make_trainer, (2048 * KIB, 560 * KIB)),
        ("SFTTrainer", make_sft, (32 * 2**20, 16 * 2**20)),
    ):
        trainer = make(Path(output).parent / name / str(rank), per_device_train_batch_size=8, max_steps=2, eval_count=4)
        fit = fit_to_memory(trainer, memory_limit=limits[rank], objective="largest")
        assert fit.plan is not None
        found[name] = {
            "sizes": list(fit.plan.batch_sizes_per_rank or ()),
            "size": trainer._train_batch_size,
            "eval_size": trainer.args.per_device_eval_batch_size,
            "effective": fit.effective_batch,
        }
        trainer.train()
        found[name]["losses"] = losses(trainer)
    trainer = make_trainer(Path(output).parent / "lost" / str(rank))
    fit_to_memory(trainer, memory_limit=64 * 2**20)
    try:
        with Neighbour(trainer, at_calls=(1,) if rank == 1 else (), take_bytes=64 * 2**20, backward=True):
            trainer.train()
    except Exception as error:
        found["lost"] = {"kind": type(error).__name__, "error": str(error)}
    Path(f"{output}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # as a rank that is lost does: without a farewell to the group


def run_pair(folder: Path, *, seconds: float) -> list[dict[str, Any]]:
    """What each of two ranks found; a pair that takes longer hangs."""
    from tests.rank_processes import run_ranks  # a rank runs this file without the package around it

    output = folder / "found"
    environment = {
        "CI": "1", "XDG_CACHE_HOME": str(folder / "cache"), "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }  # fmt: skip
    run_ranks([__file__, str(output)], seconds=seconds, environment=environment)
    return [json.loads(Path(f"{output}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_pair(tmp_path_factory.mktemp("ranks"), seconds=240)


@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer"])
def test_ranks_take_the_smaller_size_and_train(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["sizes"] == second["sizes"]
    assert first["sizes"][0] > first["sizes"][1]
    assert first["size"] == second["size"] == first["sizes"][1]
    assert first["eval_size"] == second["eval_size"]
    assert first["effective"] == 32
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 2


def test_a_rank_that_runs_out_of_memory_ends_the_run_clearly(ranks: list[dict[str, Any]]) -> None:
    lost = ranks[1]["lost"]
    assert lost["kind"] == "LostError"
    assert "rank 1 ran out of memory in a training step" in lost["error"]
    assert "resume_from_checkpoint" in lost["error"]
    assert "lost" in ranks[0]


if __name__ == "__main__":
    main(sys.argv[1])
