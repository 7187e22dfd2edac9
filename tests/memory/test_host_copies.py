"""Copies in host memory: what was there at that moment, in the same memory every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory import host_copies
from brim.memory.host_copies import HostCopies


def test_a_copy_keeps_what_was_there_and_the_next_one_has_its_memory() -> None:
    copies = HostCopies()
    weight = torch.nn.Parameter(torch.ones(3, 2))
    tensors = {"weight": weight, "turned": torch.arange(6.0).reshape(2, 3).T, "step": torch.tensor(4.0)}
    first = copies.take(tensors)
    assert first is not None
    first.wait()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(first.tensors["weight"], torch.ones(3, 2))
    assert torch.equal(first.tensors["turned"], tensors["turned"])
    assert first.tensors["turned"].is_contiguous()
    assert first.tensors["step"].item() == 4
    second = copies.take(tensors)
    assert second is not None
    assert second.tensors["weight"].data_ptr() == first.tensors["weight"].data_ptr()
    assert not second.tensors["weight"].any()


def test_only_copies_whose_end_can_be_waited_for_run_behind_the_host() -> None:
    """Without a CUDA event (from Apple's GPU) the writer would read memory before it is filled."""
    seen: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                seen.append(bool((*args[2:], *(kwargs or {}).values(), False)[0]))
            return func(*args, **(kwargs or {}))

    with Watch():
        copied = HostCopies().take({"a": torch.ones(4)})
    assert copied is not None
    assert copied.ready is None
    assert seen == [False]


def test_other_tensors_get_other_memory() -> None:
    copies = HostCopies()
    first = copies.take({"a": torch.ones(4)})
    second = copies.take({"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.bfloat16)})
    assert first is not None
    assert second is not None
    assert second.tensors["b"].dtype == torch.bfloat16


def test_what_does_not_fit_beside_the_rest_of_the_host_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "available_host_bytes", lambda: 1000)
    assert HostCopies().take({"a": torch.ones(200)}) is None
    assert HostCopies().take({"a": torch.ones(50)}) is not None
    assert HostCopies().take({"a": torch.eye(3).to_sparse()}) is None
