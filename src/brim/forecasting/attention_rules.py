"""Which kernel torch would take for scaled dot-product attention on a given card, and what scratch it would need.

The rules are torch's own (`sdp_utils.cpp`), for a card that need not be there: they depend on its compute capability,
on the shapes, dtype and mask of a call, and on the versions of torch and cuDNN. Only dense tensors.

Pure Python: no torch, no device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from brim.forecasting.events import DTYPE_BYTES

__all__ = ["AttentionCall", "AttentionSettings", "Backend", "backward_scratch", "choose_backend"]

Backend = Literal["cudnn", "flash", "efficient", "math"]

_HALF = ("float16", "bfloat16")
_CUDNN_HEADER = 256  # bytes at the start of its workspace
_NEWEST = (12, 1)  # the newest compute capability that the fused kernels are built for


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call, as far as the choice of its kernel depends on it. Shapes are [batch, heads, length, head_dim]."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16"
    mask: tuple[int, ...] | None = None  # its shape
    mask_needs_grad: bool = False
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False  # enable_gqa
    needs_grad: bool = False
    last_stride_is_one: bool = True  # of query, key and value
    mask_last_stride_is_one: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The card, the libraries, and which kernels the user has switched off."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int]
    cudnn_version: int  # 91501 for 9.15.1; 0: none
    cuda_major: int = 13
    enabled: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")
    deterministic: bool = False


def choose_backend(call: AttentionCall, settings: AttentionSettings) -> Backend:
    """The kernel that torch would run the call with."""
    usable = {
        "cudnn": _cudnn_can,
        "flash": _flash_can,
        "efficient": _efficient_can,
        "math": lambda *_: True,
    }
    for backend in _priority(settings):
        if backend in settings.enabled and usable[backend](call, settings):
            return backend
    return "math"


def _priority(settings: AttentionSettings) -> tuple[Backend, ...]:
    """cuDNN comes first on Hopper and data-centre Blackwell since torch 2.10, from the cuDNN that fixed odd lengths."""
    major, minor = settings.compute_capability
    known_card = major in (9, 10) and (settings.cuda_major >= 13 or minor in (0, 3))
    if known_card and settings.torch_version >= (2, 10) and settings.cudnn_version > 91500:
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "math")  # cuDNN stands after math, which can always


def _flash_can(call: AttentionCall, settings: AttentionSettings) -> bool:
    head_dim = call.query[-1]
    return (
        call.mask is None
        and _is_batched(call, settings)
        and head_dim == call.key[-1] == call.value[-1]
        and head_dim <= 256
        and (8, 0) <= settings.compute_capability <= _NEWEST
        and _flash_backward_can(call, settings)
        and not (call.causal and call.query[-2] != call.key[-2])
        and call.dtype in _HALF
        and _heads_match(call, supports_groups=True, settings=settings)
        and _lengths_are_not_zero(call)
        and (call.last_stride_is_one or head_dim == 1)
    )


def _flash_backward_can(call: AttentionCall, settings: AttentionSettings) -> bool:
    """Consumer cards have too little shared memory for the backward of wide heads."""
    small = (8, 6) <= settings.compute_capability <= (8, 9) or settings.compute_capability >= (12, 0)
    if not (small and call.needs_grad):
        return True
    head_dim = call.query[-1]
    return head_dim <= 192 or (call.dropout == 0.0 and head_dim > 224)


def _efficient_can(call: AttentionCall, settings: AttentionSettings) -> bool:
    allowed = ("float32", *_HALF) if settings.compute_capability >= (8, 0) else ("float32", "float16")
    alignment = _alignment(call, settings)
    return (
        _is_batched(call, settings)
        and (5, 0) <= settings.compute_capability <= _NEWEST
        and call.query[-1] == call.key[-1]
        and call.query[-1] > 0
        and call.query[-1] % alignment == 0
        and call.value[-1] > 0
        and call.value[-1] % alignment == 0
        and _lengths_are_not_zero(call)
        and call.last_stride_is_one
        and (call.mask is None or call.mask_last_stride_is_one)
        and _heads_match(call, supports_groups=settings.torch_version >= (2, 14), settings=settings)
        and call.dtype in allowed
    )


def _cudnn_can(call: AttentionCall, settings: AttentionSettings) -> bool:
    head_dims = (call.query[-1], call.value[-1])
    dropout_sixteenths = call.dropout * 16
    return (
        settings.cudnn_version >= 90000
        and not (call.dropout > 0 and 91100 < settings.cudnn_version < 91400)
        and _is_batched(call, settings)
        and not settings.deterministic
        and call.dtype in _HALF
        and _cudnn_takes_mask(call)
        and (8, 0) <= settings.compute_capability <= _NEWEST
        and dropout_sixteenths == math.floor(dropout_sixteenths)
        and _lengths_are_not_zero(call)
        and (call.last_stride_is_one or call.query[-1] == 1)
        and _heads_match(call, supports_groups=True, settings=settings)
        and max(call.query[0], call.query[1]) <= 65535
        and all(head_dim % 8 == 0 for head_dim in head_dims)
        and _cudnn_takes_head_dims(call, settings)
        and call.key[-2] != 1
        and not (call.dropout != 0 and call.query[-2] == 1)
    )


def _cudnn_takes_mask(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    if call.mask_needs_grad or len(call.mask) not in (2, 4):
        return False
    full = (call.query[0], call.query[1], call.query[2], call.key[2])
    return all(size in (1, whole) for size, whole in zip(call.mask, full[-len(call.mask) :], strict=True))


def _cudnn_takes_head_dims(call: AttentionCall, settings: AttentionSettings) -> bool:
    query, value = call.query[-1], call.value[-1]
    large = settings.compute_capability == (9, 0) or settings.compute_capability[0] == 10
    if large and settings.cudnn_version > 92200 and settings.torch_version >= (2, 14):
        backward = (query <= 128 and value <= 128) or (query, value) in ((192, 128), (256, 256))
        return query <= 256 and value <= 256 and (backward or not call.needs_grad)
    if large and settings.cudnn_version >= 91100 and (query, value) == (192, 128):
        return True
    return query <= 128 and value <= 128


def _is_batched(call: AttentionCall, settings: AttentionSettings) -> bool:
    """Fused kernels take [batch, heads, length, head_dim]; newer torch adds a missing batch dimension itself."""
    dims = {len(call.query), len(call.key), len(call.value)}
    return dims == {4} or (dims == {3} and settings.torch_version >= (2, 15))


def _heads_match(call: AttentionCall, *, supports_groups: bool, settings: AttentionSettings) -> bool:
    if len({call.query[0], call.key[0], call.value[0]}) != 1 and len(call.query) == 4:
        return False
    query, key, value = call.query[-3], call.key[-3], call.value[-3]
    if call.grouped and supports_groups:
        return key > 0 and key == value and query % key == 0
    broadcast = settings.torch_version >= (2, 14) and query > 0 and key == value == 1
    return query == key == value or broadcast


def _lengths_are_not_zero(call: AttentionCall) -> bool:
    return call.query[-2] != 0 and call.key[-2] != 0


def _alignment(call: AttentionCall, settings: AttentionSettings) -> int:
    """Elements that a head's width must be a multiple of, for the matrix units of the card."""
    half = call.dtype in _HALF
    major = settings.compute_capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major >= 7 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    return alignment


