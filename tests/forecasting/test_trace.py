"""A trace holds what a real step would hold, event by event, and leaves no trace of itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from brim.errors import RequestError
from brim.forecasting.events import Target, Trace
from brim.forecasting.ledger import Ledger
from brim.forecasting.trace import UntraceableError, _metered, trace_workload
from brim.forecasting.tracer import Tracer
from brim.workloads.base import Workload
from brim.workloads.callables import CallableWorkload
from brim.workloads.checkpointing import enable_gradient_checkpointing
from brim.workloads.inference import ForwardWorkload
from tests.forecasting.traced_workloads import Residual, convolutional, pairwise, perceptron, rows, training

HOPPER = Target(name="h200", compute_capability=(9, 0), total_bytes=141 * 10**9)


def live_after(trace: Trace, count: int) -> int:
    return sum(event.bytes if event.kind == "alloc" else -event.bytes for event in trace.events[:count])


def test_a_forward_holds_weights_batch_and_results() -> None:
    model = nn.Linear(1000, 3000, bias=False).eval()
    trace = trace_workload(ForwardWorkload(model=model, make_batch=lambda n: torch.randn(n, 1000), device="cpu"), 8)
    weights, batch, result = 4 * 3_000_000, 4 * 8_000, 4 * 24_000
    assert trace.peak_allocated() == weights + batch + result
    assert trace.live_at_peak() == {
        "weights": weights, "buffers": 0, "gradients": 0, "optimizer": 0, "inputs": batch, "activations": result,
        "temporary": 0, "cache": 0,
    }  # fmt: skip
    assert trace.resident()["weights"] == weights
    assert (trace.gemm_calls, trace.lt_calls, trace.approximate) == (2, 0, None)  # one product in each of two steps


SAME_AS_A_REAL_STEP: dict[str, Callable[[], Workload]] = {
    "perceptron": lambda: training(perceptron(), rows),
    "convolutions": convolutional,
    "residual": lambda: training(nn.Sequential(*(Residual() for _ in range(4))), lambda n: torch.randn(n, 64, 256)),
    "pairwise loss": pairwise,
    "complex numbers": lambda: training(
        nn.Linear(64, 64), lambda n: torch.randn(n, 64, 64), lambda model, x: torch.fft.rfft(model(x)).abs().mean()
    ),
    "vmap": lambda: training(
        nn.Linear(64, 64),
        lambda n: torch.randn(n, 64, 64),
        lambda model, x: torch.vmap(lambda row: model(row).square().mean())(x).mean(),
    ),
    "gradient of a gradient": lambda: training(
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)), rows, _penalty
    ),
}  # fmt: skip


def _penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.requires_grad_()
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return gradient.square().mean()


@pytest.mark.parametrize("name", SAME_AS_A_REAL_STEP)
def test_in_float32_a_trace_peaks_where_a_real_step_on_the_cpu_does(name: str) -> None:
    make = SAME_AS_A_REAL_STEP[name]
    traced, real = trace_workload(make(), 8), _metered(make(), 8, 2)
    assert traced.approximate is None
    assert traced.peak_allocated() == real.peak_allocated()


def test_the_second_step_starts_with_persistent_tensors_only() -> None:
    model = perceptron()
    trace = trace_workload(training(model, rows), 16)
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    assert trace.step_starts[0] < trace.step_starts[1]
    assert live_after(trace, trace.step_starts[1]) == 4 * parameters + 4 * 16 * 64  # AdamW keeps two of each
    assert {event.category for event in trace.events} >= {"weights", "gradients", "optimizer", "inputs", "activations"}


def test_blocks_are_allocated_before_freed_and_categories_sum_to_the_peak() -> None:
    trace = trace_workload(convolutional(), 4)
    held: set[int] = set()
    for event in trace.events:
        if event.kind == "alloc":
            assert event.block not in held
            held.add(event.block)
        else:
            held.remove(event.block)
    assert sum(trace.live_at_peak().values()) == trace.peak_allocated()


def test_traces_of_two_sizes_have_the_same_events_but_for_their_bytes() -> None:
    workload = convolutional()
    small, large = (trace_workload(workload, size) for size in (4, 8))
    assert [(e.kind, e.block, e.op, e.category) for e in small.events] == [
        (e.kind, e.block, e.op, e.category) for e in large.events
    ]


def test_a_pairwise_loss_is_quadratic_in_the_batch() -> None:
    workload = pairwise()
    peaks = [trace_workload(workload, size).peak_allocated() for size in (1000, 2000, 3000)]
    first, second = (b - a for a, b in itertools.pairwise(peaks))
    assert second - first > 0.9 * 2 * 1000**2 * 4 * 2  # two matrices of pairs at least


def test_gradient_checkpointing_keeps_fewer_activations() -> None:
    def workload(checkpointed: bool) -> Workload:
        model = nn.Sequential(*(Residual() for _ in range(6)))
        if checkpointed:
            enable_gradient_checkpointing(model)
        return training(model, lambda n: torch.randn(n, 256, 256))

    plain, checkpointed = (trace_workload(workload(flag), 16) for flag in (False, True))
    assert checkpointed.peak_allocated() < 0.75 * plain.peak_allocated()


def test_half_precision_training_casts_each_weight_once() -> None:
    model = nn.Sequential(nn.Linear(64, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 64, bias=False))
    trace = trace_workload(training(model, rows, autocast_dtype=torch.bfloat16), 4096)
    after_relu = [event.bytes for event in trace.events if event.op == "aten.relu" and event.kind == "alloc"]
    assert after_relu == [2 * 4096 * 2048] * 2
    casts = [e for e in trace.events if e.kind == "alloc" and e.op == "aten._to_copy" and e.bytes == 2 * 64 * 2048]
    assert len(casts) == 2 * 2  # two weights, two steps


def test_a_float16_step_with_a_scaler_reaches_the_optimizer() -> None:
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu")
    trace = trace_workload(training(model, rows, autocast_dtype=torch.float16, scaler=scaler), 4)
    state = 2 * sum(4 * parameter.numel() for parameter in model.parameters())
    taken = [event.bytes for event in trace.events if event.category == "optimizer" and event.kind == "alloc"]
    assert sum(taken) == state


def test_adamw_works_on_lists_of_tensors_as_it_does_on_cuda() -> None:
    trace = trace_workload(training(perceptron(), rows), 4)
    assert any(event.op == "aten._foreach_sqrt" for event in trace.events)


def test_a_convolution_is_noted_with_where_it_takes_memory() -> None:
    trace = trace_workload(convolutional(), 4)
    first = trace.convolutions[0]
    assert (first.direction, first.input, first.weight, first.dtype) == (
        "forward",
        (4, 3, 64, 64),
        (16, 3, 3, 3),
        "float32",
    )
    assert [call.direction for call in trace.convolutions[:5]] == ["forward", "forward", "dgrad", "wgrad", "wgrad"]
    for call in trace.convolutions:
        assert trace.events[call.event].kind == "alloc"


def test_weights_come_in_the_order_in_which_a_module_is_moved() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(1000))
            self.register_buffer("kept", torch.ones(3000))
            self.layer = nn.BatchNorm1d(2000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x)
            return result

    trace = trace_workload(training(Model(), lambda n: torch.randn(n, 2000)), 4)
    resident = [event for event in trace.events[: trace.step_starts[0]] if event.category in ("weights", "buffers")]
    # Children first, of each its parameters and then its buffers: weight, bias, mean, variance, count; own, kept.
    assert [event.bytes for event in resident] == [8000, 8000, 8000, 8000, 8, 4000, 12000]


def test_a_convolution_answers_in_the_memory_format_of_its_input() -> None:
    seen: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(model(batch.to(memory_format=torch.channels_last)))
        return seen[-1].square().mean()

    model = nn.Conv2d(16, 32, 3)
    trace = trace_workload(training(model, lambda n: torch.randn(n, 16, 64, 64), loss), 4)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert {(call.direction, call.channels_last, call.copies_weight) for call in trace.convolutions} == {
        ("forward", True, True),
        ("wgrad", True, True),
    }


def test_a_step_may_read_small_integers_and_masks() -> None:
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden, lengths = batch
        seen.append((int(lengths.max()), lengths.tolist(), bool((lengths > 0).all())))
        mask = torch.arange(hidden.shape[1]) < lengths[:, None]
        picked = model(hidden)[mask]
        seen.append(tuple(picked.shape))
        return picked.mean()

    workload = training(
        nn.Linear(64, 64), lambda n: (torch.randn(n, 100, 64), torch.arange(1, n + 1) * 10), loss
    )  # fmt: skip
    trace = trace_workload(workload, 4)
    assert seen[:2] == [(40, [10, 20, 30, 40], True), (100, 64)]
    assert trace.approximate is None


def test_a_mask_that_only_a_run_would_know_is_taken_as_full_and_noted() -> None:
    trace = trace_workload(
        training(nn.Linear(64, 64), rows, lambda model, x: (y := model(x))[y > 0].mean()), 512
    )  # fmt: skip
    assert trace.approximate is not None
    assert "taken as full" in trace.approximate


def test_logging_a_loss_and_checking_it_for_nan_is_no_guess() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: torch.Tensor) -> Any:
        loss = model(batch).mean()
        if loss.isnan() or not torch.isfinite(loss):
            raise RuntimeError("diverged")
        loss.backward()
        optimizer.step()
        return loss.item(), float(loss.detach()), loss.detach().numpy()

    workload = CallableWorkload(
        step=step, make_batch=lambda n: torch.randn(n, 512, 64), model=model, optimizer=optimizer
    )
    assert trace_workload(workload, 4).approximate is None


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=3, unique=True),
    width=st.integers(1, 96),
    train=st.booleans(),
)
def test_the_peak_grows_with_the_batch(sizes: list[int], width: int, train: bool) -> None:
    model = perceptron(width)
    workload: Workload = (
        training(model, rows) if train else ForwardWorkload(model=model.eval(), make_batch=rows, device="cpu")
    )
    peaks = [trace_workload(workload, size).peak_allocated() for size in sorted(sizes)]
    assert peaks == sorted(peaks)


class Remembering(nn.Module):
    """A module that keeps what it makes, and writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.table: torch.Tensor | None = None
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(200, 64) * 2
        self.history.append(x)
        result: torch.Tensor = self.norm(self.layer(x)) + self.table[: x.shape[0]]
        return functional.dropout(result, 0.5)


