"""Host copies of everything a training step can change, and putting it back bit for bit, in place.

Unlike `load_state_dict`, which casts to the receiving dtype and replaces tensors, a snapshot writes bytes
back into the memory they came from and puts the very same objects back where they were.

    snapshot = StateSnapshot.take([model], [optimizer], [scaler, scheduler])
    ...                                    # steps at other batch sizes
    snapshot.restore()                     # as if they had not happened

Two things are recorded. Storages, once each however many tensors view them, so that ties, slices and
expanded views need no care. And containers: the `__dict__` of modules, optimizers and other stateful
objects and the dicts, lists and sets in them, whose contents are put back by reference.

Knows nothing of why a step ran. Out of its reach: state in C++ objects other than random generators, such
as DDP's reducer and the dropout state cuDNN keeps for recurrent layers.
"""

from __future__ import annotations

import enum
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from brim.errors import RequestError

__all__ = ["StateSnapshot", "required_bytes"]

_VALUES = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_UNCHANGING = _VALUES + _CODE  # never change in place, so a reference is already a copy
_PLAIN = frozenset({type(None), bool, int, float, str})  # what most of them are: recognised at once
_Undo = Callable[[], object]


class StateSnapshot:
    """The state of some modules, optimizers and stateful objects, and of every random generator, at one moment."""

    def __init__(self, inventory: _Inventory, rng: list[_Undo]) -> None:
        self._inventory = inventory
        self._rng = rng
        self._host_bytes = inventory.total_bytes
        self._bytes = [(storage, _host_copy(storage)) for storage in inventory.storages.values()]
        self._clones = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in inventory.without_storage]
        self._arrays = [(array, array.copy()) for array in inventory.arrays]

    @classmethod
    def take(
        cls,
        modules: Iterable[nn.Module] = (),
        optimizers: Iterable[Optimizer] = (),
        stateful: Iterable[Any] = (),
        devices: Iterable[torch.device | str] = (),
    ) -> StateSnapshot:
        """Copy to host memory what a step may change; see `required_bytes` for how much that takes.

        Optimizers and modules that a stateful object refers to are taken only if they are listed themselves.
        `devices` names further devices in use whose work should be waited for and whose random generator
        kept; those that hold a listed tensor, and every initialised CUDA device's generator, are included.
        """
        inventory = _Inventory(modules, optimizers, stateful)
        inventory.devices.update(torch.device(device) for device in devices)
        _synchronize(inventory.devices)
        return cls(inventory, list(_random_generators(inventory)))

    @property
    def host_bytes(self) -> int:
        """Host memory that the copies hold."""
        return self._host_bytes

    def restore(self) -> None:
        """Put everything back; may be called again after further steps."""
        _synchronize(self._inventory.devices)
        with torch.no_grad():
            for container in self._inventory.containers:
                container.put_back()
            for tensor in self._inventory.tensors:
                tensor.put_back_memory()
            for storage, host in self._bytes:
                if storage.nbytes() != host.nbytes():
                    storage.resize_(host.nbytes())
                storage.copy_(host)
            for target, clone in self._clones:
                target.copy_(clone)
            for array, copied in self._arrays:
                array[...] = copied
            for tensor in self._inventory.tensors:  # gradients last: they must match the tensor they belong to
                tensor.put_back_gradient()
        for undo in self._rng:
            undo()
        _synchronize(self._inventory.devices)


def required_bytes(
    modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = (), stateful: Iterable[Any] = ()
) -> int:
    """The host memory that `StateSnapshot.take` of the same objects would hold; copies nothing."""
    return _Inventory(modules, optimizers, stateful).total_bytes


