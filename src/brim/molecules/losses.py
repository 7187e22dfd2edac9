"""What an energy head is trained on: in-distribution energies low, out-of-distribution energies high.

| loss | mean over | of |
|---|---|---|
| `energy` | all (in, out) pairs | softplus(−β(E_out − E_in)); no reference model |
| `reference` | matched pairs | the classical DPO loss: the same, of energies less those of a frozen reference head |
| `hinge` | all pairs | max(0, margin − (E_out − E_in)) |
| `bce` | samples | binary cross entropy with the energy as the logit of being out; both sides weigh the same |
| `mse` | samples | (E_in + 1)² and (E_out − 1)²; both sides weigh the same |

and λ(mean E_in² + mean E_out²) is added to each. Knows nothing of batches, seeds or optimizers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch.nn import functional

from brim.errors import RequestError, nearest_names
from brim.molecules.pair_sums import Hinge, LogSigmoid, PairFunction, mean_over_pairs
from brim.settings.caller import given
from brim.settings.ood_settings import LOSSES, DpoRequest, LossName

__all__ = ["Pairs", "PreferenceLoss", "loss_of"]

Pairs = Literal["all", "matched"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of two sets of energies, `[…, n]` and `[…, m]`; leading dimensions are runs.

        loss = PreferenceLoss(name="energy")
        loss(energies_in, energies_out)

    `matched` pairs the i-th in sample with the i-th out sample instead of every one with every other.
    """

    name: LossName = "energy"
    pairs: Pairs | None = None  # None: what the table above says
    beta: float = 0.1
    regulariser: float = 0.01  # λ
    margin: float = 1.0
    block_bytes: int | None = None  # of pairs at a time; None: what suits the device

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise RequestError(
                f"{given('loss', self.name)}: it must be one of "
                f"{', '.join(LOSSES)}{nearest_names(str(self.name), LOSSES)}"
            )
        if self.pairs not in (None, *get_args(Pairs)):
            raise RequestError(f"{given('pairs', self.pairs)}: it must be all or matched")
        if not 0 < self.beta < float("inf"):
            raise RequestError(f"{given('beta', self.beta)}: it must be above 0")
        if not 0 <= self.regulariser < float("inf"):
            raise RequestError(f"{given('regulariser', self.regulariser)}: it must be 0 or more")
        if not 0 < self.margin < float("inf"):
            raise RequestError(f"{given('hinge_margin', self.margin)}: it must be above 0")

    @property
    def matched(self) -> bool:
        """Whether a batch must hold as many samples of one side as of the other."""
        if self.name in ("bce", "mse"):
            return False
        return (self.pairs or ("matched" if self.name == "reference" else "all")) == "matched"

    @property
    def needs_reference(self) -> bool:
        """Whether energies are taken relative to a frozen head's."""
        return self.name == "reference"

    def __call__(
        self,
        inner: torch.Tensor,
        outer: torch.Tensor,
        *,
        reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The loss `[…]`; `reference` are the frozen head's energies of the same samples."""
        inner, outer = _at_least_single(inner), _at_least_single(outer)
        penalty = self.regulariser * (inner.square().mean(-1) + outer.square().mean(-1)) if self.regulariser else 0.0
        if self.needs_reference:
            assert reference is not None
            inner, outer = inner - reference[0], outer - reference[1]
        return self._preference(inner, outer) + penalty

    def _preference(self, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        if self.name == "bce":
            return -(functional.logsigmoid(-inner).mean(-1) + functional.logsigmoid(outer).mean(-1)) / 2
        if self.name == "mse":
            return ((inner + 1).square().mean(-1) + (outer - 1).square().mean(-1)) / 2
        function: PairFunction = Hinge(self.margin) if self.name == "hinge" else LogSigmoid(self.beta)
        if self.matched:
            return function.of(outer - inner).mean(-1)
        return mean_over_pairs(inner, outer, function, block_bytes=self.block_bytes)


def loss_of(request: DpoRequest, name: str) -> PreferenceLoss:
    """The loss of that name with the settings asked for."""
    usual = 0.0 if name == "reference" else 0.01
    return PreferenceLoss(
        name=name,  # type: ignore[arg-type]  # checked by the request
        pairs=request.pairs,  # type: ignore[arg-type]
        beta=request.beta,
        regulariser=usual if request.regulariser is None else request.regulariser,
        margin=request.hinge_margin,
    )


def _at_least_single(energies: torch.Tensor) -> torch.Tensor:
    """Half-precision energies, as autocast gives them, are compared in single precision."""
    return energies.float() if energies.dtype in (torch.float16, torch.bfloat16) else energies
