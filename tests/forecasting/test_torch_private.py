"""Each private name of torch that a forecast uses still exists, and still does what the forecast needs it for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import brim.forecasting
from brim.forecasting import torch_private
from brim.forecasting.ledger import Ledger
from brim.forecasting.tracer import Tracer

aten = torch.ops.aten


class Names(torch_private.TorchDispatchMode):
    """Keeps the names of the operations that come by, and whether the autograd engine ran them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), torch_private.current_graph_task_id() != -1))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_separates_forward_and_backward_operations() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with Names() as names:
        (leaf * 2).sum().backward()
    assert ("aten.mul.Tensor", False) in names.seen
    assert ("aten.mul.Tensor", True) in names.seen
    assert torch_private.current_graph_task_id() == -1


def test_the_node_that_runs_is_known_by_the_number_it_was_made_with() -> None:
    seen: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch_private.node_number(torch_private.current_autograd_node()))
            return gradient

    leaf = torch.ones(3, requires_grad=True)
    before = torch_private.next_node_number()
    result: Any = Watched.apply(leaf)  # type: ignore[no-untyped-call]
    after = torch_private.next_node_number()
    result.sum().backward()
    assert len(seen) == 1
    assert before <= seen[0] < after
    accumulates = result.grad_fn.next_functions[0][0]
    assert torch_private.node_number(accumulates) > torch_private.next_node_number()
    assert accumulates.variable is leaf
    assert torch_private.current_autograd_node() is None


def test_modes_can_be_left_for_a_while() -> None:
    with Names() as names:
        with torch_private.without_dispatch_modes():
            torch.ones(3)
        guard = torch_private.without_dispatch()
        torch.ones(3)
        del guard
        assert names.seen == []
        torch.ones(3)
    assert len(names.seen) == 1


def test_a_tracer_is_no_mode_that_torch_wraps_for_its_compiler() -> None:
    assert Tracer(Ledger())._should_skip_dynamo() is False
    asked = getattr(torch_private.TorchDispatchMode, "_should_skip_dynamo", None)
    assert asked is None or callable(asked)


def test_leaves_of_a_batch_are_its_tensors() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert torch_private.tree_leaves({"a": [one, 3], "b": (two,)}) == [one, 3, two]


def test_a_wrapper_subclass_has_a_shape_and_no_data_and_answers_operations() -> None:
    class Shape(torch.Tensor):
        __torch_function__ = torch_private.NO_TORCH_FUNCTION

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.full((), 7.0) if func is aten.neg.default else NotImplemented

    made = torch_private.make_wrapper_subclass(Shape, (3, 2), strides=(2, 1), storage_offset=0, dtype=torch.bfloat16)
    assert (tuple(made.shape), made.stride(), made.dtype) == ((3, 2), (2, 1), torch.bfloat16)
    assert float(torch.neg(made)) == 7.0


def test_a_tensor_that_answers_no_operations_is_recognised() -> None:
    class Answers(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    plain: Any = torch.nn.Parameter.__torch_dispatch__ if hasattr(torch.nn.Parameter, "__torch_dispatch__") else None
    assert plain in (None, torch_private.NO_TORCH_DISPATCH)
    assert Answers.__torch_dispatch__ is not torch_private.NO_TORCH_DISPATCH


def test_the_use_count_grows_where_cpp_holds_a_tensor() -> None:
    tensor = torch.ones(3, requires_grad=True)
    before = torch_private.use_count(tensor)
    if before == 0:
        pytest.skip("this torch does not count")
    held = (tensor * 2).grad_fn  # the node that adds to its gradient holds the leaf
    assert torch_private.use_count(tensor) > before
    del held


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_have_the_address_of_what_they_view(device: str) -> None:
    whole, other = torch.empty(4, device=device), torch.empty(4, device=device)
    addresses = [torch_private.storage_address(one.untyped_storage()) for one in (whole, whole[1:], other)]
    assert addresses[0] == addresses[1] != addresses[2]


def test_a_composite_operation_is_called_as_what_it_is_made_of() -> None:
    assert torch_private.is_composite_on_cuda("aten::linear")
    assert not torch_private.is_composite_on_cuda("aten::mm")
    with Names() as names, torch.no_grad():
        torch_private.composite(aten.linear.default, torch.ones(2, 3), torch.ones(4, 3))
    assert "aten.mm.default" in [name for name, _ in names.seen]


def test_the_operations_that_autocast_handles_are_listed() -> None:
    for key in ("AutocastCPU", "AutocastCUDA"):
        assert {"mm", "linear", "conv2d"} & torch_private.registered_operations(key)


def test_operations_can_be_called_below_autocast() -> None:
    left = right = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(left, right).dtype is torch.bfloat16
        with torch_private.without_cpu_autocast():
            assert torch.mm(left, right).dtype is torch.float32


def test_fake_tensors_have_shapes_on_a_missing_device() -> None:
    like = [torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")]
    mode, fakes, unsupported = torch_private.fake_tensors(like, [torch.device("cuda", 0)] * 2)
    with mode:
        result = aten.mm.default(*fakes)
    assert (tuple(result.shape), result.device.type) == ((2, 5), "cuda")
    assert issubclass(unsupported, Exception)


def test_optimizers_handle_lists_of_tensors_at_once_inside_the_block_alone() -> None:
    def operations() -> set[str]:
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer = torch.optim.SGD(weights, lr=0.1)
        with Names() as names:
            optimizer.step()
        return {name for name, _ in names.seen if "_foreach" in name}

    with torch_private.foreach_as_on_cuda(torch.Tensor):
        assert operations()
    assert not operations()


def test_no_other_file_of_the_forecast_uses_private_names_of_torch() -> None:
    private = re.compile(r"torch(\.\w+)*\._(?!dynamo)|_cdata|_use_count|_op_dk")
    folder = Path(brim.forecasting.__file__).parent
    users = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if path.name != "torch_private.py" and private.search(line) and "torch.ops." not in line
    ]
    assert users == []
