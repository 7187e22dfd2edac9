"""Runs stacked into one: weights `[runs, width]`, the model under `torch.func.vmap`, one optimizer step for all.

Clipping, loss scales, skipped steps and frozen runs are each run's own; no run's numbers enter another's. A single run
has the same form without the leading dimension of its batches. Dropout draws different noise for each run, and other
noise than the run would draw alone; without dropout a run in a stack equals the run alone to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from brim.training.fast_path.runs import NotStackableError, Runs
from brim.training.fast_path.task import Batch, Counts, RunSpec, Settings, TrainingTask
from brim.training.fast_path.update_rules import UpdateRule, rule_for

__all__ = ["StackedRuns"]

ALIGNMENT = 64  # elements: every weight begins where matrix kernels like it
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # as torch.amp.GradScaler's


class StackedRuns(Runs):
    """Runs of one architecture as one set of tensors."""

    capturable = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        specs: Sequence[RunSpec],
        task: TrainingTask,
        settings: Settings,
        device: torch.device,
    ) -> None:
        super().__init__(specs, device)
        self.stacked = len(models) > 1
        self._rule = _rule(settings)
        self._criterion, self._inputs = task.criterion, task.inputs
        self._settings = settings
        self._module = copy.deepcopy(models[0]).to(device)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._layout = _WeightLayout(models)
        self._weights = self._layout.gathered(models, device)  # [runs, width]
        self._gradients = torch.zeros_like(self._weights)
        self._views = self._layout.views(self._weights, stacked=self.stacked, leaves=True)
        self._gradient_views = self._layout.views(self._gradients, stacked=self.stacked)
        self._fixed = _stacked_parts(models, device, stacked=self.stacked)  # buffers, parameters that do not learn
        self._state = self._rule.start(self._weights)
        self._lr = torch.tensor([[spec.lr] for spec in specs], dtype=wide, device=device)
        self._taken = torch.zeros(len(models), 1, dtype=wide, device=device)
        self._active = torch.ones(len(models), 1, dtype=torch.bool, device=device)
        self._all_active = True
        self._skipped = torch.zeros(len(models), 1, dtype=torch.int64, device=device)
        self._scale = torch.full((len(models), 1), FIRST_SCALE, device=device)
        self._grown = torch.zeros(len(models), 1, dtype=torch.int64, device=device)
        self._remembered: list[torch.Tensor] | None = None

    def step(self, batch: Batch, counts: Counts, lr_factor: Any) -> torch.Tensor:
        """One optimizer step of all runs; reads nothing back to the host."""
        self._module.train()
        losses = self._losses(batch, counts)
        scaled = losses if not self._settings.loss_scaling else losses * self._scale[:, 0]
        found = torch.autograd.grad(scaled.sum(), list(self._views.values()), allow_unused=True)
        for (name, view), gradient in zip(self._gradient_views.items(), found, strict=True):
            if gradient is None:  # torch.optim leaves such a parameter alone, weight decay and all
                raise NotStackableError(f"its parameter {name} takes no part in the loss")
            view.copy_(gradient)
        with torch.no_grad():
            self._update(lr_factor)
        return losses.detach()

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        self._module.eval()
        rows = rows.to(self.device)
        with torch.no_grad(), self._autocast():
            if not self.stacked:
                result: torch.Tensor = self._call(self._views, self._fixed, rows)[None]
                return result
            every: torch.Tensor = vmap(self._call, in_dims=(0, 0, None), randomness="different")(
                self._views, self._fixed, rows
            )
            return every

    def freeze(self, run: int) -> None:
        self._active[run] = False
        self._all_active = False

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self._changing()]

    def restore(self, snapshot: Any) -> None:
        with torch.no_grad():
            for tensor, before in zip(self._changing(), snapshot, strict=True):
                tensor.copy_(before)

    def remember(self, runs: Sequence[int]) -> None:
        now = (self._weights, *self._fixed.values())
        if self._remembered is None:
            self._remembered = [tensor.detach().clone() for tensor in now]
        elif not self.stacked:
            for kept, tensor in zip(self._remembered, now, strict=True):
                kept.copy_(tensor.detach())
        else:
            rows = torch.tensor(list(runs), device=self.device)
            for kept, tensor in zip(self._remembered, now, strict=True):
                kept.index_copy_(0, rows, tensor.detach().index_select(0, rows))

    def weights(self, run: int, *, remembered: bool = False) -> dict[str, torch.Tensor]:
        flat, fixed = self._weights, list(self._fixed.values())
        if remembered:
            assert self._remembered is not None
            flat, fixed = self._remembered[0], self._remembered[1:]
        parts = {**self._layout.views(flat, stacked=self.stacked), **dict(zip(self._fixed, fixed, strict=True))}
        chosen = {name: (part[run] if self.stacked else part).detach().cpu().clone() for name, part in parts.items()}
        first_names: dict[int, str] = {}
        for name, part in self._module.named_parameters(remove_duplicate=False):
            chosen[name] = chosen[first_names.setdefault(id(part), name)]  # a parameter that layers share
        return {name: chosen[name] for name in self._module.state_dict()}

    def skipped_steps(self) -> list[int]:
        return [int(count) for count in self._skipped.flatten().tolist()]

    def _losses(self, batch: Batch, counts: Counts) -> torch.Tensor:
        def one(weights: dict[str, Any], fixed: dict[str, Any], rows: Batch) -> torch.Tensor:
            return self._criterion(self._call(weights, fixed, rows[self._inputs]), rows, counts)

        with self._autocast():
            if not self.stacked:
                return one(self._views, self._fixed, batch).reshape(1)
            losses: torch.Tensor = vmap(one, randomness="different")(self._views, self._fixed, batch)
            return losses

    def _call(self, weights: dict[str, Any], fixed: dict[str, Any], rows: torch.Tensor) -> Any:
        return functional_call(self._module, {**weights, **fixed}, (rows,))

    def _update(self, lr_factor: Any) -> None:
        """Scale, clip and step, each run by its own measure."""
        active = self._active if self._masked() else None
        if self._settings.loss_scaling:
            self._gradients.div_(self._scale)
            finite = self._gradients.isfinite().all(1, keepdim=True)
            active = self._active & finite
            self._skipped += self._active & ~finite
            self._adjust_scale(finite)
        if self._settings.clip_norm is not None:
            norms = torch.linalg.vector_norm(self._gradients, dim=1, keepdim=True)
            self._gradients.mul_((self._settings.clip_norm / (norms + 1e-6)).clamp_max(1.0))
        lr = self._lr * lr_factor
        self._rule.step(self._weights, self._gradients, self._state, lr=lr, taken=self._taken, active=active)

    def _masked(self) -> bool:
        """A graph is recorded once for runs that may be frozen later; alone there is nobody to wait for."""
        return self.stacked and (self.device.type == "cuda" or not self._all_active)

    def _adjust_scale(self, finite: torch.Tensor) -> None:
        self._grown.copy_(torch.where(finite, self._grown + 1, 0))
        grow = self._grown >= GROWTH_STEPS
        self._scale.copy_(torch.where(finite, torch.where(grow, self._scale * 2, self._scale), self._scale / 2))
        self._grown.masked_fill_(grow, 0)

    def _autocast(self) -> torch.autocast:
        dtype = self._settings.autocast_dtype
        # Without its cache of cast weights, which would outlive the step that a graph records.
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def _changing(self) -> list[torch.Tensor]:
        return [
            self._weights, self._taken, self._skipped, self._scale, self._grown, *self._state, *self._fixed.values(),
        ]  # fmt: skip


class _WeightLayout:
    """Where each learning parameter stands in a row of weights."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        first = _learning(models[0])
        if not first:
            raise NotStackableError("the model has no parameters that learn")
        dtypes = {parameter.dtype for parameter in first.values()}
        if len(dtypes) > 1:
            raise NotStackableError(f"its parameters have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
        for model in models[1:]:
            if {name: part.shape for name, part in _learning(model).items()} != {
                name: part.shape for name, part in first.items()
            }:
                raise NotStackableError("the seeds do not all give the same architecture")
        self.places: dict[str, tuple[int, torch.Size]] = {}
        self.width = 0
        for name, parameter in first.items():
            self.places[name] = (self.width, parameter.shape)
            self.width += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def gathered(self, models: Sequence[nn.Module], device: torch.device) -> torch.Tensor:
        """All models' parameters, `[runs, width]`."""
        dtype = next(iter(_learning(models[0]).values())).dtype
        weights = torch.zeros(len(models), self.width, dtype=dtype)
        for run, model in enumerate(models):
            for name, parameter in _learning(model).items():
                start, _ = self.places[name]
                weights[run, start : start + parameter.numel()] = parameter.detach().flatten().cpu()
        return weights.to(device)

    def views(self, weights: torch.Tensor, *, stacked: bool, leaves: bool = False) -> dict[str, torch.Tensor]:
        """The parameters by name, in the memory of `weights`: `[runs, *shape]`, or `[*shape]` of a single run."""
        found = {}
        for name, (start, shape) in self.places.items():
            part = weights[:, start : start + shape.numel()]
            view = part.unflatten(1, shape) if len(shape) else part[:, 0]
            view = view if stacked else view[0]
            found[name] = view.detach().requires_grad_() if leaves else view
        return found


def _learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _stacked_parts(models: Sequence[nn.Module], device: torch.device, *, stacked: bool) -> dict[str, torch.Tensor]:
    """Buffers and parameters that do not learn."""
    parts = [
        {
            **{name: part.detach() for name, part in model.named_parameters() if not part.requires_grad},
            **dict(model.named_buffers()),
        }
        for model in models
    ]
    if not stacked:
        return {name: part.detach().clone().to(device) for name, part in parts[0].items()}
    return {name: torch.stack([part[name] for part in parts]).to(device) for name in parts[0]}


def _rule(settings: Settings) -> UpdateRule:
    rule = rule_for(settings.optimizer, settings.optimizer_options)
    if rule is None:
        raise NotStackableError(f"optimizer {settings.optimizer} with these options is not elementwise")
    return rule
