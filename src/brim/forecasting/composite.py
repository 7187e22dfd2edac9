"""Operations that are made of others: whether one is, on CUDA, and calling what it is made of."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["composite", "is_composite_on_cuda"]


def composite(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the C++ kernel of a composite operation, which calls the operations that it is made of."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_composite_on_cuda(name: str) -> bool:
    """Whether an operation has no kernel of its own there; a torch without CUDA says it for the CPU instead."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA" if torch.version.cuda else "CPU")
