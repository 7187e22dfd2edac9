"""Everything here needs a CUDA device; CI has none, so nothing is collected as passed without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
