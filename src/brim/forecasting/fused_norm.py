"""RMS normalisation in a trace, as CUDA runs it since torch 2.9: one kernel that keeps one number per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from brim.forecasting.composite import composite

if TYPE_CHECKING:
    from brim.forecasting.tracer import Tracer

__all__ = ["RmsNormKernel"]

aten = torch.ops.aten


class RmsNormKernel:
    """In place of `aten::rms_norm`, which on the CPU is made of several operations."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __call__(
        self,
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """The normalised input."""
        mixed = weight is not None and weight.dtype != input.dtype
        if mixed or not hasattr(aten, "_fused_rms_norm"):
            return composite(aten.rms_norm.default, input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
        rows = input.shape[: input.dim() - len(normalized_shape)]
        output: torch.Tensor = _FusedRmsNorm.apply(self._tracer, rows, input, weight)
        return output


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, rows: torch.Size, input: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        with tracer.imitating("aten._fused_rms_norm"):
            contiguous = input if input.is_contiguous() else input.contiguous()
            output = torch.empty_like(contiguous)
            scales = input.new_empty(rows, dtype=torch.float32)
        ctx.save_for_backward(input, weight, scales)
        ctx.tracer = tracer
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        with ctx.tracer.imitating("aten._fused_rms_norm_backward"):
            copied = None if gradient.is_contiguous() else gradient.contiguous()
            of_input = torch.empty_like(input)
            of_weight = None if weight is None else torch.empty_like(weight)
        del copied
        return None, None, of_input, of_weight
