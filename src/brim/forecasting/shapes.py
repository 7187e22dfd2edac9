"""What an operation would return: sizes, strides, dtypes, and which results share memory with which argument.

Asked of torch's own meta kernels, which compute shapes and nothing else, and remembered: a model repeats few distinct
calls many times. Where torch has no meta kernel, its fake tensors know decompositions and are asked instead. What its
kernels work out slowly, although it is simple, is concluded here (`_plain_results`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
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
        parts += (kind, value)
    elif isinstance(value, torch.Tensor):
        parts += (value.shape, value.stride(), value.dtype)
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
    plain = None if kwargs else _plain_results(func, args, tensors)
    if plain is not None:
        return plain
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


# What torch works out in Python, in 0.1 to 2 ms a call, although over dense tensors the results are simple: half of the
# time that the shapes of a training step took.
_LIKE_THE_FIRST = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.relu.default, aten.gelu.default,
    aten.gelu_backward.default, aten.threshold_backward.default, aten.sigmoid_backward.default,
    aten._softmax_backward_data.default,
})  # fmt: skip
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_Part = tuple[Sequence[int], torch.dtype]  # the shape and dtype of one dense result


def _plain_results(func: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
    """The results that torch would give, without asking it; None where they are not as simple as that.

    None also of a forward that torch refuses, so that mistakes are found; a backward is of one that it has taken.
    """
    if func in _LIKE_THE_FIRST:
        return _dense_spec((tensors[0].shape, tensors[0].dtype)) if _all_alike(args, tensors) else None
    if func is aten.addmm.default:
        bias, left, right = args
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            return None
        rows, columns = left.shape[0], right.shape[1]
        plain = rows > 1 and columns > 1 and bias.shape == (columns,) and left.dtype == right.dtype == bias.dtype
        return _dense_spec(((rows, columns), left.dtype)) if plain else None
    rule = _OF_SEVERAL_RESULTS.get(func)
    if rule is None or not all(tensor.dtype in _FLOATS and _is_dense(tensor) for tensor in tensors):
        return None
    parts = rule(*args)
    return None if parts is None else [_dense_spec(part, alias=-1 - number) for number, part in enumerate(parts)]


def _all_alike(args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have one shape and one dtype, and nothing among the arguments asks for another."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    return (
        dtype in _FLOATS
        and all(tensor.shape == shape and tensor.dtype == dtype and _is_dense(tensor) for tensor in tensors)
        and not any(isinstance(value, complex) or (type(value) is torch.dtype and value != dtype) for value in args)
    )


def _layer_norm(input: torch.Tensor, normalized: Sequence[int], *rest: Any) -> list[_Part] | None:
    weights = [one.shape for one in rest if isinstance(one, torch.Tensor)]
    if not normalized or any(shape != tuple(normalized) for shape in (input.shape[-len(normalized) :], *weights)):
        return None
    rows = input.shape[: input.dim() - len(normalized)]
    statistics = ((*rows, *(1 for _ in normalized)), _wide(input))
    return [(input.shape, input.dtype), statistics, statistics]


def _layer_norm_backward(*args: Any) -> list[_Part] | None:
    _, input, _, _, _, weight, bias, wanted = args
    if weight is None or bias is None or not all(wanted):
        return None
    if not input.dtype == weight.dtype == bias.dtype:  # releases of torch differ
        return None
    return [(one.shape, one.dtype) for one in (input, weight, bias)]


def _batch_norm(*args: Any) -> list[_Part] | None:
    input, training = args[0], args[5]
    statistics = (input.shape[1:2], _wide(input))
    return [(input.shape, input.dtype), statistics, statistics] if training and _has_spread(input) else None


def _batch_norm_backward(*args: Any) -> list[_Part] | None:
    _, input, weight, _, _, _, _, training, _, wanted = args
    if weight is None or not training or not all(wanted) or not _has_spread(input):
        return None
    return [(one.shape, one.dtype) for one in (input, weight, weight)]


_OF_SEVERAL_RESULTS: dict[Any, Callable[..., list[_Part] | None]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._foreach_sqrt.default: lambda tensors: [(tensor.shape, tensor.dtype) for tensor in tensors],
}


def _has_spread(input: torch.Tensor) -> bool:
    """Whether there is more than one value per channel; torch refuses to normalise one."""
    return input.numel() > input.shape[1]


def _wide(input: torch.Tensor) -> torch.dtype:
    """The dtype of statistics."""
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _is_dense(tensor: torch.Tensor) -> bool:
    """Not empty, and contiguous with the strides of a new tensor also where a dimension has the length one."""
    return tensor.numel() > 0 and tensor.stride() == _dense_strides(tensor.shape)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    from_the_last = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(from_the_last)[::-1] if shape else ()


def _dense_spec(part: _Part, alias: int = -1) -> TensorSpec:
    shape, dtype = part
    size = tuple(shape)
    return TensorSpec(size, _dense_strides(size), 0, dtype, alias, math.prod(size) * dtype.itemsize)
