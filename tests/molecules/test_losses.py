from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.memory.storage_meter import StorageMeter
from brim.molecules.losses import Hinge, LogSigmoid, PairFunction, PreferenceLoss, mean_over_pairs
from brim.settings.molecule_settings import LOSSES

INNER = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
OUTER = torch.tensor([1.5, 0.0], dtype=torch.float64)
FUNCTIONS: list[PairFunction] = [LogSigmoid(0.1), LogSigmoid(2.0), Hinge(1.0)]
shapes = st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([(), (3,), (2, 2)]))


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_the_energy_loss_is_the_mean_over_all_pairs_plus_a_penalty() -> None:
    pairs = [softplus(-0.1 * (out - inner)) for inner in INNER.tolist() for out in OUTER.tolist()]
    penalty = 0.01 * ((0.25 + 1 + 4) / 3 + 2.25 / 2)
    assert float(PreferenceLoss()(INNER, OUTER)) == pytest.approx(sum(pairs) / 6 + penalty, rel=1e-12)


def test_matched_pairs_are_taken_one_by_one() -> None:
    loss = PreferenceLoss(pairs="matched", regulariser=0.0, beta=2.0)
    expected = (softplus(-2.0 * (1.5 - 0.5)) + softplus(-2.0 * (0.0 + 1.0))) / 2
    assert float(loss(INNER[:2], OUTER)) == pytest.approx(expected, rel=1e-12)


def test_the_reference_loss_is_the_classical_one() -> None:
    loss = PreferenceLoss(name="reference", beta=0.5, regulariser=0.0)
    reference = (torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.4], dtype=torch.float64))
    # log π is minus the energy: the chosen answer is the in-distribution sample.
    chosen = -(INNER[:2] - reference[0])
    rejected = -(OUTER - reference[1])
    expected = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)).mean()
    torch.testing.assert_close(loss(INNER[:2], OUTER, reference=reference), expected)
    assert loss.matched


def test_against_its_own_energies_the_reference_loss_starts_at_log_two() -> None:
    loss = PreferenceLoss(name="reference", regulariser=0.0)
    value = loss(INNER[:2], OUTER, reference=(INNER[:2], OUTER))
    assert float(value) == pytest.approx(math.log(2))