class _Inventory:
    """All containers, tensors, storages and generators that can be reached from the given objects."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], stateful: Iterable[Any]) -> None:
        self.containers: list[_Container] = []
        self.tensors: list[_TensorRecord] = []
        self.storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        self.without_storage: list[torch.Tensor] = []  # sparse and the like: cloned and copied back
        self.arrays: list[Any] = []
        self.generators: list[_Undo] = []  # of random generators that the objects hold themselves
        self.devices: set[torch.device] = set()
        self._seen: dict[int, Any] = {}  # by id; holding the object keeps its id from being used again
        self._pending: list[Any] = []
        for module in modules:
            self._walk(module, owns=(nn.Module,))
        for optimizer in optimizers:
            self._walk(optimizer, owns=(Optimizer, object))
        for root in stateful:
            self._walk(root, owns=(object,))

    @property
    def total_bytes(self) -> int:
        stored = sum(storage.nbytes() for storage in self.storages.values())
        cloned = sum(_values_bytes(tensor) for tensor in self.without_storage)
        return stored + cloned + sum(int(array.nbytes) for array in self.arrays)

    def _walk(self, root: Any, *, owns: tuple[type, ...]) -> None:
        """Follow references from the root, into those objects with a `__dict__` that are its own.

        A module owns its submodules, but not the service objects that hang on it; an optimizer owns the
        optimizer that it wraps; a scheduler owns its parts, but not the optimizer that it drives.
        """
        if isinstance(root, (nn.Module, Optimizer)) and self._first_time(root):
            self._add_container(vars(root))
        else:
            self._pending.append(root)
        while self._pending:
            value = self._pending.pop()
            if type(value) in _PLAIN or isinstance(value, _UNCHANGING) or not self._first_time(value):
                continue
            if isinstance(value, torch.Tensor):
                self._add_tensor(value)
            elif isinstance(value, (dict, list, set, deque)):
                self._add_container(value)
            elif isinstance(value, (tuple, frozenset)):
                self._pending.extend(value)
            elif (undo := _random_state(value)) is not None:
                self.generators.append(undo)
            elif _is_array(value):
                self.arrays.append(value)
            elif _kind(value) in owns:
                self._add_container(vars(value))
            else:
                del self._seen[id(value)]  # not taken here; another root may still own it

    def _first_time(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _add_container(self, container: Any) -> None:
        record = _Container(container)
        self.containers.append(record)
        self._pending.extend(record.held)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            raise RequestError(
                "a module has lazy parameters that no forward has shaped yet, so there is nothing to put back; "
                "run one batch through it first"
            )
        if tensor.device.type == "meta":
            return
        self._add_container(vars(tensor))
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper such as DTensor: the memory is in its parts
            parts = _Parts(tensor)
            self.containers.append(parts)
            self._pending.extend(parts.held)
            self.tensors.append(_TensorRecord(tensor, alias=None))
        elif (storage := _storage_of(tensor)) is None:
            self.without_storage.append(tensor)
            self.tensors.append(_TensorRecord(tensor, alias=None))
        elif storage.device.type != "meta":  # a fake tensor names a device, but has its storage on meta
            if storage.nbytes() > 0:
                self.storages.setdefault((storage.device, storage.data_ptr()), storage)
            self.tensors.append(_TensorRecord(tensor, alias=tensor.detach()))
        self.devices.add(tensor.device)
        if tensor.is_leaf and tensor.grad is not None:
            self._pending.append(tensor.grad)


class _Container:
    """What a dict, list, set or deque held, by reference; of a dict `names` are the keys."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self._dict_type: Any = None
        if isinstance(container, dict):  # past a subclass's own methods
            self._dict_type = OrderedDict if isinstance(container, OrderedDict) else dict
        self.names, self.held = self._contents()

    def _contents(self) -> tuple[list[Any], list[Any]]:
        if self._dict_type is None:
            return [], list(self.container)
        return list(self._dict_type.keys(self.container)), list(self._dict_type.values(self.container))

    def put_back(self) -> None:
        names, held = self._contents()
        if _same_objects(names, self.names) and _same_objects(held, self.held):
            return
        container = self.container
        if self._dict_type is not None:
            self._dict_type.clear(container)
            for key, value in zip(self.names, self.held, strict=True):
                self._dict_type.__setitem__(container, key, value)
            return
        container.clear()
        if isinstance(container, set):
            container.update(self.held)
        else:
            container.extend(self.held)


class _Parts(_Container):
    """The inner tensors of a wrapper subclass, which are attributes and may be slots."""

    def _contents(self) -> tuple[list[Any], list[Any]]:
        names, _ = self.container.__tensor_flatten__()
        return list(names), [getattr(self.container, name) for name in names]

    def put_back(self) -> None:
        for name, part in zip(self.names, self.held, strict=True):
            if getattr(self.container, name, None) is not part:
                setattr(self.container, name, part)


def _same_objects(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


class _TensorRecord:
    """Where a tensor's memory was, its gradient, and whether it required one."""

    def __init__(self, tensor: torch.Tensor, *, alias: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.alias = alias  # shares the memory and keeps it alive, even if a step swaps `tensor.data`
        self.is_leaf = tensor.is_leaf
        self.requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def put_back_memory(self) -> None:
        if self.is_leaf and not self.tensor.is_leaf and not self.tensor._is_view():
            self.tensor.detach_()  # a step wrote into it with gradients on
        if self.alias is not None and not _same_memory(self.tensor, self.alias):
            self.tensor.data = self.alias

    def put_back_gradient(self) -> None:
        if not self.is_leaf or not self.tensor.is_leaf:
            return
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    create: Any = torch.UntypedStorage  # no op is dispatched, so a memory limit in force does not count it
    host: torch.UntypedStorage = create(storage.nbytes())
    host.copy_(storage, False)
    return host


def _values_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        indices, values = tensor._indices(), tensor._values()
        return indices.numel() * indices.element_size() + values.numel() * values.element_size()
    return tensor.numel() * tensor.element_size()


def _kind(value: Any) -> type | None:
    """Module, Optimizer, or `object` for anything else that keeps state in a `__dict__`; None for the rest.

    Objects of the standard library (loggers, locks, partials) are services, not state; a bare namespace is state.
    """
    for kind in (nn.Module, Optimizer):
        if isinstance(value, kind):
            return kind
    is_service = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    if not hasattr(value, "__dict__") or (is_service and type(value) is not types.SimpleNamespace):
        return None
    return object


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        backend: Any = getattr(torch, device.type, None)
        if device.type in ("cuda", "xpu") and backend.is_initialized():
            backend.synchronize(device)
        elif device.type == "mps":
            backend.synchronize()


def _random_generators(inventory: _Inventory) -> Iterator[_Undo]:
    """For every generator a step may draw from, what puts its state back; initialises no device."""
    yield functools.partial(random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state(legacy=False))
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    backends: tuple[Any, ...] = (torch.cuda, torch.xpu)
    for backend in backends:
        if backend.is_initialized():
            for generator in backend.default_generators:
                yield functools.partial(generator.set_state, generator.get_state())
        else:
            yield functools.partial(_rewind_generators, backend)
    if any(device.type == "mps" for device in inventory.devices):
        yield functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state())
    yield from inventory.generators


def _rewind_generators(backend: Any) -> None:
    """The generators of a backend that the steps were the first to use: back to the start of their seed."""
    if backend.is_initialized():
        for generator in backend.default_generators:
            generator.manual_seed(generator.initial_seed())


def _random_state(value: Any) -> _Undo | None:
    """What puts a random generator's present state back, or None if the value is not one."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
