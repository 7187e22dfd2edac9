"""What CUDA would do otherwise than the CPU: kernels that make and keep other tensors.

A trace runs on CPU fakes, so wherever torch reads the device to choose a kernel (dropout, attention, a fused
encoder layer) the choice is made again here for CUDA. The same holds for a few places where torch avoids working in
place as soon as a dispatch mode is watching: what would be in place without one is in place in the trace.

RMS normalisation is one kernel on CUDA since torch 2.9 and keeps one number per row. LSTM, GRU and plain RNN layers
run as one kernel of cuDNN, with a reserve kept for the backward; how large that is, cuDNN does not document. It is
taken as the gates and states of every step, and the trace notes that this is a guess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from brim.forecasting.attention import AttentionKernels
from brim.forecasting.events import Target
from brim.forecasting.kernel_scratch import SCRATCH, WITNESSES
from brim.forecasting.torch_private import composite
from brim.forecasting.tracer import Tracer, counts_of_last_reference

__all__ = ["RECURRENT", "RecurrentKernel", "RmsNormKernel", "as_on_cuda"]

aten = torch.ops.aten


@contextlib.contextmanager
def as_on_cuda(tracer: Tracer, target: Target | None) -> Iterator[None]:
    """Let the tracer see CUDA's kernels inside the block; nothing stays changed after it."""
    counts_of_last_reference()
    attention = AttentionKernels(tracer, target)
    chosen = {
        **_CHOSEN_BY_DEVICE,
        "rms_norm": RmsNormKernel(tracer),
        **{name: RecurrentKernel(tracer, name) for name in RECURRENT},
    }
    tracer.install(
        {**_replacements(attention), **{_overload(name): _by(kernel) for name, kernel in chosen.items()}},
        SCRATCH,
        WITNESSES,
    )
    # Where autograd is at work, composite operations are taken apart above the tracer: replace them there.
    library = torch.library.Library("aten", "IMPL", f"Autograd{tracer.device_type.upper()}")
    registered = {name: _Registered(kernel) for name, kernel in chosen.items()}
    registered["scaled_dot_product_attention"] = _Registered(attention)
    try:
        for name, kernel in registered.items():
            library.impl(name, kernel)
        yield
    finally:
        library._destroy()
        for kernel in registered.values():
            kernel.kernel = None


class _Registered:
    """A kernel as torch gets it: torch never lets go of the last one of an operation, and a kernel knows the model."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)


def _replacements(attention: AttentionKernels) -> dict[Any, Any]:
    def replace_attention(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracer:
            return attention(*args, **kwargs)

    def replace_multi_head(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracer:
            return _native_multi_head_attention(attention, *args, **kwargs)

    def replace_encoder_layer(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracer:
            return _encoder_layer(attention, *args, **kwargs)

    return {
        aten.scaled_dot_product_attention.default: replace_attention,
        aten._native_multi_head_attention.default: replace_multi_head,
        aten._transformer_encoder_layer_fwd.default: replace_encoder_layer,
        aten.add.Tensor: _accumulate_in_place,
        aten.index_put.default: _in_place_on_zeros(aten.index_put_.default),
        aten.scatter_add.default: _in_place_on_zeros(aten.scatter_add_.default),
        aten.scatter.src: _in_place_on_zeros(aten.scatter_.src),
    }


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's fused dropout keeps a mask of bytes; the CPU's keeps noise in the input's dtype."""
    if not train or p in (0, 1) or input.numel() == 0:
        unfused: torch.Tensor = composite(aten.dropout.default, input, p, train)
        return unfused
    fused: torch.Tensor = aten.native_dropout.default(input, p, train)[0]
    return fused


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A bias that is not added by the product itself is added in place, which torch avoids under a dispatch mode."""
    fused = input.dim() == 2 or (input.dim() >= 3 and input.is_contiguous())
    if bias is None or fused:
        return composite(aten.linear.default, input, weight, bias)  # type: ignore[no-any-return]
    return torch.matmul(input, weight.t()).add_(bias)


def _softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """From float16 to float32 in one kernel, without a converted copy; bfloat16 has no such kernel."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax.default(input, dim, True)  # type: ignore[no-any-return]
    return composite(aten.softmax.int, input, dim, dtype)  # type: ignore[no-any-return]


def _log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `_softmax`."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax.default(input, dim, True)  # type: ignore[no-any-return]
    return composite(aten.log_softmax.int, input, dim, dtype)  # type: ignore[no-any-return]


