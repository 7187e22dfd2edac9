"""The search on a real allocator: limits, retries, restored state, fatal errors in a child."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import brim
from brim.memory.device_start import load_libraries
from brim.memory.devices import CudaMemory
from brim.models.build import build_workload
from brim.searching.find import find_plan, find_with
from brim.searching.isolate import IsolatedProber
from brim.searching.probe import DeviceProber, ProbeSettings
from brim.settings.find_settings import SearchSettings, WorkloadRequest

pytestmark = pytest.mark.gpu

GIB = 2**30


def _network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(32 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10),
    ).cuda()  # fmt: skip


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 32, 32, device="cuda"), torch.randint(10, (size,), device="cuda")


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, y = _batch(16)
        optimizer.zero_grad()
        loss = cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bf16_weights", [False, True])
def test_a_search_in_front_changes_no_loss(bf16_weights: bool) -> None:
    def run(search: bool) -> list[float]:
        torch.use_deterministic_algorithms(True)
        model = _network()
        if bf16_weights:
            model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _losses(model, optimizer, 2)
        if bf16_weights:  # float32 state over bf16 weights, as mixed-precision optimizers keep it
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].float()
                state["exp_avg_sq"] = state["exp_avg_sq"].float()
        torch.manual_seed(5)
        if search:

            def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
                loss = cross_entropy(model(batch[0].to(next(model.parameters()).dtype)).float(), batch[1])
                optimizer.zero_grad()
                loss.backward()
                if not bf16_weights:
                    optimizer.step()

            plan = brim.find_batch_size(step, _batch, model=model, optimizer=optimizer, memory_limit="1GiB")
            assert plan.size > 1
        return _losses(model, optimizer, 5) if not bf16_weights else _state_sums(model, optimizer)

    try:
        assert run(search=True) == run(search=False)
    finally:
        torch.use_deterministic_algorithms(False)


def _state_sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.double().sum().item() for t in tensors] + [torch.rand(1).item(), torch.rand(1, device="cuda").item()]


def test_the_limit_bounds_reserved_memory_and_is_lifted_afterwards() -> None:
    workload, _ = build_workload(WorkloadRequest(model="resnet18", mode="train", knobs={"size": 64}))
    plan = find_plan(workload, SearchSettings(memory_limit_bytes=2 * GIB, use_cache=False, objective="largest"))
    assert all(p.peak_reserved_bytes <= 2 * GIB for p in plan.probes if p.fits)
    assert plan.memory.headroom_bytes is not None
    assert plan.memory.headroom_bytes < 0.15 * 2 * GIB
    free, _ = torch.cuda.mem_get_info()
    torch.empty(min(4 * GIB, free // 2), dtype=torch.uint8, device="cuda")


def test_the_largest_size_survives_further_steps_without_retries() -> None:
    workload, _ = build_workload(WorkloadRequest(model="resnet18", mode="train", knobs={"size": 64}))
    plan = find_plan(workload, SearchSettings(memory_limit_bytes=2 * GIB, use_cache=False, objective="largest"))
    gc.collect()
    torch.cuda.empty_cache()
    memory = CudaMemory(torch.device("cuda", 0))
    with memory.limited(2 * GIB):
        batch = workload.make_batch(plan.size)
        for _ in range(2):
            workload.step(batch)
        with memory.metered() as reading:
            for _ in range(20):
                workload.step(batch)
    assert reading.alloc_retries == 0


def test_out_of_memory_leaves_nothing_behind() -> None:
    workload, _ = build_workload(WorkloadRequest(model="resnet18", mode="train", knobs={"size": 64}))
    with DeviceProber(workload, ProbeSettings(memory_limit_bytes=GIB)) as prober:
        assert prober.probe(8).fits
        before = torch.cuda.memory_allocated()
        assert prober.probe(4096).verdict == "oom"
        assert torch.cuda.memory_allocated() == before
        assert prober.probe(8).fits


def test_a_batch_too_large_for_one_sample_says_what_it_needs() -> None:
    workload, _ = build_workload(WorkloadRequest(model="resnet18", mode="train", knobs={"size": 224}))
    with pytest.raises(brim.DoesNotFitError, match="at least"):
        find_plan(workload, SearchSettings(memory_limit_bytes=100 * 2**20, use_cache=False))


def test_a_fatal_error_in_a_child_is_a_verdict_and_the_search_continues(tmp_path) -> None:
    factory = tmp_path / "asserting.py"
    factory.write_text(
        "import torch\n"
        "def factory():\n"
        "    table = torch.zeros(10, device='cuda')\n"
        "    def step(x):\n"
        "        index = torch.zeros(len(x), dtype=torch.long, device='cuda')\n"
        "        if len(x) > 6: index += 99\n"
        "        (table[index] + x).sum().item()\n"
        "    return step, lambda n: torch.zeros(n, device='cuda')\n"
    )
    request = WorkloadRequest(model=f"py:{factory}:factory")
    prober = IsolatedProber("brim.models.build:build_from_json", request.to_json(), ProbeSettings())
    plan = find_with(prober, SearchSettings(use_cache=False, objective="largest", max_size=32))
    assert plan.size == 6
    assert "fatal" in {probe.verdict for probe in plan.probes}


def test_a_size_limit_is_distinguished_from_memory() -> None:
    def step(x: torch.Tensor) -> None:
        if len(x) > 100:
            raise RuntimeError("CUDA error: invalid configuration argument")
        (x * 2).sum()

    plan = brim.find_batch_size(step, lambda n: torch.zeros(n, 8, device="cuda"), objective="largest",
                                max_batch_size=4096)  # fmt: skip
    assert plan.size == 100
    assert any("size limit" in note for note in plan.notes)


def test_neighbours_on_the_card_are_noticed() -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    assert 0 <= memory.used_by_others_bytes() < memory.total_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_precision_trains(dtype: str) -> None:
    workload, _ = build_workload(WorkloadRequest(model="resnet18", mode="train", knobs={"size": 64}, dtype=dtype))
    plan = find_plan(workload, SearchSettings(memory_limit_bytes=4 * GIB, use_cache=False))
    assert plan.chosen_probe() is not None


def test_libraries_load_in_a_thread_and_no_memory_stays_taken() -> None:
    model, device = _network(), torch.device("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_libraries(device, torch.bfloat16, [model])()
    assert torch.cuda.max_memory_allocated() > before + 2**20  # a product has run, with its workspace
    assert torch.cuda.memory_allocated() == before
    square = torch.ones(64, 64, device=device)
    square @ square  # by the handle that the thread had, or another
    del square
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_loads_libraries_runs_in_every_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread an error would not be seen."""
    monkeypatch.setattr("brim.memory.device_start._in_thread", lambda start: start)
    layers = nn.ModuleList([nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1)])
    load_libraries(torch.device("cuda"), dtype, [layers])()
