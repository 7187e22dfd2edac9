"""A probe on the CPU: its verdicts, what it leaves behind (nothing), and what it refuses."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import LostError, RequestError
from brim.memory.storage_meter import StorageMeter
from brim.searching.probe import DeviceProber, ProbeSettings
from brim.workloads.callables import CallableWorkload
from tests.fake_devices import fake_current_devices

KIB = 1024
QUICK = {"steady_seconds": 0.001, "max_steps": 3}


def rows(size: int) -> torch.Tensor:
    return torch.ones(size, 256)  # 1 KiB a row


def prober(
    step: Callable[[Any], Any] = lambda batch: batch * 2,
    make_batch: Callable[[int], Any] = rows,
    *,
    limit: int = 64 * KIB,
    timeout: float | None = None,
    **workload: Any,
) -> DeviceProber:
    workload.setdefault("device", "cpu")
    settings = ProbeSettings(memory_limit_bytes=limit, timeout_seconds=timeout, **QUICK)
    return DeviceProber(CallableWorkload(step=step, make_batch=make_batch, **workload), settings)


def raising(error: Exception, *, above: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > above:
            raise error
        return batch * 2

    return step


def test_a_size_that_fits_is_measured_to_the_byte_and_timed() -> None:
    with prober() as probing:
        probe = probing.probe(16)
    assert (probe.verdict, probe.batch_size) == ("fits", 16)
    assert probe.peak_allocated_bytes == probe.peak_reserved_bytes == 2 * 16 * KIB
    assert probe.alloc_retries == 0
    assert probe.steps >= 3
    assert probe.samples_per_second == pytest.approx(16 / probe.step_seconds)


def test_the_device_is_cudas_current_one_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are timed it is in any case: kernels of others would run there and not before."""
    current = fake_current_devices(monkeypatch, "brim.searching.probe")

    seen: list[list[torch.device]] = []
    with prober(lambda _: seen.append(list(current))) as probing:
        probing.probe(2)
    assert len(seen) > 1
    assert all(one == [torch.device("cpu")] for one in seen)
    assert current == []


