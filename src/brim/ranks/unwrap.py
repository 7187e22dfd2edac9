"""One rank working alone on a model that is wrapped for many.

A probe runs on one rank at a size of its own, so it must not enter a collective that the others do not.
Knows nothing of probes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brim.errors import RequestError

__all__ = ["communication_bytes", "data_parallel", "refuse_sharded", "without_collectives"]


@contextlib.contextmanager
def without_collectives(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, the modules compute on this rank only: local gradients, local batch statistics.

    `DistributedDataParallel` calls the module it wraps, so its reducer never expects a backward and
    its gradient hooks return at once; `SyncBatchNorm` is a plain batch norm. Enter between two steps: after a
    DDP forward whose backward is still to come, the reducer does expect one. Sharded models are refused. With
    `find_unused_parameters=True` the reducer remembers the parameters used inside as used in the next step.
    """
    found = _distinct(modules)
    refuse_sharded(found, instead="give a fixed batch size")
    with contextlib.ExitStack() as undo:
        for module in found:
            if isinstance(module, DistributedDataParallel):
                _refuse_unseen_static_graph(module)
                _set_attribute(undo, module, "forward", functools.partial(_call_wrapped, module))
                # For code that bypasses `forward` in turn: a compiled wrapper, or DDP's own Python hooks.
                _set_attribute(undo, module, "require_backward_grad_sync", False)
                _set_attribute(undo, module, "require_forward_param_sync", False)
            elif isinstance(module, nn.SyncBatchNorm):
                plain = functools.partial(nn.modules.batchnorm._BatchNorm.forward, module)
                _set_attribute(undo, module, "forward", plain)
        yield


def data_parallel(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Those of the modules, and of what they consist of, that `DistributedDataParallel` wraps."""
    return [module for module in _distinct(modules) if isinstance(module, DistributedDataParallel)]


def communication_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the buckets that `DistributedDataParallel` will add beside the gradients of these modules.

    A module that is wrapped already counts 0: its buckets exist.
    """
    wrapped: set[int] = set()
    plain: dict[int, nn.Parameter] = {}
    for module in _distinct(modules):
        if isinstance(module, DistributedDataParallel):
            wrapped.update(id(parameter) for parameter in module.parameters())
        else:
            plain.update((id(parameter), parameter) for parameter in module.parameters(recurse=False))
    return sum(
        parameter.numel() * parameter.element_size()
        for key, parameter in plain.items()
        if key not in wrapped and parameter.requires_grad
    )


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(part): part for module in modules for part in module.modules()}.values())


def _call_wrapped(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


def _set_attribute(undo: contextlib.ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of the instance, past `nn.Module.__setattr__`, and have it put back as it was."""
    attributes = vars(module)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value


def refuse_sharded(modules: Iterable[nn.Module], *, instead: str) -> None:
    """By class name, so that the sharding packages need not be imported to know that they are not in use."""
    for module in _distinct(modules):
        ours = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.distributed.")]
        names = {kind.__name__ for kind in ours}
        names.update(type(parameter).__name__ for parameter in module.parameters(recurse=False))
        sharded = names & {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
        if sharded:
            raise RequestError(
                f"{type(module).__name__} is sharded over ranks ({', '.join(sorted(sharded))}): each holds a part of "
                f"the weights and cannot run alone, so ranks cannot try sizes of their own; {instead}"
            )


def _refuse_unseen_static_graph(wrapper: DistributedDataParallel) -> None:
    # The reducer learns a static graph from the first backward, and would learn it from a bypassed one.
    if wrapper.static_graph and not getattr(wrapper, "_static_graph_delay_allreduce_enqueued", False):
        raise RequestError(
            "DistributedDataParallel(static_graph=True) has not made its first step, and would take a trial for it; "
            "search before wrapping the model, or make one step of your own first"
        )
