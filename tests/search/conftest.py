from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from brim.search.probe import ProbeSettings


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other, ten times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steady steps in a probe: nothing here depends on how fast a step is."""
    short = functools.partial(ProbeSettings, steady_seconds=0.001, max_steps=3)
    monkeypatch.setattr("brim.search.find.ProbeSettings", short)


@pytest.fixture(autouse=True, scope="package")
def quick_collections() -> Iterator[None]:
    """Every probe collects garbage; what the imports left behind need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
