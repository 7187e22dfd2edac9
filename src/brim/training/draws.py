"""Random numbers that follow from where they are drawn, and disturb nobody else's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["drawing_from"]


@contextlib.contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """What is drawn on the host inside follows from these numbers; afterwards all generators are as they were.

    Those of Python, numpy and torch, as augmentations use them. Not the device's: `torch.manual_seed` would reach it.
    """
    own, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)
    torch.default_generator.manual_seed(drawn)
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
