"""How far a step had come when it ran out of memory, read from the traceback: which module of the model it was in.

A forward that keeps its activations fills memory module by module, so the part of the model that was done says about
how much of its memory the step had. Only reads: frames keep what they hold as long as the traceback lives, no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType

from torch import nn

__all__ = ["progress_at"]

FORWARD_PART = 0.9  # of a training step's memory is in use when its forward ends; the backward adds the rest
_BACKWARD = ("torch.autograd", "torch.autograd.graph")  # whose frames are a backward's; a Function's are in both parts
_OPTIMIZER = "torch.optim."


def progress_at(trace: TracebackType | None) -> float | None:
    """The part of the step's memory that was in use, by where the error was raised; None where that does not show.

    1 in a backward or an optimizer's step, which come when all activations are there; in a forward the part of the
    model's modules up to the one that failed, in the order in which they were made.
    """
    modules: list[nn.Module] = []
    in_step = False
    for frame in _frames(trace):
        source = str(frame.f_globals.get("__name__", ""))
        if source in _BACKWARD:
            return 1.0
        if source.startswith(_OPTIMIZER):  # a closure that it calls may be in a forward yet
            in_step, modules = True, []
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            modules.append(holder)
    if not modules:
        return 1.0 if in_step else None
    leaves = [module for module in modules[0].modules() if not any(True for _ in module.children())]
    place = next((at for at, leaf in enumerate(leaves) if leaf is _first_leaf(modules[-1])), None)
    if place is None or len(leaves) < 2 or modules[-1] is modules[0]:
        return None
    return FORWARD_PART * (place + 1) / len(leaves)  # the one that failed may just have been too much


def _first_leaf(module: nn.Module) -> nn.Module:
    return next((part for part in module.modules() if not any(True for _ in part.children())), module)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
