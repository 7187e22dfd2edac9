"""What CUDA kernels take beside their results, and what torch does in place when nothing watches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from brim.forecasting.events import Trace
from brim.forecasting.trace import trace_workload
from tests.forecasting.traced_workloads import training

ROWS, WIDTH = 200, 96
WHOLE = 4 * ROWS * WIDTH * WIDTH


def traced(function: Callable[[torch.Tensor], torch.Tensor]) -> Trace:
    """A training step of a function of [rows, width, width]."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x * self.scale)

    return trace_workload(training(Model(), lambda n: torch.randn(n, WIDTH, WIDTH)), ROWS)


def scratch(trace: Trace) -> dict[str, list[int]]:
    """The bytes of each block of scratch in the first step, by kernel."""
    blocks: dict[str, list[int]] = {}
    for event in trace.events[: trace.step_starts[1]]:
        if event.op.endswith("scratch") and event.kind == "alloc":
            blocks.setdefault(event.op, []).append(event.bytes)
    return blocks


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda x: x.softmax(-1), {"aten._softmax_backward_data scratch": [WHOLE]}),  # gradient × output
        (lambda x: x.log_softmax(-1), {}),
        (lambda x: x.transpose(1, 2).softmax(-1), {"aten._softmax scratch": [WHOLE]}),  # made contiguous
        (lambda x: torch.roll(x, (1, 2, 3), (0, 1, 2)), {"aten.roll scratch": [WHOLE] * 4}),  # forward and back
        (lambda x: torch.roll(x, 1, 0), {}),
        (lambda x: torch.bmm(x, x), {}),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), {}),  # cuBLAS reads columns as well
        (lambda x: torch.bmm(x[:, :, ::2], x[:, ::2]), {"aten.bmm scratch": [WHOLE // 2] * 2}),  # again in the backward
        (lambda x: functional.layer_norm(x.transpose(1, 2), (WIDTH,)), {"aten.native_layer_norm scratch": [WHOLE]}),
    ],
)
def test_a_kernel_takes_its_scratch(function: Callable[..., torch.Tensor], taken: dict[str, list[int]]) -> None:
    found = scratch(traced(function))
    assert {name: found.get(name) for name in taken} == taken
    assert taken or not found


def test_scratch_is_gone_when_its_kernel_has_ended() -> None:
    trace = traced(lambda x: x.softmax(-1))
    index = next(i for i, event in enumerate(trace.events) if event.op == "aten._softmax_backward_data scratch")
    block = trace.events[index].block
    following = [(event.kind, event.op) for event in trace.events[index + 1 : index + 3]]
    assert following == [("alloc", "aten._softmax_backward_data"), ("free", "aten._softmax_backward_data scratch")]
    assert trace.events[index + 2].block == block


def test_dropout_keeps_a_mask_of_bytes() -> None:
    trace = traced(lambda x: functional.dropout(x, 0.5))
    kept = [event.bytes for event in trace.events if event.op == "aten.native_dropout" and event.kind == "alloc"]
    assert kept[:2] == [WHOLE, WHOLE // 4]


def test_rms_norm_is_one_kernel_where_torch_has_it() -> None:
    trace = traced(lambda x: functional.rms_norm(x, (WIDTH,)))
    operations = {event.op for event in trace.events}
    assert ("aten._fused_rms_norm" in operations) == hasattr(torch.ops.aten, "_fused_rms_norm")


def test_gradients_that_meet_are_added_in_place() -> None:
    # x goes two ways, and both gradients are fresh: the second is added into the first.
    trace = traced(lambda x: x.exp() + x.sin())
    added = [e for e in trace.events if e.kind == "alloc" and e.op == "aten.add" and e.bytes == WHOLE]
    assert len(added) == 2  # one sum in each of two forwards, none in a backward


def test_gradients_that_others_hold_are_added_into_new_memory() -> None:
    # The gradient of a sum goes to both of its terms as it is: whoever adds to it must not change it.
    trace = traced(lambda x: x + x.exp() + x)
    added = [e for e in trace.events if e.kind == "alloc" and e.op == "aten.add" and e.bytes == WHOLE]
    assert len(added) > 4


def test_the_gradient_of_an_index_is_written_into_the_zeros_made_for_it() -> None:
    trace = traced(lambda x: x[torch.tensor([0, 2, 2])])
    start = trace.step_starts[1]
    whole = [event.op for event in trace.events[start:] if event.kind == "alloc" and event.bytes == WHOLE]
    assert "aten.new_zeros" in whole
    assert "aten.index_put" not in whole


def test_a_bias_is_added_in_place_where_the_product_cannot_add_it() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    workload = training(layer, lambda n: torch.randn(n, WIDTH, WIDTH), lambda model, x: model(x.transpose(1, 2)).mean())
    trace = trace_workload(workload, ROWS)
    assert not any(event.op == "aten.add" and event.bytes == WHOLE for event in trace.events)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_a_reserve_and_say_that_it_is_estimated(layer: type[nn.Module]) -> None:
    model = layer(64, 128, 2, batch_first=True)
    workload = training(model, lambda n: torch.randn(n, 32, 64), lambda model, x: model(x)[0].square().mean())
    trace = trace_workload(workload, 8)
    assert trace.approximate is not None
    assert "recurrent" in trace.approximate
    assert any(event.op == "cudnn_rnn" for event in trace.events)
    assert trace_workload(workload, 16).peak_allocated() > trace.peak_allocated()


def test_a_sum_of_a_forward_that_a_checkpoint_runs_again_takes_new_memory() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + x.sin()).cos()  # which keeps the sum

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        again = torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        assert isinstance(again, torch.Tensor)
        return again

    def sums(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        return sum(e.kind == "alloc" and e.op == "aten.add" and e.bytes == WHOLE for e in traced(function).events)

    assert sums(checkpointed) == sums(plain) + 2  # once more in the backward of each of two steps


def test_the_backward_of_a_norm_copies_its_gradient() -> None:
    trace = traced(lambda x: functional.layer_norm(x, (WIDTH,)).transpose(1, 2).exp())
    events = trace.events[: trace.step_starts[1]]
    found = [(e.kind, e.op) for e in events if e.op.startswith("aten.native_layer_norm_backward")]
    results = [place for place, (kind, op) in enumerate(found) if kind == "alloc" and not op.endswith("scratch")]
    copy = found.index(("alloc", "aten.native_layer_norm_backward scratch"))
    assert copy > max(place for place in results if place < copy)
    assert found[copy + 1] == ("free", "aten.native_layer_norm_backward scratch")


def test_sums_are_noted_with_the_event_of_their_result() -> None:
    trace = traced(lambda x: x.sum(0))
    noted = next(call for call in trace.reductions if call.inputs == ROWS)
    assert (noted.outputs, noted.along_memory, noted.output_vector) == (WIDTH * WIDTH, False, 4)
    result = trace.events[noted.event]
    assert (result.kind, result.op, result.bytes) == ("alloc", "aten.sum", 4 * WIDTH * WIDTH)