@pytest.mark.parametrize(("limit", "counted"), [(64 * KIB, False), (2**20, True)])
def test_near_the_limit_the_first_timed_step_is_not_counted(
    limit: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def timed(function: Callable[[], Any], *, repeats: int) -> float:
        function()
        taken.append(0.0 if taken else 1.0)  # only the first takes time, and it asks for no further ones
        return taken[-1] + 0.001 * repeats

    with prober(limit=limit) as probing:
        monkeypatch.setattr(probing.memory, "timed", timed)
        probe = probing.probe(24)  # 48 KiB
    assert probe.verdict == "fits"
    assert probe.step_seconds == pytest.approx(1.001 if counted else 0.001)


def test_the_same_size_reads_the_same_bytes_again() -> None:
    model = nn.Linear(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with prober(training(model, optimizer), model=model, optimizer=optimizer, limit=2**24) as probing:
        peaks = {size: probing.probe(size).peak_allocated_bytes for size in (1, 40)}
        assert {size: probing.probe(size).peak_allocated_bytes for size in (40, 1)} == peaks


def test_the_peak_is_that_of_a_steady_step() -> None:
    model = nn.Linear(256, 256)  # 257 KiB

    def accumulate(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    with prober(accumulate, model=model, limit=2**22) as probing:
        first, second = (probing.probe(4).peak_allocated_bytes for _ in range(2))
    assert first == second
    assert second >= 3 * 257 * KIB  # weights, gradients of the step before, gradients of this one


def test_out_of_memory_is_a_verdict_with_the_bytes_it_needed() -> None:
    with prober(limit=64 * KIB) as probing:
        assert probing.probe(32).verdict == "fits"
        probe = probing.probe(33)
    assert probe.verdict == "oom"
    assert probe.peak_allocated_bytes == 33 * KIB
    assert probe.needed_bytes == 66 * KIB
    assert "33.0 KiB more" in probe.detail
    assert probe.step_seconds is None


def test_a_failed_step_keeps_no_tensor_alive() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        kept = [batch + number for number in range(3)]
        alive.extend(map(weakref.ref, [batch, *kept]))
        return torch.cat(kept)

    gc.disable()  # a reference that only the collector could end would be a leak on a full card
    try:
        with prober(step, limit=48 * KIB) as probing:
            probe = probing.probe(10)
            assert probe.verdict == "oom"
            assert len(alive) == 4
            assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_memory_after_an_oom_is_what_it_was_before() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    step = training(model, optimizer)
    with prober(step, model=model, optimizer=optimizer, limit=2**21) as probing:
        before = probing.probe(1)
        assert probing.probe(4_000).verdict == "oom"
        assert all(parameter.grad is None for parameter in model.parameters())
        after = probing.probe(1)
    assert (before.verdict, after.verdict) == ("fits", "fits")
    assert after.peak_allocated_bytes == before.peak_allocated_bytes


def test_a_step_error_is_raised_unchanged_and_the_state_restored() -> None:
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    error = ValueError("column 7 is missing")

    def step(batch: torch.Tensor) -> None:
        with torch.no_grad():
            model.weight.add_(torch.randn(4, 4))
        if len(batch) > 4:
            raise error

    with prober(step, model=model) as probing:
        assert probing.probe(2).fits
        with pytest.raises(ValueError, match="column 7") as caught:
            probing.probe(8)
    assert caught.value is error
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_an_ambiguous_error_is_tried_smaller_once_and_then_raised() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    with prober(raising(error)) as probing:
        assert probing.probe(8).verdict == "oom"
        with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR") as caught:
            probing.probe(4)
    assert caught.value is error


def test_an_ambiguous_error_that_a_smaller_size_does_not_repeat_was_memory() -> None:
    with prober(raising(RuntimeError("CUDNN_STATUS_INTERNAL_ERROR"), above=5)) as probing:
        assert [probing.probe(size).verdict for size in (8, 4, 5)] == ["oom", "fits", "fits"]


def test_an_ambiguous_error_at_the_smallest_size_is_not_called_memory() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR"):
        brim.find_batch_size(raising(error), rows, device="cpu", memory_limit="1MiB", max_batch_size=64)


def test_a_size_limit_is_distinguished_from_memory() -> None:
    error = RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")
    with prober(raising(error, above=20)) as probing:
        assert probing.probe(20).verdict == "fits"
        probe = probing.probe(21)
    assert (probe.verdict, probe.detail) == ("size_limit", "32-bit indexing limit of a kernel")


def test_a_probe_that_takes_too_long_does_not_fit() -> None:
    with prober(lambda batch: time.sleep(0.05), timeout=0.02) as probing:
        probe = probing.probe(1)
    assert (probe.verdict, probe.fits) == ("timeout", False)
    assert "probe_timeout=0.02" in probe.detail


def test_a_fatal_error_loses_the_device_and_points_to_isolation() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(LostError, match="isolate=") as caught, prober(raising(error)) as probing:
        probing.probe(3)
    assert caught.value.exit_code == 4
    assert caught.value.__cause__ is error


def test_a_batch_of_the_wrong_length_is_a_wrong_request() -> None:
    with (
        pytest.raises(RequestError, match=r"make_batch\(6\) returned a batch of 3.*batch_length="),
        prober(make_batch=lambda size: rows(size // 2)) as probing,
    ):
        probing.probe(6)


def test_lazy_parameters_are_a_wrong_request_that_says_what_to_do() -> None:
    model = nn.LazyLinear(4)
    with (
        pytest.raises(RequestError, match="run one batch through it first"),
        prober(lambda batch: model(batch), model=model) as probing,
    ):
        probing.probe(1)


@pytest.mark.parametrize(
    "nested",
    [
        lambda n: {"ids": torch.zeros(n, 4), "scale": torch.tensor(1.0)},
        lambda n: [{"scale": torch.tensor(1.0), "deep": (torch.zeros(n, 4),)}, 5],
        lambda n: ["text"] * n,
    ],
)
def test_the_length_of_a_nested_batch_is_found(nested: Callable[[int], Any]) -> None:
    with prober(lambda batch: None, nested) as probing:
        assert probing.probe(5).verdict == "fits"


def test_a_batch_without_a_leading_dimension_needs_batch_length() -> None:
    def packed(size: int) -> dict[str, Any]:
        return {"tokens": torch.zeros(10 * size), "starts": list(range(size))}

    with prober(lambda batch: None, packed, batch_length=lambda batch: len(batch["starts"])) as probing:
        assert probing.probe(7).verdict == "fits"
    with pytest.raises(RequestError, match="batch of 70"), prober(lambda batch: None, packed) as probing:
        probing.probe(7)
    with pytest.raises(RequestError, match="batch_length="), prober(make_batch=lambda n: object()) as probing:
        probing.probe(7)


def test_compiled_code_is_refused_on_the_cpu() -> None:
    model = torch.compile(nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"torch\.compile.*uncompiled"), prober(model=model):
        pass
    with pytest.raises(RequestError, match=r"torch\.compile"), prober(model=nn.Sequential(model)):
        pass


def test_a_compiled_step_is_refused_on_the_cpu() -> None:
    with pytest.raises(RequestError, match=r"torch\.compile"), prober(torch.compile(lambda batch: batch)):
        pass


def test_what_the_model_holds_counts_against_the_limit() -> None:
    model = nn.Linear(256, 32, bias=False)  # 32 KiB
    with prober(lambda batch: batch * 2, model=model) as probing:
        assert probing.context.base_bytes == 32 * KIB
        assert [probing.probe(size).verdict for size in (16, 17)] == ["fits", "oom"]


def test_reserved_bytes_are_kept_free() -> None:
    workload = CallableWorkload(step=lambda batch: batch * 2, make_batch=rows, device="cpu")
    workload.reserved_bytes = lambda: 24 * KIB
    with DeviceProber(workload, ProbeSettings(memory_limit_bytes=64 * KIB, **QUICK)) as probing:
        assert (probing.context.limit_bytes, probing.context.reserved_bytes) == (40 * KIB, 24 * KIB)
        assert [probing.probe(size).verdict for size in (20, 21)] == ["fits", "oom"]


def test_gradients_that_exist_and_those_that_do_not_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = torch.randn(8, 256)
    model[0].weight.grad = kept
    bits = kept.clone()
    with prober(training(model, optimizer), model=model, optimizer=optimizer, limit=2**20) as probing:
        assert probing.probe(3).fits
    assert model[0].weight.grad is kept
    assert torch.equal(kept, bits)
    assert [parameter.grad for parameter in model.parameters()][1:] == [None] * 3


@pytest.mark.parametrize("steps_before", [0, 1])
def test_every_probe_starts_with_fresh_optimizer_state(steps_before: int) -> None:
    model = nn.Linear(256, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    step = training(model, optimizer)
    for _ in range(steps_before):
        step(rows(2))
    seen: list[int] = []

    def noting(batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(optimizer.state))
        return step(batch)

    with prober(noting, model=model, optimizer=optimizer, limit=2**20) as probing:
        starts = []
        for size in (2, 3):
            starts.append(len(seen))
            assert probing.probe(size).fits
    assert [seen[start] for start in starts] == [2 * steps_before] * 2
    assert len(optimizer.state) == 2 * steps_before


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Float32State(torch.optim.AdamW):
    """AdamW whose moments are float32 over bfloat16 weights, as mixed-precision recipes keep them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["second"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["master"] = parameter.float()
                gradient = parameter.grad.float()
                state["first"].lerp_(gradient, 0.1)
                state["second"].lerp_(gradient * gradient, 0.01)
                state["master"].addcdiv_(state["first"], state["second"].sqrt() + 1e-6, value=-0.01)
                parameter.copy_(state["master"])


def losses(*, dtype: torch.dtype, optimizer_class: type, search: bool, steps_before: int) -> list[torch.Tensor]:
    """A training run of some steps, a search or none, and further steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4), nn.BatchNorm1d(4)
    ).to(dtype)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step = training(model, optimizer)

    def run(count: int) -> list[torch.Tensor]:
        found = []
        for _ in range(count):
            found.append(step(torch.randn(8, 256)))
            scheduler.step()
        return found

    before = run(steps_before)
    if search:
        plan = brim.find_batch_size(
            step, lambda n: torch.randn(2 * n, 256), batch_length=lambda batch: len(batch) // 2, model=model,
            optimizer=optimizer, scheduler=scheduler, objective="largest", memory_limit="1MiB", max_batch_size=4096,
        )  # fmt: skip
        assert plan.oom_events >= 1
        assert plan.batch_size > 8
    return before + run(5)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "optimizer_class"),
    [(torch.float32, torch.optim.AdamW), (torch.bfloat16, Float32State)],
)
def test_a_search_in_front_changes_no_loss(dtype: torch.dtype, optimizer_class: type, steps_before: int) -> None:
    run = {"dtype": dtype, "optimizer_class": optimizer_class, "steps_before": steps_before}
    plain, searched = losses(search=False, **run), losses(search=True, **run)
    assert len(plain) == steps_before + 5
    assert all(map(torch.equal, plain, searched))


def test_a_search_frees_what_it_used() -> None:
    model = nn.Linear(256, 16)
    with StorageMeter() as meter:
        brim.find_batch_size(model, rows, model=model, memory_limit="1MiB", max_batch_size=64)
        gc.collect()
        meter_bytes = meter.current_bytes
    assert meter_bytes <= (256 * 16 + 16) * 4


def test_a_limit_above_the_machine_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"4096\.0 TiB"), prober(limit=2**52):
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_out_of_memory_in_torchscript_is_recognised() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU())
    scripted = torch.jit.script(module)
    plan = brim.find_batch_size(
        lambda batch: scripted(batch),
        lambda size: torch.zeros(size, 1000),
        model=module,
        memory_limit="6MiB",
        objective="largest",
        max_batch_size=512,
    )
    assert plan.size < 512
    assert plan.oom_events == 1


