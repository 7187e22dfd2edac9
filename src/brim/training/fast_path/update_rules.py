"""Elementwise optimizers as functions of flat tensors, so that many runs can take their steps as one.

As `torch.optim`'s SGD, Adam and AdamW, and equal to them to rounding, but the learning rate and the number of steps
taken are one number for each run, and a run that is masked out keeps its weights and its state. Nothing is read by the
host, so a step can be captured in a CUDA graph. Optimizers that mix elements (LBFGS, Muon, Adafactor) have no
such form and are left to `torch.optim`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from brim.errors import RequestError

__all__ = ["AdamRule", "SgdRule", "UpdateRule", "rule_for"]

State = tuple[Tensor, ...]  # as wide as the weights, each


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule(abc.ABC):
    """How weights `[runs, width]` move along their gradients."""

    weight_decay: float = 0.0
    maximize: bool = False

    @abc.abstractmethod
    def start(self, weights: Tensor) -> State:
        """The state before the first step."""

    @abc.abstractmethod
    def move(self, weights: Tensor, gradients: Tensor, state: State, *, lr: Tensor, taken: Tensor) -> None:
        """One step of every run, in place; `gradients` may be overwritten, `taken` counts this step already."""

    def step(
        self, weights: Tensor, gradients: Tensor, state: State, lr: Tensor, taken: Tensor, active: Tensor | None = None
    ) -> None:
        """One step in place; runs whose `active` is false keep weights, state and count.

        `lr`, `taken` (steps so far) and `active` are `[runs, 1]`; the first two in float64 where the device has it, so
        that the corrections are as exact as torch.optim's. `gradients` may be overwritten.
        """
        changed = (weights, taken, *state)
        before = None if active is None else [tensor.clone() for tensor in changed]
        taken += 1
        self.move(weights, gradients.neg_() if self.maximize else gradients, state, lr=lr, taken=taken)
        if active is not None and before is not None:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(active, tensor, old))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdRule(UpdateRule):
    """Stochastic gradient descent, with momentum or without."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def start(self, weights: Tensor) -> State:
        return (torch.zeros_like(weights),) if self.momentum else ()

    def move(self, weights: Tensor, gradients: Tensor, state: State, *, lr: Tensor, taken: Tensor) -> None:
        if self.weight_decay:
            gradients.add_(weights, alpha=self.weight_decay)
        direction = gradients
        if self.momentum:
            (velocity,) = state
            # The first step takes the gradient whole: dampening begins with the second.
            fresh = (1 - self.dampening * (taken > 1).to(taken.dtype)).to(weights.dtype)
            velocity.mul_(self.momentum).add_(gradients * fresh if self.dampening else gradients)
            direction = gradients.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        weights.sub_(direction * lr.to(weights.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamRule(UpdateRule):
    """Adam; `decoupled` weight decay makes it AdamW."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False

    def start(self, weights: Tensor) -> State:
        return torch.zeros_like(weights), torch.zeros_like(weights)

    def move(self, weights: Tensor, gradients: Tensor, state: State, *, lr: Tensor, taken: Tensor) -> None:
        dtype, (beta1, beta2), (mean, square) = weights.dtype, self.betas, state
        if self.weight_decay:
            if self.decoupled:
                weights.mul_((1 - lr * self.weight_decay).to(dtype))
            else:
                gradients.add_(weights, alpha=self.weight_decay)
        mean.lerp_(gradients, 1 - beta1)
        square.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        step_size = (lr / (1 - beta1**taken)).to(dtype)
        root = (1 - beta2**taken).sqrt().to(dtype)
        denominator = torch.sqrt(square, out=gradients).div_(root).add_(self.eps)
        weights.sub_(torch.div(mean, denominator, out=denominator).mul_(step_size))


_DEFAULTS: dict[str, dict[str, Any]] = {
    # As `make_optimizer` sets them: what a name means must not depend on the path that is taken.
    "sgd": {"momentum": 0.9},
    "adam": {},
    "adamw": {"weight_decay": 1e-2},
}
_NOT_THE_RULE = ("lr", "foreach", "fused", "capturable")
_ADAM_OPTIONS = {"betas", "eps", "weight_decay", "maximize"}
_SGD_OPTIONS = {"momentum", "dampening", "nesterov", "weight_decay", "maximize"}


def rule_for(name: str, options: Mapping[str, Any] | None = None) -> UpdateRule | None:
    """The rule of an optimizer by its name in any case; None where it, or one of its options, has no such form.

    `options` are those of `torch.optim`, without `lr`. Options that only say how torch computes (`foreach`, `fused`,
    `capturable`) are left out of account.
    """
    lowered = name.lower()
    if lowered not in _DEFAULTS:
        return None
    given = {key: value for key, value in (options or {}).items() if key not in _NOT_THE_RULE}
    merged = {**_DEFAULTS[lowered], **given}
    known = _SGD_OPTIONS if lowered == "sgd" else _ADAM_OPTIONS
    if set(merged) - known:
        return None  # amsgrad, differentiable
    if lowered == "sgd":
        if merged.get("nesterov") and (not merged.get("momentum") or merged.get("dampening")):
            raise RequestError("optimizer sgd: nesterov needs a momentum and no dampening")
        return SgdRule(**merged)
    if "betas" in merged:
        merged["betas"] = tuple(float(beta) for beta in merged["betas"])
    return AdamRule(**merged, decoupled=lowered == "adamw")
