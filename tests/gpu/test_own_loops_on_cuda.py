"""Loops of one's own where memory is real: the allocator's limit and its errors, in the body of somebody's loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import brim

pytestmark = pytest.mark.gpu

LIMIT = 1 << 30
ROW = 1 << 20  # floats of an activation of one sample: 4 MiB


class Wide(nn.Module):
    """Layers whose activations are far larger than their weights."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.view(-1, 1, 64).expand(-1, ROW // 64, -1)
        for scale in self.scales:
            wide = torch.tanh(scale(wide))
        return wide.mean(dim=(1, 2))


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(LIMIT / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def model() -> Wide:
    torch.manual_seed(0)
    return Wide().cuda()


def silent(line: str) -> None:
    """Notes that a test does not read."""


def test_a_window_beyond_the_memory_has_the_gradients_of_small_parts() -> None:
    wide = model()
    twin = copy.deepcopy(wide)
    rows = torch.randn(64, 64)
    for start in range(0, 64, 2):
        (twin(rows[start : start + 2].cuda()).square().sum() / 64).backward()
    optimizer = torch.optim.AdamW(wide.parameters())
    windows = brim.accumulate(
        lambda batch: wide(batch).square().mean(), model=wide, optimizer=optimizer, batch_size=64, memory_limit=LIMIT,
        note=silent,
    )  # fmt: skip
    windows(rows)
    assert windows.oom_events > 0
    for one, other in zip(wide.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_sizes_found_by_bytes_run_without_an_error_after_the_first_windows() -> None:
    wide = model()
    windows = brim.accumulate(lambda batch: wide(batch).square().mean(), model=wide, memory_limit=LIMIT, note=silent)
    for _ in range(4):
        windows(torch.randn(64, 64))
        wide.zero_grad()
    before = windows.oom_events
    for _ in range(4):
        windows(torch.randn(64, 64))
        wide.zero_grad()
    assert windows.oom_events == before
    assert windows.peak_reserved_bytes is not None
    assert windows.peak_reserved_bytes <= LIMIT


def test_a_loop_beyond_the_memory_answers_every_sample() -> None:
    wide = model()
    rows = torch.randn(600, 64)
    found = torch.empty(600)
    loop = brim.batches(rows, batch_size=512, device="cuda", memory_limit=LIMIT, note=silent)
    for batch in loop:
        with batch as inputs, torch.no_grad():
            found[list(batch.indices)] = wide(inputs).cpu()
    assert loop.oom_events > 0
    with torch.no_grad():
        expected = torch.cat([wide(part.cuda()).cpu() for part in rows.split(8)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_the_decorator_needs_few_calls_from_a_high_start() -> None:
    def train(batch_size: int) -> int:
        wide = model()
        optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
        for _ in range(2):
            wide(torch.randn(batch_size, 64, device="cuda")).square().mean().backward()
            optimizer.step()
        return batch_size

    decorated: Any = brim.find_executable_batch_size(train, starting_batch_size=1024, note=silent)
    size = decorated()
    assert size >= 4
    assert len(decorated.trials) <= 12  # accelerate: 43 to a size of 12
    assert all(trial.needed_bytes for trial in decorated.trials[:-1])
