"""What an energy head learns from: in-distribution energies low, out-of-distribution energies high.

| loss | mean over | of |
|---|---|---|
| `energy` | all (in, out) pairs | softplus(−β(E_out − E_in)); no reference model |
| `reference` | matched pairs | the classical DPO loss: the same, of energies less those of a frozen reference head |
| `hinge` | all pairs | max(0, margin − (E_out − E_in)) |
| `bce` | samples | binary cross entropy with the energy as the logit of being out; both sides weigh the same |
| `mse` | samples | (E_in + 1)² and (E_out − 1)²; both sides weigh the same |

and λ(mean E_in² + mean E_out²) is added to each.

Means over all pairs never keep the n×m pairs. Three ways, all linear in memory: pair blocks (exact, any function),
nodes (log-sigmoid only: the sum over one side is a smooth function of the other side's energy, so it is taken at a few
Chebyshev nodes and interpolated, to rounding), and sorting (hinge). The gradients are computed with the value, so the
backward pass multiplies two vectors. Leading dimensions are runs: `[…, n]` and `[…, m]` give `[…]`.
Knows nothing of models, batches, seeds or optimizers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from brim.errors import RequestError, nearest_names
from brim.settings.caller import given
from brim.settings.molecule_settings import LOSSES, LossName, OodRequest

__all__ = ["Hinge", "LogSigmoid", "PairFunction", "Pairs", "PreferenceLoss", "loss_of", "mean_over_pairs"]

Pairs = Literal["all", "matched"]
BLOCK_BYTES = {"cuda": 32 * 2**20}  # of pairs at a time: what a second-level cache holds
OTHER_BLOCK_BYTES = 2**20
TENSORS_PER_PAIR = 4  # alive at once in a block: the differences, their loss and its buffer, its derivative
WIDEST = 20.0  # β times the range of energies up to which the nodes below reach rounding
NODES = {torch.float32: 64, torch.float64: 128}  # 1.36 to the power of −64 is 3e-9, of −128 8e-18

Means = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the mean […], its gradients […, n] and […, m]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of two sets of energies, `[…, n]` and `[…, m]`; leading dimensions are runs.

        loss = PreferenceLoss(name="energy")
        loss(energies_in, energies_out)

    `matched` pairs the i-th in sample with the i-th out sample instead of every one with every other.
    """

    name: LossName = "energy"
    pairs: Pairs | None = None  # None: as in the table above
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


def loss_of(request: OodRequest, name: str) -> PreferenceLoss:
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


def mean_over_pairs(
    inner: torch.Tensor, outer: torch.Tensor, function: PairFunction, *, block_bytes: int | None = None
) -> torch.Tensor:
    """The mean over all pairs of `function(outer_j − inner_i)`, differentiable once; also under `torch.func.vmap`."""
    block_bytes = block_bytes or BLOCK_BYTES.get(inner.device.type, OTHER_BLOCK_BYTES)
    mean: torch.Tensor = _AllPairs.apply(inner, outer, function, block_bytes)[0]
    return mean


@dataclasses.dataclass(frozen=True)
class PairFunction(abc.ABC):
    """A function of the difference `outer − inner`, and how its mean over all pairs is found."""

    @abc.abstractmethod
    def of(self, difference: torch.Tensor) -> torch.Tensor:
        """The function, elementwise and differentiable: for pairs that are matched one to one."""

    @abc.abstractmethod
    def means(self, inner: torch.Tensor, outer: torch.Tensor, block_bytes: int) -> Means:
        """The mean over all pairs, and its gradients with respect to both sides."""


