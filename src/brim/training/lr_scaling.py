"""How the learning rate follows the batch: κ times the batch, √κ or κ times the rate. Pure.

For Adam and its kin √κ keeps the size of the noise in a step, and the same argument moves β towards 1 − κ(1 − β) and ε
to ε/√κ (Malladi et al. 2022). For SGD it is κ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["adjusted_betas", "adjusted_eps", "chosen_rule", "lr_factor"]

_LINEAR = ("sgd", "asgd")


def chosen_rule(rule: str, optimizer: str) -> str:
    """`auto` by the optimizer's kind."""
    if rule != "auto":
        return rule
    return "linear" if optimizer.lower() in _LINEAR else "sqrt"


def lr_factor(rule: str, growth: float, optimizer: str) -> float:
    """What the learning rate is multiplied by when the batch is `growth` times what it was chosen for."""
    rule = chosen_rule(rule, optimizer)
    if rule == "none":
        return 1.0
    return growth if rule == "linear" else math.sqrt(growth)


def adjusted_betas(betas: Sequence[float], growth: float) -> tuple[float, ...]:
    """Adam's memory in samples instead of steps; a batch larger than that memory leaves none."""
    return tuple(max(1 - growth * (1 - beta), 0.0) for beta in betas)


def adjusted_eps(eps: float, growth: float) -> float:
    """ε falls with the noise in a gradient."""
    return eps / math.sqrt(growth)