_CHOSEN_BY_DEVICE: dict[str, Any] = {
    "dropout": _dropout,
    "linear": _linear,
    "softmax.int": _softmax,
    "log_softmax.int": _log_softmax,
}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _by(kernel: Any) -> Any:
    """The kernel as a replacement, for where composite operations come by whole: in inference mode."""

    def replace(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracer:
            return kernel(*args, **kwargs)

    return replace


def _native_multi_head_attention(
    attention: AttentionKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`nn.MultiheadAttention` without gradients: fused attention where that can be, else over packed heads."""
    del mask_type
    batch, length, _ = query.shape
    width = embed_dim // num_heads

    def heads_of(packed: torch.Tensor) -> torch.Tensor:
        return packed.view(batch, -1, num_heads, width).transpose(1, 2)

    alike = query is key and key is value and width % 8 == 0 and not need_weights and mask is None
    if alike and attention.choose(heads_of(query), heads_of(key), heads_of(value)) != "math":
        packed = torch.nn.functional.linear(query, qkv_weight, qkv_bias)
        queries, keys, values = (heads_of(part) for part in packed.chunk(3, -1))
        mixed = attention(queries, keys, values)
        joined = mixed.transpose(1, 2).reshape(batch, -1, embed_dim)  # `packed` stays allocated, as in the kernel
        return torch.nn.functional.linear(joined, proj_weight, proj_bias), None
    packed = torch.matmul(query, qkv_weight.t())
    rescaled = packed.new_empty((3, batch, num_heads, length, width))
    del packed
    queries, keys, values = rescaled.unbind(0)
    scores = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    weights = torch.softmax(scores, -1)
    del scores
    torch.bmm(weights, values.flatten(0, 1), out=queries.flatten(0, 1))  # into the memory of the queries
    joined = queries.transpose(1, 2).reshape(batch, length, embed_dim)
    output = torch.nn.functional.linear(joined, proj_weight, proj_bias)
    if not need_weights:
        return output, None
    weights = weights.view(batch, num_heads, length, length)
    return output, weights.sum(1).div_(num_heads) if average_attn_weights else weights


def _encoder_layer(
    attention: AttentionKernels,
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`nn.TransformerEncoderLayer` without gradients, operation by operation."""
    functional = torch.nn.functional

    def normalised(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(value, (embed_dim,), weight, bias, eps)

    hidden = normalised(src, norm_weight_1, norm_bias_1) if norm_first else src
    mixed, _ = _native_multi_head_attention(
        attention, hidden, hidden, hidden, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
        False, True, mask_type,
    )  # fmt: skip
    mixed.add_(src)
    if not norm_first:
        mixed = normalised(mixed, norm_weight_1, norm_bias_1)
    hidden = normalised(mixed, norm_weight_2, norm_bias_2) if norm_first else mixed
    hidden = functional.linear(hidden, ffn_weight_1, ffn_bias_1)
    hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
    hidden = functional.linear(hidden, ffn_weight_2, ffn_bias_2)
    hidden.add_(mixed)
    return hidden if norm_first else normalised(hidden, norm_weight_2, norm_bias_2)


def _accumulate_in_place(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The autograd engine adds a second gradient into the first one, if nobody else holds that.

    Where gradients are recorded in a backward, it is a forward that a checkpoint runs again.
    """
    if not tracer.in_backward or torch.is_grad_enabled():
        return NotImplemented
    if kwargs or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return NotImplemented
    first, second = args
    if first.shape != second.shape or first.dtype != second.dtype or not tracer.holds_last_reference(first):
        return NotImplemented
    return tracer.run(aten.add_.Tensor, args, kwargs)


def _in_place_on_zeros(in_place: Any) -> Any:
    """Backward formulas scatter into zeros made for the purpose; under a dispatch mode they would copy them first."""

    def replace(tracer: Tracer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not tracer.in_backward:
            return NotImplemented
        made_by = tracer.ledger.op_of(tracer.values.block_of(args[0]))
        if not made_by.startswith(("aten.new_zeros", "aten.zeros")):
            return NotImplemented
        return tracer.run(in_place, args, kwargs)

    return replace


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


# Operation: how many values of the hidden size are kept for each step in training (gates and states), and whether
# there is a cell state beside the hidden one.
RECURRENT = {
    "lstm.input": (6, True),
    "gru.input": (5, False),
    "rnn_tanh.input": (2, False),
    "rnn_relu.input": (2, False),
}
_GUESS = "cuDNN's reserve for recurrent layers is estimated"


class RecurrentKernel:
    """In place of one of `RECURRENT`."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._kept, self._has_cell = RECURRENT[name]

    def __call__(
        self,
        input: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The output of the last layer and the last states."""
        del has_biases, dropout
        self._tracer.facts.guesses.setdefault(_GUESS)
        states = list(hx) if self._has_cell else [hx]
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            input, *states = (part.to(dtype) for part in (input, *states))
            params = [parameter.to(dtype) for parameter in params]
        steps, batch = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
        directions = 2 if bidirectional else 1
        reserved = num_layers * directions * steps * batch * states[0].shape[-1] * self._kept if train else 0
        width = directions * states[0].shape[-1]  # of projected states, where there is a projection
        sequence = input.transpose(0, 1).contiguous() if batch_first else input
        output, *last = _Recurrent.apply(self._tracer, reserved, width, len(states), sequence, *states, *params)
        return (output.transpose(0, 1) if batch_first else output, *last)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, reserved: int, width: int, count: int, input: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states = rest[:count]
        with tracer.imitating("cudnn_rnn"):
            output = input.new_empty((input.shape[0], input.shape[1], width))
            last = [torch.empty_like(state) for state in states]
            reserve = input.new_empty(reserved)
        ctx.save_for_backward(input, output, reserve, *rest)
        ctx.tracer = tracer
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del gradients
        input, _, _, *rest = ctx.saved_tensors
        with ctx.tracer.imitating("cudnn_rnn_backward"):
            made = [torch.empty_like(part) for part in (input, *rest)]
        return None, None, None, None, *made
