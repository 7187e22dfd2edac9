"""Scaled dot-product attention in a trace: the tensors that the target card's kernel would make and keep.

On the CPU torch takes other kernels, which save other things. So the operation is replaced for the trace: the rules
of `attention_rules` say which kernel it would be, and this file makes its results, what it saves for the backward, and
its scratch. No value is computed.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from brim.forecasting.attention_rules import (
    AttentionCall,
    AttentionSettings,
    Backend,
    backward_scratch,
    choose_backend,
)
from brim.forecasting.events import Target
from brim.forecasting.overheads import installed_torch

if TYPE_CHECKING:
    from brim.forecasting.tracer import Tracer

__all__ = ["AttentionKernels", "attention_settings"]

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