def test_nothing_outside_a_trace_changes() -> None:
    model = Remembering()
    workload = training(model, rows, autocast_dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    random_states = (torch.get_rng_state(), random.getstate())
    attributes = dict(vars(model))
    group = dict(workload.optimizer.param_groups[0])
    for _ in range(2):
        trace_workload(workload, 128, target=HOPPER)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
    assert (vars(model), model.table, model.history) == (attributes, None, [])
    assert dict(workload.optimizer.param_groups[0]) == group
    assert not workload.optimizer.state
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert torch.get_default_dtype() is torch.float32


def test_torch_computes_after_a_trace_as_it_did_before() -> None:
    def outputs() -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8, 8, requires_grad=True)
        half = torch.randn(2, 3, 6, 6, 6).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = [
                functional.layer_norm(x, (8,)), functional.max_pool3d(half, 2), functional.linear(x, x[0, 0]),
                x.softmax(-1), functional.scaled_dot_product_attention(x, x, x), functional.dropout(x, 0.5),
            ]  # fmt: skip
        functional.rms_norm(x, (8,)).sum().backward()
        return [*((made_one.dtype, made_one.detach().float()) for made_one in made), (x.dtype, x.grad)]

    before = outputs()
    trace_workload(training(perceptron(), rows, autocast_dtype=torch.bfloat16), 4)
    for (dtype, value), (later_dtype, later) in zip(before, outputs(), strict=True):
        assert dtype is later_dtype
        assert torch.equal(value, later)


