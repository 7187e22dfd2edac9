"""What can be said of wrapped models in one process; the two-rank checks are in test_agreement.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.ranks.unwrap import communication_bytes, without_collectives


def test_bucket_bytes_count_each_trainable_parameter_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).bfloat16())
    net[1].weight = net[0].weight
    net[2].bias.requires_grad_(False)
    assert communication_bytes([net, net[0]]) == 16 * 4 + 16 * 2
    assert communication_bytes([]) == 0


def test_a_batch_norm_forward_is_restored_even_after_an_error() -> None:
    net = nn.SyncBatchNorm(3)
    net.forward = lambda x: x  # someone else's patch
    patched = net.forward
    batch = torch.arange(6.0).view(2, 3)

    def fail_inside() -> None:
        with without_collectives([net]):
            assert torch.equal(net(batch), nn.BatchNorm1d(3)(batch))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert net.forward is patched


def test_a_plain_model_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = [dict(vars(module)) for module in net.modules()]
    with without_collectives([net]):
        assert [dict(vars(module)) for module in net.modules()] == before


def test_sharded_models_are_refused_with_the_reason() -> None:
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, nn.Linear):
        def __new__(cls, *args: object, **kwargs: object) -> Sharded:
            return nn.Module.__new__(cls)

    with (
        pytest.raises(RequestError, match="cannot run alone"),
        without_collectives([nn.Sequential(Sharded(2, 2))]),
    ):
        pass
