"""Every private name of torch that a forecast uses, in one place. `tests/forecasting/test_torch_private.py` has a test
for each, so that a new torch shows at once which of them is gone or means something else.

| name here | in torch | used to |
|---|---|---|
| `TorchDispatchMode` | `torch.utils._python_dispatch` | see every operation below autograd |
| `without_dispatch_modes` | the same | leave a trace for a short while |
| `without_dispatch` | `_C._DisableTorchDispatch` | run an operation on real values inside a trace |
| `tree_leaves` | `torch.utils._pytree` | find the tensors of a batch or of an optimizer's state |
| `current_graph_task_id` | `_C._current_graph_task_id` | know whether the autograd engine runs; -1: it does not |
| `current_autograd_node` | `_C._current_autograd_node` | know which node of the graph it runs |
| `next_node_number`, `node_number` | `autograd._get_sequence_nr`, `Node._sequence_nr` | know when a node was made |
| `NO_TORCH_FUNCTION`, `NO_TORCH_DISPATCH` | `_C._disabled_torch_*_impl` | make and recognise tensor subclasses |
| `make_wrapper_subclass` | `Tensor._make_wrapper_subclass` | make a tensor without data |
| `use_count` | `Tensor._use_count` | know whether only the engine holds a gradient |
| `storage_address` | `UntypedStorage._cdata` | know whether two tensors share memory |
| `composite`, `is_composite_on_cuda` | `OpOverload._op_dk`, `_C._dispatch_has_kernel_for_dispatch_key` | decompose |
| `registered_operations` | `_C._dispatch_get_registrations_for_dispatch_key` | list what autocast handles |
| `without_cpu_autocast` | `_C._ExcludeDispatchKeyGuard` | call what lies below autocast |
| `fake_tensors` | `torch._subclasses.fake_tensor` | ask torch for the shapes of a result |
| `foreach_as_on_cuda` | lists in `torch.optim`, `torch.utils._foreach_utils` | let optimizers choose as on CUDA |

`Tracer._should_skip_dynamo` answers a question that torch asks of dispatch modes; it is tested there as well.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "NO_TORCH_DISPATCH", "NO_TORCH_FUNCTION", "TorchDispatchMode", "composite", "current_autograd_node",
    "current_graph_task_id", "fake_tensors", "foreach_as_on_cuda", "is_composite_on_cuda", "make_wrapper_subclass",
    "next_node_number", "node_number", "registered_operations", "storage_address", "tree_leaves", "use_count",
    "without_cpu_autocast", "without_dispatch", "without_dispatch_modes",
]  # fmt: skip

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
NO_TORCH_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node  # None between two nodes
next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # of this thread
without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch  # as long as what it returns is held
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


def use_count(tensor: torch.Tensor) -> int:
    """How often C++ holds a tensor; 0 where this torch does not say."""
    count: Any = getattr(tensor, "_use_count", None)
    return int(count()) if count is not None else 0


def node_number(node: Any) -> int:
    """When a node was made, among those of its thread; of one that accumulates gradients, more than any other's."""
    return int(node._sequence_nr())


def storage_address(storage: torch.UntypedStorage) -> int:
    """What is the same for two tensors on the same memory, also on the meta device."""
    address: int = storage._cdata
    return address


def composite(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the C++ kernel of a composite operation, which calls the operations that it is made of."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_composite_on_cuda(name: str) -> bool:
    """Whether an operation has no kernel of its own there; a torch without CUDA answers for the CPU instead."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA" if torch.version.cuda else "CPU")


def registered_operations(key: str) -> set[str]:
    """The operations of aten that have a kernel for a dispatch key, such as `AutocastCPU`."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def without_cpu_autocast() -> contextlib.AbstractContextManager[Any]:
    """Call operations below autocast, which stays switched on."""
    guard: Any = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
    return guard  # type: ignore[no-any-return]


def fake_tensors(like: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> tuple[Any, list[Any], Any]:
    """A mode, fake tensors like these meta tensors on those devices, and the error for an unknown operation."""
    from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

    mode = FakeTensorMode(allow_fallback_kernels=False)
    convert: Any = mode.fake_tensor_converter.from_meta_and_device
    fakes = [convert(mode, meta, device) for meta, device in zip(like, devices, strict=True)]
    return mode, fakes, UnsupportedOperatorException


_FOREACH_MODULES = ("torch.optim.optimizer", "torch.optim.swa_utils", "torch.utils._foreach_utils")
_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"
_FOREACH_TYPES = "_foreach_supported_types"


@contextlib.contextmanager
def foreach_as_on_cuda(tensor_type: type) -> Iterator[None]:
    """Let `foreach=None` mean for CPU tensors, and those of a type, inside the block what it means for CUDA tensors.

    Optimizers then handle lists of tensors at once, with the temporaries of that.
    """
    modules: list[Any] = [importlib.import_module(name) for name in _FOREACH_MODULES]
    names = (_FOREACH_DEVICES, _FOREACH_TYPES)
    before = [(module, *(getattr(module, name, None) for name in names)) for module in modules]
    for module, devices, types in before:
        if devices is not None:
            setattr(module, _FOREACH_DEVICES, lambda devices=devices: [*devices(), "cpu"])
        if types is not None:
            setattr(module, _FOREACH_TYPES, [*types, tensor_type])
    try:
        yield
    finally:
        for module, devices, types in before:
            if devices is not None:
                setattr(module, _FOREACH_DEVICES, devices)
            if types is not None:
                setattr(module, _FOREACH_TYPES, types)
