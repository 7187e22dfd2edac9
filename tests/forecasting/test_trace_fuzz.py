"""Random models: traced, or refused by name; never anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from brim.errors import BrimError
from brim.forecasting.events import Target
from brim.forecasting.trace import trace_workload
from brim.workloads.inference import ForwardWorkload
from tests.forecasting.traced_workloads import training

# Each takes and gives [n, 8, 8, 8] as far as it can; what it cannot take it raises on, as a user's model would.
PIECES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu in place": lambda x: functional.relu_(x.clone()),
    "split and join": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "view": lambda x: x.reshape(x.shape[0], -1).view(x.shape[0], *x.shape[1:]),
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "expand": lambda x: x + x.mean((2, 3), keepdim=True).expand_as(x),
    "index": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "mask": lambda x: x.masked_fill(x < 0, 0.0),
    "choose": lambda x: torch.where(x > 0, x, -x),
    "read": lambda x: x * x.max().item(),
    "branch": lambda x: x if x.sum() > 0 else x * 2,
    "pick": lambda x: x.flatten()[x.flatten() > 0].mean() + x,
    "sort": lambda x: x.sort(-1).values,
    "top": lambda x: x.topk(4, -1).values.repeat(1, 1, 1, 2),
    "write": lambda x: _written(x),
    "attend": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "attend causally": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "pool": lambda x: functional.interpolate(functional.max_pool2d(x, 2), x.shape[-2:]),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "fold": lambda x: functional.fold(functional.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1),
    "einsum": lambda x: torch.einsum("nchw,nchv->nchv", x, x),
    "cumulate": lambda x: x.cumsum(1),
    "transform": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "solve": lambda x: torch.linalg.solve(torch.eye(8) + 0 * x, x),
    "numpy": lambda x: x + torch.from_numpy(x.detach().numpy()),
    "sparse": lambda x: x + x.to_sparse().to_dense(),
    "detach": lambda x: x + x.detach(),
    "roll": lambda x: torch.roll(x, (1, 1), (2, 3)),
    "double": lambda x: x.double().float(),
    "half": lambda x: (x.bfloat16() * 2).float(),
    "resize": lambda x: x.detach().clone().resize_(x.shape),
    "transpose in place": lambda x: x.clone().transpose_(2, 3),
    "wrong": lambda x: x.view(3, 5),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "linear": lambda: nn.Linear(8, 8),
    "silu": nn.SiLU,
    "prelu": nn.PReLU,
}


def _written(x: torch.Tensor) -> torch.Tensor:
    copied = x.clone()
    copied[:, :2] = 0
    copied[:, 2:4] += 1
    return copied


class Pieces(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{i}": LAYERS[name]() for i, name in enumerate(names) if name in LAYERS})
        self.names = names
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, name in enumerate(self.names):
            before = x
            x = self.layers[f"{place}"](x) if name in LAYERS else PIECES[name](x)
            if place % 2 and x.shape == before.shape:
                x = x + before
        result: torch.Tensor = self.head(x)
        return result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from([*PIECES, *LAYERS]), min_size=1, max_size=6),
    size=st.integers(1, 9),
    train=st.booleans(),
    half=st.booleans(),
    capability=st.sampled_from([(6, 1), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]),
)
def test_a_random_model_is_traced_or_refused_by_name(
    names: list[str], size: int, train: bool, half: bool, capability: tuple[int, int]
) -> None:
    model = Pieces(names)
    make = lambda n: torch.randn(n, 8, 8, 8)  # noqa: E731
    options: dict[str, Any] = {"autocast_dtype": torch.bfloat16} if half else {}
    workload = (
        training(model, make, **options) if train else ForwardWorkload(model=model, make_batch=make, device="cpu")
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    target = Target(name="any", compute_capability=capability, total_bytes=2**34)
    try:
        trace = trace_workload(workload, size, target=target)
    except BrimError:
        pass
    else:
        assert trace.peak_allocated() >= sum(trace.resident().values()) > 0
        assert sum(trace.live_at_peak().values()) == trace.peak_allocated()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
