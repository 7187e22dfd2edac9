"""Which module of a model a block of memory belongs to, for the table of bytes by module at the peak.

What a forward takes belongs to the module that runs, innermost first; what the backward takes to the module whose
forward made the node of the graph that runs. Nodes are numbered as they are made, so it is enough to note from which
number on which module ran. Gradients and optimizer state belong to the module that has the parameter. What no module
takes has a name in brackets: `(batch)`, `(outside modules)`.

Watches by torch's global hooks, which are there for the time of a trace; no module is changed.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from brim.forecasting.events import OUTSIDE
from brim.forecasting.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    next_node_number,
    node_number,
)

__all__ = ["ModuleWatch"]

_OPTIMIZER = "(optimizer step)"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # by these torch.compile and checkpointing hold a module


class ModuleWatch:
    """Names of modules as they are without wrappers, "" for the model itself; of several models, the class first."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        self._of_parameters: dict[int, str] = {}
        self._prefixes: set[str] = set()
        self._known: list[nn.Module] = []  # held, so that no other module gets the number of one
        self._running: list[str] = []
        self._floor = 0  # how many modules ran when the backward began: those above it recompute a forward
        self._task = -1
        self._numbers: list[int] = []  # of nodes: from each on, the module beside it ran
        self._ran: list[str] = []
        self._thread = threading.get_ident()
        self._last = OUTSIDE
        found = list(roots)
        for root in found:
            self._learn(root, prefix="" if len(found) == 1 else self._prefix(root))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow forwards and optimizer steps while inside."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_optimizer_step),
            register_optimizer_step_post_hook(self._end_optimizer_step),
        )
        try:
            with warnings.catch_warnings():
                # A compiled module calls a hook twice, for itself and for what it wraps: twice the same name.
                warnings.filterwarnings(
                    "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
                )
                yield
        finally:
            for handle in handles:
                handle.remove()

    def owner(self) -> str:
        """To whom a block belongs that is taken now."""
        task = current_graph_task_id()
        self._follow(task)
        if task == -1 or len(self._running) > self._floor:
            return self._running[-1] if self._running else OUTSIDE
        node = current_autograd_node()
        if node is not None:
            self._last = self._owner_of(node)
        return self._last  # between two nodes the engine adds up what the last one has made

    def of_module(self, module: nn.Module) -> str:
        """The name of a module; that of the whole model for one that is not known."""
        return self._names.get(id(module), "")

    def of_parameter(self, parameter: torch.Tensor) -> str:
        """The module that has a parameter: of several, the first."""
        return self._of_parameters.get(id(parameter), OUTSIDE)

    def learn_parameters(self) -> None:
        """Look again at which module has which parameter: others may have taken their places."""
        self._of_parameters = {}
        for root in self._known:
            self._learn_parameters_of(root)

    def _learn_parameters_of(self, root: nn.Module) -> None:
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._of_parameters.setdefault(id(parameter), self.of_module(module))

    def _learn(self, root: nn.Module, prefix: str) -> None:
        self._known.append(root)
        for path, module in root.named_modules():
            names = (prefix, *path.split("."))
            self._names.setdefault(id(module), ".".join(name for name in names if name and name not in _WRAPPERS))
        self._learn_parameters_of(root)

    def _prefix(self, root: nn.Module) -> str:
        kind = type(root).__name__
        name = kind
        while name in self._prefixes:
            name = f"{kind}-{int(name.rpartition('-')[2] if name != kind else 1) + 1}"
        self._prefixes.add(name)
        return name

    def _owner_of(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # of a node that puts a gradient where it belongs
        if variable is not None:
            return self._of_parameters.get(id(variable), self._last)
        place = bisect.bisect_right(self._numbers, node_number(node)) - 1
        return self._ran[place] if place >= 0 else OUTSIDE

    def _follow(self, task: int) -> None:
        if task != self._task:
            self._task, self._floor = task, len(self._running)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._follow(current_graph_task_id())
        if id(module) not in self._names:
            if self._running:  # made on the way: part of what makes it
                self._push(self._running[-1])
                return
            # A loss may be made anew in every step: what has no parameters shares the name of its class.
            has_parameters = next(module.parameters(), None) is not None
            self._learn(module, self._prefix(module) if has_parameters else type(module).__name__)
        self._push(self._names[id(module)])

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            self._note()

    def _begin_optimizer_step(self, *_: Any) -> None:
        self._push(_OPTIMIZER)

    def _end_optimizer_step(self, *_: Any) -> None:
        self._leave()

    def _push(self, name: str) -> None:
        self._running.append(name)
        self._note()

    def _note(self) -> None:
        """From the next node of the graph on, this module runs."""
        if threading.get_ident() != self._thread:  # which numbers its nodes by itself
            return
        number, name = next_node_number(), self._running[-1] if self._running else OUTSIDE
        if self._numbers and self._numbers[-1] == number:
            self._ran[-1] = name
        else:
            self._numbers.append(number)
            self._ran.append(name)