def backward_scratch(call: AttentionCall, backend: Backend) -> tuple[tuple[int, ...], ...]:
    """The blocks that the backward of a fused kernel takes beside its results, in bytes.

    One set after the other: the blocks of a set are held together, and given back before the next set is taken.
    """
    batch, heads, queries, head_dim = call.query
    keys, kv_heads = call.key[-2], call.key[-3]
    rows_of_keys = batch * heads * keys * DTYPE_BYTES[call.dtype]
    # Grouped heads: keys' and values' gradients of every query head, summed afterwards.
    ungrouped = () if kv_heads == heads else (rows_of_keys * head_dim, rows_of_keys * call.value[-1])
    if backend == "flash":
        rows = batch * heads * _rounded(queries, 128)
        width = _rounded(head_dim, 32) if head_dim <= 192 else 256
        return ((*ungrouped, rows * 4, rows * width * 4),)
    if backend == "cudnn":
        return ((sum(ungrouped) + batch * heads * queries * (head_dim + 1) * 4 + _CUDNN_HEADER,),)  # one workspace
    if backend == "efficient":
        return _efficient_scratch(call, ungrouped)
    return ()


def _efficient_scratch(call: AttentionCall, ungrouped: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    batch, heads, queries, head_dim = call.query
    widest = max(head_dim, call.value[-1])
    rows = 128 if 64 < widest <= 128 else 64  # of a tile of queries
    columns = _rounded(head_dim, 64 if head_dim <= 64 else 128)
    query_tiles = math.ceil(queries / rows)
    per_head = query_tiles * (rows * columns + 4) * 4  # float32, and a lock per tile
    if call.dtype in _HALF and widest > rows:  # keys' and values' gradients do not stay in registers either
        per_head += _rounded(call.key[-2], 64) * _rounded(head_dim + call.value[-1], rows) * 4
    delta = batch * heads * queries * 4
    workspace = (*ungrouped, delta, batch * heads * per_head)
    if call.dtype in _HALF:
        return (workspace,)
    return ((delta * call.value[-1], delta), workspace)  # delta is the sum of grad_out × out, which the kernel is given


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
