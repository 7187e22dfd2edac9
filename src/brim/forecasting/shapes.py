"""What an operation would return: sizes, strides, dtypes, and which results share memory with which argument.

Asked of torch's own meta kernels, which compute shapes and nothing else, and remembered: a model repeats few distinct
calls many times. Where torch has no meta kernel, its fake tensors know decompositions and are asked instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from brim.forecasting.events import UntraceableError
from brim.forecasting.torch_private import fake_tensors, storage_address

__all__ = [
    "TensorSpec",
    "convolution_format",
    "infer",
    "pick",
    "replaced",
    "returned_arguments",
    "specify",
    "tensors_in",
]


# What most arguments are that are neither tensors nor hold any: recognised at once, since a step makes many calls.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results: single ones, and those in lists and tuples."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value, {}))
    return found


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], news: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced, in the order of `tensors_in`."""
    following = iter(news)
    return (
        tuple(_replaced_one(value, following) for value in args),
        {key: _replaced_one(value, following) for key, value in kwargs.items()},
    )


def returned_arguments(schema: Any) -> tuple[int | str, ...] | None:
    """For each result the position or name of the argument that it is, for `pick`; None if some result is new."""
    where: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for name in argument.alias_info.before_set:
                where[name] = argument.name if argument.kwarg_only else position
    found: list[int | str] = []
    for returned in schema.returns:
        names = () if returned.alias_info is None else returned.alias_info.before_set
        name = next((name for name in names if name in where), None)
        if name is None:
            return None
        found.append(where[name])
    return tuple(found)


def pick(where: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operation that returns its own arguments."""
    found = [args[place] if isinstance(place, int) else kwargs[place] for place in where]
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def _replaced_one(value: Any, following: Iterator[Any]) -> Any:
    # Not a closure that calls itself: such a function is a reference cycle, and would keep tensors alive until the
    # garbage collector runs.
    if isinstance(value, torch.Tensor):
        return next(following)
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced_one(member, following) for member in value])
    return value


aten = torch.ops.aten
_META = torch.device("meta")
_REMEMBERED = 100_000  # calls, after which all are forgotten
_FROM_HOST = ("generator", "pin_memory")  # arguments that mean nothing to a tensor without data
_specs: dict[tuple[Any, ...], Any] = {}
_UNKNOWN = object()


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor among the results of a call."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    alias: int  # the number of the tensor argument whose memory it shares; -1, -2, …: new memory, numbered
    nbytes: int  # of that memory


def infer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], *, is_view: bool
) -> Any:
    """The results of a call, with a `TensorSpec` in place of each tensor."""
    key = _key(func, args, kwargs, is_view)
    try:
        spec = _specs.get(key, _UNKNOWN)
    except TypeError:  # a symbolic number or something else that cannot be compared
        return _ask(func, args, kwargs, tensors)
    if spec is _UNKNOWN:
        spec = _ask(func, args, kwargs, tensors)
        if len(_specs) > _REMEMBERED:
            _specs.clear()
        _specs[key] = spec
    return spec


def specify(result: Any) -> Any:
    """A result that is there already, with a `TensorSpec` in place of each tensor."""
    return _specified(result, [], [])


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool) -> tuple[Any, ...]:
    parts: list[Any] = [id(func), torch.get_default_dtype()]  # operations are created once, and slow to hash
    for value in args:
        _describe(value, parts, is_view)
    for name, value in kwargs.items():
        parts.append(name)
        _describe(value, parts, is_view)
    return tuple(parts)


def _describe(value: Any, parts: list[Any], is_view: bool) -> None:
    kind = type(value)
    if kind in _PLAIN:
        parts.append(kind)
        parts.append(value)
    elif isinstance(value, torch.Tensor):
        parts.append(value.shape)
        parts.append(value.stride())
        parts.append(value.dtype)
        if is_view:
            parts.append(value.storage_offset())
    elif isinstance(value, (list, tuple)):
        parts.append(len(value))
        for member in value:
            _describe(member, parts, is_view)
    elif isinstance(value, torch.Generator):
        parts.append(None)
    else:
        parts.append(kind)
        parts.append(value)


def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    metas = [_meta_of(tensor) for tensor in tensors]
    meta_args, meta_kwargs = replaced(args, kwargs, metas)
    for name in _FROM_HOST:
        if meta_kwargs.get(name) is not None:
            meta_kwargs[name] = None
    if any(argument.name == "device" for argument in func._schema.arguments):
        meta_kwargs["device"] = _META
    try:
        result = func(*meta_args, **meta_kwargs)
    except NotImplementedError:
        result = _ask_fakes(func, args, kwargs, tensors)
        if result is NotImplemented:
            raise UntraceableError(
                f"{func} has no shape rule: torch does not know its results without running it; register one with "
                "torch.library.register_fake"
            ) from None
        result, metas = result
    if func in (aten.convolution.default, aten.convolution_backward.default):
        result = _as_cudnn_lays_out(func, args, result)
    storages = [storage_address(meta.untyped_storage()) for meta in metas]
    return _specified(result, storages, [])


def _as_cudnn_lays_out(func: Any, args: tuple[Any, ...], results: Any) -> Any:
    """Results of a convolution in the memory format that CUDA gives them; a meta tensor knows no device to ask."""
    input, weight = args[:2] if func is aten.convolution.default else args[1:3]
    wanted = convolution_format(input, weight)
    if isinstance(results, torch.Tensor):
        return results.contiguous(memory_format=wanted)
    return [
        result.contiguous(memory_format=wanted) if result is not None and result.dim() == input.dim() else result
        for result in results
    ]


def convolution_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels last if input or weight are; a tensor that is contiguous as well counts as channels first."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    for operand in (input, weight):
        if last is not None and not operand.is_contiguous() and operand.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


def _ask_fakes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Ask torch's fake tensors; `NotImplemented` where they do not know either."""
    metas, devices = [_meta_of(tensor) for tensor in tensors], [tensor.device for tensor in tensors]
    mode, fakes, unsupported = fake_tensors(metas, devices)
    kept = {name: value for name, value in kwargs.items() if name not in _FROM_HOST}
    fake_args, fake_kwargs = replaced(args, kept, fakes)
    try:
        with mode:
            return func(*fake_args, **fake_kwargs), fakes
    except (unsupported, NotImplementedError):
        return NotImplemented


def _meta_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise UntraceableError(f"the step uses a {tensor.layout} tensor; only dense tensors can be traced")
    offset = tensor.storage_offset()
    if not offset:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.empty(offset + max(last, 0) + 1, dtype=tensor.dtype, device=_META)
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


def _specified(result: Any, storages: list[int], made: list[int]) -> Any:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise UntraceableError(f"the step makes a {result.layout} tensor; only dense tensors can be traced")
        storage = result.untyped_storage()
        return TensorSpec(
            size=tuple(result.shape),
            stride=tuple(result.stride()),
            offset=int(result.storage_offset()),
            dtype=result.dtype,
            alias=_memory(storage_address(storage), storages, made),
            nbytes=storage.nbytes(),
        )
    if isinstance(result, (list, tuple)):
        return [_specified(member, storages, made) for member in result]
    return result


def _memory(address: int, storages: list[int], made: list[int]) -> int:
    """Which argument's memory an address is, or which new one."""
    if address in storages:
        return storages.index(address)
    if address not in made:
        made.append(address)
    return -1 - made.index(address)