def test_steps_end_once_their_mean_is_known_and_are_continued_while_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps_made(durations: list[float]) -> tuple[int, float]:
        taken = iter(durations)

        def timed(function: Callable[[], Any], *, repeats: int) -> float:
            return sum((function(), next(taken))[1] for _ in range(repeats))

        settings = ProbeSettings(memory_limit_bytes=2**30)
        with DeviceProber(CallableWorkload(step=lambda x: x * 2, make_batch=rows, device="cpu"), settings) as probing:
            monkeypatch.setattr(probing.memory, "timed", timed)
            probe = probing.probe(4)
        assert probe.step_seconds is not None
        return probe.steps, probe.step_seconds

    steps, seconds = steps_made([0.05, *[0.01] * 30])
    assert steps < 8  # a quarter of a second would be twenty
    assert seconds == pytest.approx(0.01)  # without the first
    steps, _ = steps_made([0.01, *[0.008, 0.012] * 30])
    assert steps == 20


def test_a_probe_says_where_its_seconds_went_also_when_it_fails() -> None:
    with prober(limit=64 * KIB) as probing:
        fitting, failing = probing.probe(8), probing.probe(1000)
    assert fitting.steady_seconds > 0
    assert fitting.warm_up_seconds > 0
    assert (failing.verdict, failing.steady_seconds) == ("oom", 0.0)
    assert failing.warm_up_seconds > 0
    assert probing.state_seconds > 0


