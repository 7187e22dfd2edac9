"""Scaled dot-product attention in a trace: the tensors that the target card's kernel would make and keep.

On the CPU torch takes other kernels, which save other things. So the operation is replaced for the trace. First come
the rules by which torch chooses a kernel (`sdp_utils.cpp`), for a card that need not be there: they depend on its
compute capability, on the shapes, dtype and mask of a call, and on the versions of torch and cuDNN. Then come that
kernel's results, what it saves for the backward, and its scratch. No value is computed. Only dense tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from brim.forecasting.events import DTYPE_BYTES, Target
from brim.forecasting.overheads import installed_torch

if TYPE_CHECKING:
    from brim.forecasting.tracer import Tracer

__all__ = [
    "AttentionCall",
    "AttentionKernels",
    "AttentionSettings",
    "Backend",
    "attention_settings",
    "backward_scratch",
    "choose_backend",
]

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


_LSE_ROWS = 32  # the efficient kernel's log-sum-exp is padded to a multiple of this
_MASK_ALIGNMENT = 16  # elements, of the efficient kernel's additive mask


def attention_settings(target: Target | None) -> AttentionSettings:
    """The settings of the torch at hand for a card, as its version of torch reads them; without one, for a Hopper."""
    version = target.torch_version if target is not None and target.torch_version else installed_torch()
    enabled: list[Backend] = []
    backends: Any = torch.backends.cuda
    for name, is_enabled in (
        ("cudnn", backends.cudnn_sdp_enabled),
        ("flash", backends.flash_sdp_enabled),
        ("efficient", backends.mem_efficient_sdp_enabled),
        ("math", backends.math_sdp_enabled),
    ):
        if is_enabled():
            enabled.append(name)  # type: ignore[arg-type]
    return AttentionSettings(
        compute_capability=(9, 0) if target is None else target.compute_capability,
        torch_version=version,
        cudnn_version=_cudnn_version(version),
        cuda_major=int((torch.version.cuda or "13").split(".")[0]),
        enabled=tuple(enabled),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@functools.cache
def _cudnn_version(torch_version: tuple[int, int]) -> int:
    """cuDNN of this torch, or for one without CUDA or of another version the one that CUDA builds come with."""
    here = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if here is not None and torch_version == installed_torch():
        return int(here)
    return 91700 if torch_version >= (2, 11) else 91002


class AttentionKernels:
    """What attention would be on the target, for one tracer."""

    def __init__(self, tracer: Tracer, target: Target | None) -> None:
        self._tracer = tracer
        self._target = target

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """In place of `aten::scaled_dot_product_attention`."""
        call = _described(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        backend = choose_backend(call, attention_settings(self._target))
        self._tracer.facts.attention.setdefault(backend)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        if backend == "math":
            grouped = {"enable_gqa": True} if enable_gqa else {}
            result = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, **grouped
            )
            output: torch.Tensor = result[0]
            return output
        if query.dim() == 3:
            return self._fused(
                backend, query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask, call
            ).squeeze(0)
        return self._fused(backend, query, key, value, attn_mask, call)

    def choose(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Backend:
        """The kernel for a plain call without mask."""
        return choose_backend(_described(query, key, value, None, 0.0, False, False), attention_settings(self._target))

    def _fused(
        self,
        backend: Backend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        width = value.shape[-1]
        if backend == "flash" and query.shape[-1] % 8:
            query, key, value = (
                torch.nn.functional.pad(part, (0, -part.shape[-1] % 8)) for part in (query, key, value)
            )
        if backend == "efficient" and mask is not None:
            mask = _aligned_mask(mask, query, key)
        call = _described(query, key, value, mask, call.dropout, call.causal, call.grouped)
        output: torch.Tensor = _FusedAttention.apply(self._tracer, backend, call, query, key, value, mask)
        return output if output.shape[-1] == width else output[..., :width]


class _FusedAttention(torch.autograd.Function):
    """A fused kernel: one output, a log-sum-exp, and scratch in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tracer: Tracer,
        backend: Backend,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        with tracer.imitating(f"{backend}_attention"):
            output = _output(backend, query, value)
            batch, heads, length, _ = query.shape
            if backend == "efficient":
                length = -(-length // _LSE_ROWS) * _LSE_ROWS
            keeps_sums = backend == "flash" or call.needs_grad
            sums = query.new_empty((batch, heads, length if keeps_sums else 0), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        ctx.tracer, ctx.backend, ctx.call = tracer, backend, call
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        query, key, value, mask, output, _ = ctx.saved_tensors
        tracer: Tracer = ctx.tracer
        name = f"{ctx.backend}_attention_backward"
        with tracer.imitating(name):
            copied = None if _is_laid_out(ctx.backend, grad_output, output) else torch.empty_like(grad_output)
            gradients = [_gradient(ctx.backend, part) for part in (query, key, value)]
            needs_mask = mask is not None and ctx.needs_input_grad[6]
            mask_gradient = torch.empty_like(mask) if needs_mask else None
        for blocks in backward_scratch(ctx.call, ctx.backend):
            held = [tracer.ledger.take(size, f"{name} scratch") for size in blocks]
            del held
        del copied
        return None, None, None, *gradients, mask_gradient


def _is_laid_out(backend: Backend, grad_output: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a kernel reads a gradient as it is: cuDNN as it laid out the output, the others with heads innermost."""
    if backend == "cudnn":
        return grad_output.stride() == output.stride()
    return grad_output.transpose(1, 2).is_contiguous()


def _gradient(backend: Backend, part: torch.Tensor) -> torch.Tensor:
    """Of queries, keys or values: the efficient kernel makes them with heads innermost, the others like the operand."""
    if backend != "efficient":
        return torch.empty_like(part)
    return part.transpose(1, 2).new_empty(part.transpose(1, 2).shape).transpose(1, 2)


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> AttentionCall:
    parts = (query, key, value) if mask is None else (query, key, value, mask)
    return AttentionCall(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=str(query.dtype).removeprefix("torch."),
        mask=None if mask is None else tuple(mask.shape),
        mask_needs_grad=mask is not None and mask.requires_grad,
        dropout=dropout,
        causal=causal,
        grouped=grouped,
        needs_grad=torch.is_grad_enabled() and any(part.requires_grad for part in parts),
        last_stride_is_one=all(part.stride(-1) == 1 for part in (query, key, value)),
        mask_last_stride_is_one=mask is None or mask.stride(-1) == 1,
    )


def _output(backend: Backend, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, width]: cuDNN lays it out as the query is, the others with the heads innermost."""
    batch, heads, length, _ = query.shape
    shape = (batch, heads, length, value.shape[-1])
    order = (0, 2, 1, 3)
    if backend == "cudnn":
        strides = query.stride()
        outermost_first = sorted(range(4), key=lambda dim: (-strides[dim], dim))
        order = (outermost_first[0], outermost_first[1], outermost_first[2], outermost_first[3])
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask becomes one to add: zero where attention is allowed."""
    added = torch.zeros_like(mask, dtype=dtype)
    added.masked_fill_(mask.logical_not(), -math.inf)
    return added


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask of every head, as a view; padded first where its rows do not begin on a multiple of 16 elements."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - width % _MASK_ALIGNMENT))[..., :width]
    return mask.expand(batch, heads, queries, keys)
