"""Gradients, buffers and weights of all ranks made one: flat sums in buckets, several of them under way at a time.

Unlike `DistributedDataParallel`, which sums during the last backward, nothing here runs inside a forward or a backward:
a rank that runs out of memory half-way has left no collective open. Call these when all ranks have agreed to continue.
Knows nothing of windows, losses or optimizers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.ranks.world import World, current_world

__all__ = ["RankGroup", "load_whole_states", "local_part", "shard_model", "whole_states"]

BUCKET_BYTES = 32 * 2**20
UNDER_WAY = 2  # buckets being summed while the next one is filled


class RankGroup:
    """The ranks as one for arithmetic; alone, every call leaves things as they are.

        group = RankGroup(device)
        group.prepare(parameters)
        group.sum_gradients(parameters, extras)      # extras: a small tensor summed along

    The buckets are made once and kept, so that no sum can run out of memory half-way.
    """

    def __init__(self, device: torch.device, world: World | None = None) -> None:
        self.world: World = current_world() if world is None else world
        self.device = device
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        if self.world.size > 1:
            _join(device)

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the buckets now, while an out-of-memory error can still be reported to all."""
        if self.world.size == 1:
            return
        for dtype, counts in _by_dtype(parameters).items():
            length = min(sum(counts), BUCKET_BYTES // dtype.itemsize)
            self._buffers[dtype] = [torch.empty(length, dtype=dtype, device=self.device) for _ in range(UNDER_WAY + 1)]

    def sum_gradients(
        self, parameters: Sequence[torch.Tensor], extras: torch.Tensor, *, absent: Iterable[int] = ()
    ) -> None:
        """Add up every gradient over the ranks, in place, and the extras with them.

        `absent` are the places of parameters that have a gradient on no rank; one that only some ranks lack counts as
        zero there.
        """
        if self.world.size == 1:
            return
        import torch.distributed as dist

        without = set(absent)
        gradients = []
        for place, parameter in enumerate(parameters):
            if place in without:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        waiting: list[_Bucket] = []
        work = dist.all_reduce(extras, async_op=True)
        for number, members in enumerate(_buckets(gradients)):
            if len(waiting) > UNDER_WAY:
                waiting.pop(0).finish()
            bucket = _Bucket(members, self._flat(members, number))
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            waiting.append(bucket)
        for bucket in waiting:
            bucket.finish()
        assert work is not None
        work.wait()

    def _flat(self, members: list[torch.Tensor], number: int) -> torch.Tensor:
        """The memory that a bucket is summed in: a kept buffer, or the gradient itself where it fills one alone."""
        if len(members) == 1 and members[0].is_contiguous():
            return members[0].view(-1)
        buffers = self._buffers[members[0].dtype]
        count = sum(member.numel() for member in members)
        buffer = buffers[number % len(buffers)]
        if count > buffer.numel():  # a single large gradient that is not contiguous
            return torch.empty(count, dtype=buffer.dtype, device=buffer.device)
        return buffer[:count]

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum over the ranks, in place."""
        if self.world.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """The mean over the ranks, in place; whole numbers become those of rank 0."""
        if self.world.size == 1:
            return
        import torch.distributed as dist

        with torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point():
                    dist.all_reduce(tensor)
                    tensor.div_(self.world.size)
                else:
                    dist.broadcast(tensor, src=0)

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Rank 0's values on every rank."""
        if self.world.size == 1:
            return
        import torch.distributed as dist

        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def _join(device: torch.device) -> None:
    """The default group, made once for the life of the process, unless the caller has made it."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


@dataclasses.dataclass
class _Bucket:
    """Gradients whose sum is under way."""

    members: list[torch.Tensor]
    flat: torch.Tensor
    work: Any = None

    def __post_init__(self) -> None:
        if not self._in_place():
            torch._foreach_copy_(self._views(), self.members)

    def finish(self) -> None:
        self.work.wait()
        if not self._in_place():
            torch._foreach_copy_(self.members, self._views())

    def _in_place(self) -> bool:
        return self.flat.data_ptr() == self.members[0].data_ptr()

    def _views(self) -> list[torch.Tensor]:
        lengths = [member.numel() for member in self.members]
        return [view.view(member.shape) for view, member in zip(self.flat.split(lengths), self.members, strict=True)]


def _by_dtype(parameters: Iterable[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """How many numbers each parameter of a dtype has."""
    found: dict[torch.dtype, list[int]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter.numel())
    return found


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype, at most a bucket's bytes together; a larger one is alone."""
    bucket: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or held + size > BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += size
    if bucket:
        yield bucket


def shard_model(model: nn.Module, device: torch.device) -> None:
    """Shard the parameters of every repeated block, and of what is left, over the ranks, in place."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise RequestError(f"training.fsdp: this torch has no fully_shard ({error}); it came with torch 2.6") from error
    mesh = init_device_mesh(device.type, (current_world().size,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it, or its shard."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer put together from all shards, on the host; every rank must call it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return weights, state


def load_whole_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Load whole states into the shards; every rank has them and calls it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(weights), options=options)
    set_optimizer_state_dict(model, optimizer, dict(state), options=options)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of containers that have weights; containers among them are entered."""
    for child in model.children():
        inside = isinstance(model, (nn.ModuleList, nn.Sequential))
        container = isinstance(child, (nn.ModuleList, nn.Sequential))
        if inside and not container and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _blocks(child)
