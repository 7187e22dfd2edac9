"""Flat sums of gradients; with real ranks they are tried in tests/training/test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from brim.ranks import gradients
from brim.ranks.gradients import RankGroup, _Bucket, _buckets


def test_buckets_keep_the_order_and_hold_one_dtype_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 100)
    sizes = [(10, torch.float32), (10, torch.float32), (10, torch.float32), (3, torch.float64), (500, torch.float32)]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    found = list(_buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [[10, 10], [10], [3], [500]]
    assert [tensor for bucket in found for tensor in bucket] == tensors
    assert all(len({tensor.dtype for tensor in bucket}) == 1 for bucket in found)


def test_a_bucket_gives_back_what_was_made_of_it() -> None:
    members = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0), torch.ones(2, 2).T]
    bucket = _Bucket(members, torch.empty(14))
    bucket.flat.mul_(2)  # as the sum over two equal ranks

    class Done:
        def wait(self) -> None:
            pass

    bucket.work = Done()
    bucket.finish()
    assert torch.equal(members[0], 2 * torch.arange(6.0).reshape(2, 3))
    assert torch.equal(members[2], 2 * torch.ones(2, 2))


def test_alone_nothing_is_started_and_nothing_changes() -> None:
    group = RankGroup(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    extras = torch.ones(2)
    group.prepare([weight])
    group.sum_gradients([weight], extras)
    group.average([extras])
    group.add_up(extras)
    group.copy_from_first([extras])
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert torch.equal(extras, torch.ones(2))
    assert not torch.distributed.is_initialized()