@pytest.fixture
def nothing_set_aside():
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_set_aside")
def test_what_is_loaded_is_set_aside_while_sizes_are_probed_and_not_longer() -> None:
    seen: list[int] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        seen.append(gc.get_freeze_count())
        if len(seen) > 3:
            raise ValueError("a mistake in the step")
        return batch * 2

    def search() -> None:
        with prober(step) as probing:
            probing.probe(1)
            probing.probe(2)

    with pytest.raises(ValueError, match="a mistake"):
        search()
    assert min(seen) > 10_000  # torch alone has more
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_set_aside")
def test_what_the_caller_has_set_aside_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with prober() as probing:
        probing.probe(1)
    assert gc.get_freeze_count() > 0.9 * before


@pytest.mark.usefixtures("nothing_set_aside")
@pytest.mark.parametrize(("unknown_bytes", "collected"), [(0, False), (2**30, True)])
def test_old_garbage_is_looked_for_only_where_something_unknown_is_on_the_device(
    unknown_bytes: int, collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node:
        pass

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    gc.collect()  # the node is old now
    del node
    model = nn.Linear(256, 1)
    own = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    probing = prober(lambda batch: model(batch), model=model)
    monkeypatch.setattr(probing.memory, "in_use_bytes", lambda: own + unknown_bytes)
    with probing:
        assert (gone() is None) == collected