def test_a_trace_that_fails_leaves_nothing_changed_either() -> None:
    model = Remembering()

    def broken(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch)
        raise ZeroDivisionError("in the user's own loss")

    with pytest.raises(UntraceableError, match="in the user's own loss"):
        trace_workload(training(model, rows, broken), 8)
    assert model.table is None
    assert model.history == []
    assert torch.ones(2).add(1).tolist() == [2, 2]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("entries", [None, 8])
def test_a_cache_that_a_step_filled_gives_real_steps_real_tensors(entries: int | None, fails: bool) -> None:
    @functools.lru_cache(maxsize=entries)
    def tables(length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        angles = torch.arange(length * 64.0).view(length, 64)
        return angles.sin(), {"cosines": angles.cos()}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sines, others = tables(128)
        if failing:
            raise ZeroDivisionError
        return model(batch + sines + others["cosines"]).square().mean()

    failing = fails
    workload = training(nn.Linear(64, 64), lambda n: torch.randn(n, 128, 64), loss)
    with contextlib.suppress(UntraceableError):
        trace_workload(workload, 8, or_approximately=False)
    failing = False
    assert loss(workload.model, torch.ones(1, 128, 64)).item() != 1.0


def test_a_tensor_that_a_step_keeps_elsewhere_is_refused_by_a_real_step() -> None:
    kept: dict[int, torch.Tensor] = {}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if 128 not in kept:
            kept[128] = torch.full((128, 64), 2.0)
        return (model(batch) * kept[128]).square().mean()

    workload = training(nn.Linear(64, 64), lambda n: torch.randn(n, 128, 64), loss)
    trace_workload(workload, 8)
    assert trace_workload(workload, 8).peak_allocated() > 0  # another trace takes it for what was there before
    with pytest.raises(RequestError, match=r"shape \(128, 64\).*outside of the model"):
        workload.step(workload.make_batch(2))
    kept.clear()
    assert workload.step(workload.make_batch(2)).item() != 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_holds_the_model_after_a_trace(fails: bool) -> None:
    def traced() -> tuple[weakref.ref[nn.Module], Trace | None]:
        model = perceptron()

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            found = functional.dropout(model(batch), 0.5).softmax(-1).square().mean()
            return 1 / 0 if fails else found

        with contextlib.suppress(UntraceableError):
            return weakref.ref(model), trace_workload(training(model, rows, loss), 8, target=HOPPER)
        return weakref.ref(model), None

    model, trace = traced()
    assert (trace is None) is fails
    gc.collect()  # a step's frames may be in a cycle with an error
    assert model() is None


def test_sizes_that_make_no_sense_are_refused() -> None:
    workload = training(perceptron(), rows)
    with pytest.raises(RequestError, match="batch_size=0"):
        trace_workload(workload, 0)
    wrong = training(perceptron(), lambda n: rows(n + 1))
    with pytest.raises(RequestError, match="returned a batch of 5"):
        trace_workload(wrong, 4)


def test_a_compiled_step_is_traced_as_it_is_written() -> None:
    model = perceptron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some torch warn about their own modules on the way
        compiled = torch.compile(model)
    plain = trace_workload(training(model, rows), 8)
    assert trace_workload(training(model, rows, lambda _, x: compiled(x).square().mean()), 8).events == plain.events


def test_random_operations_with_a_required_generator_are_traced() -> None:
    generator = torch.Generator().manual_seed(0)  # stands for one of the card, which no host kernel would take
    with Tracer(Ledger(), device_type="mps"):
        for random in (torch.ops.aten.randint.low_generator, torch.ops.aten.randint.low):
            more = {"generator": generator} if random is torch.ops.aten.randint.low_generator else {}
            made = random(0, 10, [8], device=torch.device("mps"), **more)
            assert (made.shape, made.device.type) == ((8,), "mps")
