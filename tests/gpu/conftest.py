"""Everything here needs a CUDA device; CI has none, so nothing is collected as passed without one."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    """A card, with nothing on it that earlier tests of this process have left: tensors, workspaces of cuBLAS, cache."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
