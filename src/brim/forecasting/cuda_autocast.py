"""CUDA's autocast on CPU tensors, for as long as a block lasts.

Which operations autocast runs in half precision, which in float32 and which it leaves alone differs between devices,
and with it what is saved for the backward. A trace on a machine without a GPU therefore registers CUDA's policy on
the dispatch key of the CPU's autocast. Which operations have a policy on CUDA is asked of the torch at hand; of which
kind it is, torch does not say, so the kinds other than half precision are listed here.

The registrations are global while the block lasts: CPU autocast in another thread would follow them too.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from brim.forecasting.torch_private import registered_operations, without_cpu_autocast

__all__ = ["Policy", "cuda_autocast_on_cpu", "policies"]

Policy = Literal["half", "float32", "float32_dtype", "float32_appended", "widest", "untouched"]

_KEY = "AutocastCPU"
_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
# The result is computed in float32 through the operation's own `dtype`, without a converted copy of the input.
_FLOAT32_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
_FLOAT32_APPENDED = ("norm.Scalar", "norm.ScalarOpt_dim")
_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat", "stack",
)  # fmt: skip


@functools.cache
def policies() -> dict[str, Policy]:
    """What CUDA's autocast does with each operation that it or the CPU's has a policy for: `{"layer_norm": …}`."""
    kinds: dict[str, Policy] = {
        **dict.fromkeys(_FLOAT32, "float32"),
        **dict.fromkeys(_FLOAT32_DTYPE, "float32_dtype"),
        **dict.fromkeys(_FLOAT32_APPENDED, "float32_appended"),
        **dict.fromkeys(_WIDEST, "widest"),
    }
    on_cuda, on_cpu = registered_operations("AutocastCUDA"), registered_operations("AutocastCPU")
    found: dict[str, Policy] = {name: kinds.get(name, "half") for name in sorted(on_cuda)}
    found.update(dict.fromkeys(sorted(on_cpu - on_cuda), "untouched"))
    return found


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Let `torch.autocast("cpu")` follow CUDA's policy inside the block."""
    library = torch.library.Library("aten", "IMPL", _KEY)
    own = registered_operations("AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says of each kernel that it overrides another: that is the point
            for name, policy in policies().items():
                if policy == "half" and name in own:  # the same on both, and the CPU's kernel has the weights' cache
                    continue
                overload = _overload(name)
                if overload is not None:
                    library.impl(name, _kernel(overload, policy))
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operation = getattr(torch.ops.aten, packet, None)
    return getattr(operation, overload or "default", None)


def _kernel(overload: Any, policy: Policy) -> Callable[..., Any]:
    if policy == "untouched":  # autocast stays on inside: cross_entropy is left alone, the log_softmax in it is not
        through: Callable[..., Any] = torch.library.fallthrough_kernel
        return through
    convert = _CONVERSIONS[policy]
    appended = _appended(overload) if policy == "float32_appended" else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            if appended is not None and _eligible(args[0]):
                return appended(*args, **kwargs, dtype=torch.float32)
            args, kwargs = convert(overload, args, kwargs)
            return overload(*args, **kwargs)

    return kernel


def _appended(overload: Any) -> Any:
    """`norm(x, p)` has no `dtype`; the overload that has one is called instead."""
    norm = torch.ops.aten.norm
    return norm.ScalarOpt_dtype if str(overload).endswith(".Scalar") else norm.ScalarOpt_dim_dtype


def _as_it_is(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _to_float32(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _cast(args, kwargs, torch.float32)


def _to_half(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _cast(args, kwargs, torch.get_autocast_dtype("cpu"))


def _to_widest(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    wide = _any_float32((*args, *kwargs.values()))
    return _cast(args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


def _with_dtype(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`dtype=torch.float32` unless the call names one itself."""
    names = [argument.name for argument in overload._schema.arguments]
    position = names.index("dtype")
    named = args[position] if len(args) > position else kwargs.get("dtype")
    if named is not None or not _eligible(args[0]):
        return args, kwargs
    if len(args) > position:
        return (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


_CONVERSIONS: dict[Policy, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "half": _to_half,
    "float32": _to_float32,
    "float32_dtype": _with_dtype,
    "float32_appended": _as_it_is,
    "widest": _to_widest,
}


def _eligible(value: Any) -> bool:
    """What autocast converts: floating-point tensors on the device, but for double precision."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
        and value.device.type == "cpu"
    )


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with eligible tensors in `dtype`."""
    return tuple(_cast_one(value, dtype) for value in args), {k: _cast_one(v, dtype) for k, v in kwargs.items()}


def _cast_one(value: Any, dtype: torch.dtype) -> Any:
    if _eligible(value):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([_cast_one(member, dtype) for member in value])
    return value


def _any_float32(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, (list, tuple)):
            if _any_float32(value):
                return True
        elif _eligible(value) and value.dtype == torch.float32:
            return True
    return False