def test_hinge_bce_and_mse() -> None:
    plain: dict[str, Any] = {"regulariser": 0.0}
    hinge = [max(0.0, 1 - (out - inner)) for inner in INNER.tolist() for out in OUTER.tolist()]
    assert float(PreferenceLoss(name="hinge", **plain)(INNER, OUTER)) == pytest.approx(sum(hinge) / 6)
    labels = torch.cat([torch.zeros(2), torch.ones(2)]).double()
    logits = torch.cat([INNER[:2], OUTER])
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(PreferenceLoss(name="bce", **plain)(INNER[:2], OUTER), bce)
    mse = torch.nn.functional.mse_loss(logits, 2 * labels - 1)
    torch.testing.assert_close(PreferenceLoss(name="mse", **plain)(INNER[:2], OUTER), mse)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_pushes_in_down_and_out_up(name: Any) -> None:
    sides = [torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    reference = (torch.zeros(4), torch.zeros(4))
    PreferenceLoss(name=name)(*sides, reference=reference).backward()  # type: ignore[no-untyped-call]
    assert sides[0].grad is not None
    assert sides[1].grad is not None
    assert (sides[0].grad > 0).all()
    assert (sides[1].grad < 0).all()


def test_half_precision_energies_are_compared_in_single_precision() -> None:
    value = PreferenceLoss()(INNER.bfloat16(), OUTER.bfloat16())
    assert value.dtype == torch.float32


@pytest.mark.usefixtures("words_of_the_command_line")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "energi"}, "--loss energi.*did you mean energy"),
        ({"pairs": "some"}, "--pairs some"),
        ({"beta": 0.0}, "--beta 0"),
        ({"regulariser": -1.0}, "--regulariser -1"),
        ({"margin": float("nan")}, "--hinge-margin nan"),
    ],
)
def test_wrong_settings_name_the_flag(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PreferenceLoss(**settings)


def naive(inner: torch.Tensor, outer: torch.Tensor, function: PairFunction) -> torch.Tensor:
    return function.of(outer[..., None, :] - inner[..., :, None]).mean((-2, -1))


def energies(n: int, m: int, lead: tuple[int, ...] = (), *, seed: int = 0, scale: float = 2.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(*lead, size, generator=generator, dtype=torch.float64) for size in (n, m)]
    return [(side * scale + shift).requires_grad_() for shift, side in zip((0.0, 0.5), sides, strict=True)]


def value_and_grads(value: torch.Tensor, sides: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.arange(1, value.numel() + 1, dtype=value.dtype).view(value.shape)  # every run counts differently
    return [value, *torch.autograd.grad((value * weights).sum(), sides)]


@pytest.mark.parametrize("function", FUNCTIONS)
@given(shape=shapes, seed=st.integers(0, 10**6), block_bytes=st.sampled_from([1, 700, 2**20]))
@settings(max_examples=30, deadline=None)
def test_blocks_equal_the_whole_matrix(
    function: PairFunction, shape: tuple[int, int, tuple[int, ...]], seed: int, block_bytes: int
) -> None:
    sides = energies(*shape, seed=seed)
    blocked = value_and_grads(mean_over_pairs(*sides, function, block_bytes=block_bytes), sides)
    for ours, plain in zip(blocked, value_and_grads(naive(*sides, function), sides), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_pass_gradcheck_in_float64(function: PairFunction) -> None:
    sides = energies(7, 5, (2,))
    assert torch.autograd.gradcheck(lambda x, y: mean_over_pairs(x, y, function, block_bytes=300), sides)


@given(seed=st.integers(0, 10**6), width=st.floats(1e-6, 199.0), beta=st.sampled_from([0.1, 1.0]))
@settings(max_examples=30, deadline=None)
def test_nodes_equal_the_whole_matrix_to_rounding(seed: int, width: float, beta: float) -> None:
    inner, outer = (side.detach() for side in energies(30, 50, (2,), seed=seed))
    inner = inner - inner.amin(-1, keepdim=True)
    inner = inner / inner.amax(-1, keepdim=True) * width * 0.1 / beta
    outer = outer * width / 5
    function = LogSigmoid(beta)
    for ours, plain in zip(function.by_nodes(inner, outer, 128), function.in_blocks(inner, outer, 2**20), strict=True):
        scale = float(plain.abs().max())
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12 * scale)


def test_nodes_are_taken_for_many_pairs_and_agree_with_blocks_in_float32() -> None:
    inner, outer = (side.detach().float() for side in energies(2048, 1536))
    function = LogSigmoid(0.1)
    meter = StorageMeter()
    with meter:
        value, grad_inner, grad_outer = function.means(inner, outer, 2**30)
    assert meter.peak_bytes < 2048 * 1536 * 4  # a single block of all pairs would take more
    for ours, plain in zip((value, grad_inner, grad_outer), function.in_blocks(inner, outer, 2**30), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)


def test_energies_too_far_apart_for_nodes_are_summed_exactly() -> None:
    inner, outer = (side.detach().float() * 500 for side in energies(2048, 1536))
    function = LogSigmoid(0.1)
    for ours, plain in zip(function.means(inner, outer, 2**22), function.in_blocks(inner, outer, 2**22), strict=True):
        assert torch.equal(ours, plain)


def test_one_energy_and_equal_energies_have_finite_gradients() -> None:
    function = LogSigmoid(0.1)
    same = torch.full((1200,), 2.5)
    value, grad_inner, _ = function.means(same, same, 2**22)
    assert float(value) == pytest.approx(0.693147, abs=1e-5)
    torch.testing.assert_close(grad_inner, torch.full((1200,), 0.05 / 1200), rtol=1e-5, atol=0)


def test_not_a_number_stays_one() -> None:
    inner, outer = torch.zeros(1200), torch.zeros(1200)
    inner[3] = torch.nan
    assert mean_over_pairs(inner, outer, LogSigmoid(0.1)).isnan()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_grows_with_the_samples_not_with_the_pairs(function: PairFunction) -> None:
    def peak(count: int) -> int:
        inner, outer = (torch.randn(count).requires_grad_() for _ in range(2))
        with StorageMeter() as meter:
            mean_over_pairs(inner, outer, function, block_bytes=2**16).backward()  # type: ignore[no-untyped-call]
        return meter.peak_bytes

    assert peak(4096) < 6 * peak(1024)  # 16 times if pairs were kept
    assert peak(4096) < 4096 * 4096


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("count", [6, 1500])
def test_stacked_runs_under_vmap_equal_each_run_alone(function: PairFunction, count: int) -> None:
    sides = [side.detach().requires_grad_() for side in energies(count, count, (3,))]
    stacked = torch.func.vmap(lambda x, y: mean_over_pairs(x, y, function))(*sides)
    grads = torch.autograd.grad(stacked.sum(), sides)
    for run in range(3):
        alone = [side[run].detach().requires_grad_() for side in sides]
        value = mean_over_pairs(*alone, function)
        torch.testing.assert_close(stacked[run], value, rtol=1e-12, atol=0)
        for ours, plain in zip(grads, torch.autograd.grad(value, alone), strict=True):
            torch.testing.assert_close(ours[run], plain, rtol=1e-11, atol=1e-16)


def test_vmap_over_one_side_shares_the_other() -> None:
    inner, outer = (side.detach() for side in energies(4, 6))
    stacked = torch.func.vmap(lambda x: mean_over_pairs(x, outer, LogSigmoid(0.1)))(torch.stack([inner, inner + 1]))
    torch.testing.assert_close(stacked[1], naive(inner + 1, outer, LogSigmoid(0.1)))


def test_a_second_derivative_is_refused_instead_of_being_wrong() -> None:
    inner, outer = energies(3, 3)
    value = mean_over_pairs(inner, outer, LogSigmoid(1.0)).square()
    (grad,) = torch.autograd.grad(value, inner, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()  # type: ignore[no-untyped-call]