@dataclasses.dataclass(frozen=True)
class LogSigmoid(PairFunction):
    """softplus(−β·difference) = −log σ(β·difference): what preference losses are made of."""

    beta: float

    def of(self, difference: torch.Tensor) -> torch.Tensor:
        """As `softplus`, but exact in float64 too (torch's own turns linear at 20)."""
        return -functional.logsigmoid(self.beta * difference)

    def means(self, inner: torch.Tensor, outer: torch.Tensor, block_bytes: int) -> Means:
        """By nodes where they are cheaper than the pairs and the energies lie close enough, else in blocks."""
        pairs, ends = inner.shape[-1] * outer.shape[-1], inner.shape[-1] + outer.shape[-1]
        nodes = NODES.get(inner.dtype, 64)
        # On a card many small operations cost more than some more pairs.
        if inner.device.type == "mps" or pairs <= (4 if inner.is_cuda else 1) * nodes * ends:
            return self.in_blocks(inner, outer, block_bytes)
        width = self.beta * (inner.amax(-1) - inner.amin(-1)).double()
        captured = inner.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and not bool((width <= WIDEST).all()):
            return self.in_blocks(inner, outer, block_bytes)
        value, grad_inner, grad_outer = self.by_nodes(inner, outer, nodes)
        if captured:  # the host cannot check: a value that may be wrong becomes nan
            value = torch.where(width <= WIDEST, value, torch.nan)
        return value, grad_inner, grad_outer

    def in_blocks(self, inner: torch.Tensor, outer: torch.Tensor, block_bytes: int) -> Means:
        """Exact: as many rows of pairs at a time as `block_bytes` hold."""
        count, others = inner.shape[-1], outer.shape[-1]
        runs = math.prod(inner.shape[:-1])
        rows = max(1, block_bytes // (TENSORS_PER_PAIR * inner.element_size() * others * max(runs, 1)))
        wide = _widest_dtype(inner)
        total = inner.new_zeros(inner.shape[:-1], dtype=wide)
        grad_inner, grad_outer = torch.empty_like(inner), torch.zeros_like(outer)
        for start in range(0, count, rows):
            scaled = outer[..., None, :] - inner[..., start : start + rows, None]  # […, rows, m]
            scaled = scaled.mul_(self.beta)
            total -= functional.logsigmoid(scaled).sum((-2, -1), dtype=wide)
            slopes = scaled.neg_().sigmoid_()
            grad_inner[..., start : start + rows] = slopes.sum(-1)
            grad_outer -= slopes.sum(-2)
        scale = self.beta / (count * others)
        return (total / (count * others)).to(inner.dtype), grad_inner.mul_(scale), grad_outer.mul_(scale)

    def by_nodes(self, inner: torch.Tensor, outer: torch.Tensor, nodes: int) -> Means:
        """(n + m)·nodes instead of n·m: sums over `outer` at Chebyshev nodes of the range of `inner`, interpolated.

        The function has its nearest poles π/β off the real line, so the error falls like ρ^−nodes, where
        ρ = p + √(p² + 1) and p = 2π / (β·range).
        """
        x, y = inner.double(), outer.double()
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        centre, half = (low + high) / 2, ((high - low) / 2).clamp_min(1e-300)
        angles, to_coefficients = _chebyshev(nodes, x.device)
        differences = y[..., None, :] - (centre + half * angles.cos())[..., :, None]  # […, nodes, m]
        scaled = self.beta * differences
        sums = -functional.logsigmoid(scaled).sum(-1)  # […, nodes]
        slopes = torch.sigmoid(-scaled)
        orders = torch.arange(nodes, device=x.device, dtype=x.dtype)
        polynomials = torch.cos(orders * ((x - centre) / half).clamp(-1, 1).acos()[..., None])  # […, n, nodes]
        moments = polynomials.sum(-2)
        scale = 1.0 / (x.shape[-1] * y.shape[-1])
        value = scale * (moments * (sums @ to_coefficients.mT)).sum(-1)
        at_inner = (polynomials @ (slopes.sum(-1) @ to_coefficients.mT)[..., None])[..., 0]
        at_outer = ((moments @ to_coefficients)[..., None, :] @ slopes)[..., 0, :]
        slope_scale = self.beta * scale
        grads = (slope_scale * at_inner).to(inner.dtype), (-slope_scale * at_outer).to(outer.dtype)
        return value.to(inner.dtype), *grads


@dataclasses.dataclass(frozen=True)
class Hinge(PairFunction):
    """max(0, margin − difference)."""

    margin: float

    def of(self, difference: torch.Tensor) -> torch.Tensor:
        """Elementwise."""
        return functional.relu(self.margin - difference)

    def means(self, inner: torch.Tensor, outer: torch.Tensor, block_bytes: int) -> Means:
        """Exact, by sorting: an inner energy has a loss with every outer one below it plus the margin."""
        del block_bytes
        wide = _widest_dtype(inner)
        edges = inner + self.margin
        ordered = outer.sort(-1).values.contiguous()
        below = torch.zeros((*outer.shape[:-1], outer.shape[-1] + 1), dtype=wide, device=outer.device)
        torch.cumsum(ordered.to(wide), -1, out=below[..., 1:])
        counts = torch.searchsorted(ordered, edges.contiguous())  # outer energies strictly below
        total = (counts * edges.to(wide) - below.gather(-1, counts)).sum(-1)
        over = torch.searchsorted(edges.sort(-1).values.contiguous(), outer.contiguous(), right=True)
        scale = 1.0 / (inner.shape[-1] * outer.shape[-1])
        grad_outer = (over - inner.shape[-1]).to(outer.dtype) * scale  # one less for every edge strictly above it
        return (scale * total).to(inner.dtype), counts.to(inner.dtype) * scale, grad_outer


class _AllPairs(torch.autograd.Function):
    """The mean and its gradients in one pass; what is kept for backward is as long as the energies."""

    @staticmethod
    def forward(inner: torch.Tensor, outer: torch.Tensor, function: PairFunction, block_bytes: int) -> Means:
        return function.means(inner, outer, block_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Means) -> None:
        del inputs
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(output[1], output[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        grad_inner, grad_outer = ctx.saved_tensors
        return upstream[0][..., None] * grad_inner, upstream[0][..., None] * grad_outer, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Means, tuple[int, int, int]]:
        inner, outer, function, block_bytes = inputs
        inner, outer = (
            tensor.movedim(dim, 0) if dim is not None else tensor.expand(info.batch_size, *tensor.shape)
            for tensor, dim in zip((inner, outer), in_dims[:2], strict=True)
        )
        result: Means = _AllPairs.apply(inner, outer, function, block_bytes)
        return result, (0, 0, 0)


@functools.cache
def _chebyshev(nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles of the nodes, and the matrix from values at them to Chebyshev coefficients."""
    angles = math.pi * (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes
    orders = torch.arange(nodes, dtype=torch.float64)
    matrix = torch.cos(orders[:, None] * angles[None, :]) * (2.0 / nodes)
    matrix[0] /= 2
    return angles.to(device), matrix.to(device)


def _widest_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.device.type == "mps" else torch.float64
