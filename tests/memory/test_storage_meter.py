"""The CPU meter counts storages once, as long as they live, and raises where a limit would be passed."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch

from brim.errors import RequestError
from brim.memory.devices import CpuMemory
from brim.memory.failures import FailureKind, classify
from brim.memory.storage_meter import StorageMeter, refuse_compiled

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.zeros(kib * 256)


def test_live_bytes_rise_and_fall_and_the_peak_stays() -> None:
    with StorageMeter() as meter:
        first, second = block(4), block(8)
        assert meter.current_bytes == 12 * KIB
        del first
        assert meter.current_bytes == 8 * KIB
        block(2)
        del second
    assert meter.current_bytes == 0
    assert meter.peak_bytes == 12 * KIB


def test_views_in_place_writes_and_slices_cost_nothing() -> None:
    with StorageMeter() as meter:
        base = block(4)
        views = [base.view(-1, 4), base[10:], base.unsqueeze(0).expand(9, -1), base.add_(1), base.detach()]
        assert meter.peak_bytes == 4 * KIB
        del base
        assert meter.current_bytes == 4 * KIB
        del views
    assert meter.current_bytes == 0


def test_a_slice_that_outlives_its_tensor_holds_the_whole_storage() -> None:
    with StorageMeter() as meter:
        kept = block(64)[:1]
        assert meter.current_bytes == 64 * KIB
        del kept
    assert meter.current_bytes == 0


def test_earlier_tensors_count_once_when_tracked_or_used() -> None:
    resident, touched = block(16), block(8)
    meter = StorageMeter()
    meter.track([resident, resident[:5]])
    assert meter.current_bytes == 16 * KIB
    with meter:
        touched.sum()
        resident.sum()
        assert meter.current_bytes == 24 * KIB


def test_what_backward_keeps_is_counted() -> None:
    model = nn.Linear(64, 64, bias=False)
    batch = torch.ones(32, 64)
    with torch.no_grad(), StorageMeter() as without:
        model(batch).relu().square().sum()
    with StorageMeter() as meter:
        model(batch).relu().square().sum().backward()
    assert meter.peak_bytes > without.peak_bytes
    assert meter.current_bytes >= 2 * 64 * 64 * 4  # weights and their gradient


def test_a_limit_is_passed_by_no_byte_and_reached_by_the_last() -> None:
    with StorageMeter(limit_bytes=12 * KIB) as meter:
        kept = [block(4), block(8)]
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4 bytes more"):
            torch.zeros(1)
        kept.clear()
        block(12)
    assert meter.peak_bytes == 12 * KIB


def test_the_error_is_classified_as_memory_with_the_bytes_asked_for() -> None:
    with StorageMeter(limit_bytes=KIB), pytest.raises(torch.OutOfMemoryError) as caught:
        block(5)
    failure = classify(caught.value)
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.requested_bytes == 5 * KIB


def test_a_refused_operation_is_not_counted() -> None:
    with StorageMeter(limit_bytes=10 * KIB) as meter:
        kept = block(4)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                block(8)
        assert meter.current_bytes == 4 * KIB
        del kept


def test_operations_outside_are_not_counted() -> None:
    meter = StorageMeter(limit_bytes=1)
    with meter:
        pass
    assert block(4).sum() == 0
    assert meter.peak_bytes == 0


def test_an_address_that_is_used_again_is_counted_again() -> None:
    with StorageMeter() as meter:
        for _ in range(50):
            kept = block(4)
            assert meter.current_bytes in (4 * KIB, 8 * KIB)
        del kept
    assert meter.current_bytes == 0


def test_meta_and_sparse_tensors_are_left_alone() -> None:
    with StorageMeter(limit_bytes=KIB) as meter:
        torch.zeros(10**6, device="meta") + 1
    assert meter.peak_bytes == 0


def test_eager_code_is_let_through_and_compiled_code_is_not() -> None:
    eager = nn.Linear(2, 2)
    refuse_compiled([eager], eager.forward, len)
    with pytest.raises(RequestError, match="OptimizedModule is compiled"):
        refuse_compiled([torch.compile(eager)])
    with pytest.raises(RequestError, match="uncompiled module, or on CUDA"):
        refuse_compiled([], torch.compile(lambda x: x))


@pytest.mark.parametrize("step", ["_push_mode", "_pop_mode"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_ctrl_c_while_torch_puts_the_meter_on_or_takes_it_off_leaves_it_off(
    step: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(dispatch, step)

    def interrupted(*arguments: object) -> object:
        if first:
            signal.raise_signal(signal.SIGINT)
        found = original(*arguments)
        if not first:
            signal.raise_signal(signal.SIGINT)
        return found

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    memory = CpuMemory(torch.device("cpu"))
    try:
        monkeypatch.setattr(dispatch, step, interrupted)
        with pytest.raises(KeyboardInterrupt), memory.limited(KIB), memory.metered():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
    assert not dispatch.is_in_torch_dispatch_mode()
    assert dispatch._get_current_dispatch_mode_stack() == []


def test_a_meter_that_nothing_has_ended_goes_with_the_limit() -> None:
    memory = CpuMemory(torch.device("cpu"))
    with memory.limited(KIB):
        never_left = memory.metered()
        never_left.__enter__()
        assert len(dispatch._get_current_dispatch_mode_stack()) == 1
    assert dispatch._get_current_dispatch_mode_stack() == []
