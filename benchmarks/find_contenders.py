"""What looks for a batch size in `benchmarks.find`: brim, its decorator, accelerate's, Lightning's finder.

Each takes a workload, the limit and its own name, and returns the size with what it took to find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

__all__ = [
    "IMPORTED",
    "SEARCHES",
    "is_installed",
    "kind_of",
    "synchronize",
    "with_accelerate",
    "with_brim",
    "with_decorator",
    "with_lightning",
]

IMPORTED = {
    "brim": "brim.searching.find", "accelerate": "accelerate.utils", "brim-decorator": "brim.integrations.accelerate",
}  # before the clock runs  # fmt: skip
LIBRARIES = {"accelerate": ("accelerate",), "lightning": ("lightning", "pytorch_lightning")}  # one of them


def with_brim(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    from brim.searching.find import SearchListener, find_plan
    from brim.settings.find_settings import SearchSettings

    del contender
    walls: list[float] = []

    class Clock(SearchListener):
        def trying(self, size: int) -> None:  # noqa: ARG002
            walls.append(-time.perf_counter())

        def tried(self, probe: Any) -> None:  # noqa: ARG002
            walls[-1] += time.perf_counter()

    settings = SearchSettings(memory_limit_bytes=limit, use_cache=False)
    plan = find_plan(workload, settings, preserve_state=False, listener=Clock())  # as `brim find`: the model is its own
    seconds: Any = getattr(plan, "seconds", None)  # an older brim does not say
    return {
        "size": plan.size,
        "tries": len(plan.probes),
        "ooms": plan.oom_events,
        "largest": plan.batch_size_max,
        "estimate": plan.batch_size_max_estimate,
        "reason": plan.reason,
        "parts": None if seconds is None else dataclasses.asdict(seconds),
        "probes": [{**probe.to_json(), "wall": wall} for probe, wall in zip(plan.probes, walls, strict=True)],
    }


def kind_of(contender: str) -> str:
    """`brim-decorator` of `brim-decorator-1024`, `accelerate` of `accelerate-128`, `brim` also of `brim-before`."""
    return "brim-decorator" if contender.startswith("brim-decorator") else contender.split("-")[0]


def is_installed(contender: str) -> bool:
    """Whether a peer's library is there; one that is not is named and left out."""
    libraries = LIBRARIES.get(kind_of(contender), ("brim",))
    found = any(importlib.util.find_spec(library) is not None for library in libraries)
    if not found:
        print(f"{contender} is left out: {libraries[0]} is not installed", file=sys.stderr)
    return found


def with_decorator(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    from brim.integrations.accelerate import find_executable_batch_size

    capped = workload.device.type == "cpu" and limit is not None  # on a GPU torch's allocator holds the limit already

    notes: list[str] = []

    def run(batch_size: int) -> int:
        workload.step(workload.make_batch(batch_size))
        synchronize(workload)
        return batch_size

    decorated: Any = find_executable_batch_size(
        run,
        starting_batch_size=int(contender.split("-")[-1]),
        device=workload.device,
        memory_limit=limit if capped else None,
        note=notes.append,
    )
    size = decorated()
    probes = [probe.to_json() for probe in decorated.trials]
    return {"size": size, "tries": len(probes), "ooms": len(probes) - 1, "probes": probes, "notes": notes}


def with_accelerate(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    @find_executable_batch_size(  # type: ignore[untyped-decorator]
        starting_batch_size=int(contender.split("-")[1])
    )
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        with _cpu_limit(workload, limit):
            workload.step(workload.make_batch(batch_size))
            synchronize(workload)
        return batch_size

    size = run()
    return {"size": size, "tries": len(tried), "ooms": len(tried) - 1}


def with_lightning(workload: Any, limit: int | None, contender: str) -> dict[str, Any]:
    import logging
    import warnings

    import torch

    try:
        pl = importlib.import_module("lightning.pytorch")
    except ImportError:
        pl = importlib.import_module("pytorch_lightning")

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tried: list[int] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]  # only known at run time
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.batch_size = 2
            self.unused = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> None:
            if not tried or tried[-1] != len(batch):
                tried.append(len(batch))
            with _cpu_limit(workload, limit):
                workload.step(workload.make_batch(len(batch)))
            self.optimizers().step()  # its finder counts these: without one, a trial is a whole epoch

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.unused.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(100_000), batch_size=self.batch_size)  # type: ignore[arg-type]

    trainer = pl.Trainer(
        accelerator="cpu" if workload.device.type == "cpu" else "gpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),  # its finder saves a checkpoint, and leaves it there if it is ended
    )  # fmt: skip
    tuner_class = importlib.import_module(pl.__name__ + ".tuner").Tuner
    module = Module()
    mode = "binsearch" if contender.endswith("binsearch") else "power"
    size = tuner_class(trainer).scale_batch_size(module, mode=mode, max_trials=16)
    return {"size": size, "tries": len(tried), "ooms": sum(n > size for n in tried)}


def synchronize(workload: Any) -> None:
    import torch

    if workload.device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _cpu_limit(workload: Any, limit: int | None) -> Iterator[None]:
    """On a CPU, which has no allocator to limit, brim's meter, with an error in the words that accelerate knows."""
    import torch

    from brim.memory.devices import memory_of

    if limit is None or workload.device.type != "cpu":
        yield
        return
    memory = memory_of(workload.device)
    try:
        with memory.limited(limit), memory.metered():
            yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(f"CUDA out of memory. {error}") from None


SEARCHES = {
    "brim": with_brim,
    "brim-decorator": with_decorator,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}
