"""A Lightning module's own steps as workloads: what a trainer runs on one batch, without its loops.

A training step is `training_step`, `zero_grad`, backward and the optimizer's step, in the trainer's order and through
its strategy, so that precision, clipping and the module's hooks are those of the run. What a run would report is left
out (`quiet`): no callback is called, nothing is logged, no loop advances. Works on the objects it is given: imports no
Lightning.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brim.errors import RequestError
from brim.integrations.lightning_loaders import MadeBatch, StageLoaders
from brim.records import Mode
from brim.workloads.base import Workload, in_mode
from brim.workloads.train_step import materialise_state

__all__ = ["FitWorkload", "StageWorkload", "check_strategy", "quiet", "set_attribute"]

_HOOK_PREFIX = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}


class _Context:
    """The trainer and the data; without a `__dict__`, so that a copy of a workload's state does not enter them."""

    __slots__ = ("loaders", "trainer")

    def __init__(self, trainer: Any, loaders: StageLoaders) -> None:
        self.trainer = trainer
        self.loaders = loaders


class StageWorkload(Workload):
    """One `validation_step`, `test_step` or `predict_step` on a batch of each of the stage's loaders."""

    def __init__(self, trainer: Any, module: Any, stage: str, loaders: StageLoaders, *, key: str | None = None) -> None:
        self._context = _Context(trainer, loaders)
        self.module = module
        self.stage = stage
        self.device = trainer.strategy.root_device
        self.most: int | None = loaders.smallest_length  # the largest useful size
        self._key = key
        self._started = False  # whether the hooks that precede the first batch have run
        self._arguments = step_arguments(module, f"{_HOOK_PREFIX[stage].replace('train', 'training')}_step")

    @property
    def trainer(self) -> Any:
        """The trainer that the step runs under."""
        return self._context.trainer

    @property
    def loaders(self) -> StageLoaders:
        """Where batches come from."""
        return self._context.loaders

    @property
    def prefix(self) -> str:
        """The stage in names of hooks: `train`, `validation`."""
        return _HOOK_PREFIX[self.stage]

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # known once samples were looked at
        """Which samples batches are made of."""
        return tuple(dict.fromkeys(self.loaders.notes))

    def make_batch(self, size: int) -> Any:
        """Worst-case batches on the device, as the stage's loaders give them: of each in turn, or of all at once."""
        return [self._moved(made) for made in self.loaders.batches(size)]

    def batch_length(self, batch: Any) -> int:
        """Samples that each loader gave."""
        return min(int(made.length) for made in batch)

    def step(self, batch: Any) -> Any:
        """The module's step on the batch of each loader, with the hooks around it."""
        self._start("start", "epoch_start")
        run = getattr(self.trainer.strategy, f"{self.prefix}_step")
        several = len(batch) > 1
        for made in batch:
            where = (0, made.loader) if several else (0,)
            self._hook("batch_start", made.batch, *where)
            outputs = run(made.batch, *where[: self._arguments - 1])
            self._hook("batch_end", outputs, made.batch, *where)

    def modules(self) -> Sequence[nn.Module]:
        """The module as the strategy runs it, wrapped or not."""
        model = self.trainer.strategy.model
        return (model if isinstance(model, nn.Module) else self.module,)

    def stateful(self) -> Sequence[Any]:
        """What the module holds that keeps a state as torch's classes do, such as averaged weights.

        Not what knows the trainer, as data modules do: all of the run hangs on it.
        """
        held = vars(self.module).values()
        return tuple(one for one in held if hasattr(one, "load_state_dict") and not hasattr(one, "trainer"))

    def functions(self) -> Sequence[Any]:
        """The module's step, so that a compiled one is recognised."""
        return (getattr(self.module, f"{self.prefix.replace('train', 'training')}_step"),)

    def largest_size(self) -> int | None:
        """No more than the data set has for each rank."""
        return self.most

    def identity(self) -> Mapping[str, Any] | None:
        """The user's key and the stage, if a key was given."""
        return None if self._key is None else {"key": self._key, "lightning": self.stage}

    def _moved(self, made: MadeBatch) -> MadeBatch:
        """The batch on the device, past the precision plugin and the hooks that a loop calls."""
        trainer, data = self.trainer, self.trainer.datamodule
        owner = data if data is not None and _overrides(data, "on_before_batch_transfer", self.module) else self.module
        batch = trainer.strategy.precision_plugin.convert_input(made.batch)
        batch = owner.on_before_batch_transfer(batch, made.loader)
        return MadeBatch(trainer.strategy.batch_to_device(batch, dataloader_idx=made.loader), made.length, made.loader)

    def _start(self, *hooks: str) -> None:
        if not self._started:
            self._started = True
            for name in hooks:
                self._hook(name)

    def _hook(self, name: str, *arguments: Any) -> None:
        hook = getattr(self.module, f"on_{self.prefix}_{name}", None)
        if callable(hook):
            hook(*arguments)


class FitWorkload(StageWorkload):
    """A training step on a batch; with `validation`, a batch of each validation loader once for each size as well."""

    mode: Mode = "train"

    def __init__(
        self, trainer: Any, module: Any, loaders: StageLoaders, *, validation: StageWorkload | None, key: str | None
    ) -> None:
        super().__init__(trainer, module, "fit", loaders, key=key)
        self.validation = validation
        self._validated: list[Any] = []  # batches of this size that are still to be validated

    def make_batch(self, size: int) -> Any:
        """Worst-case batches of the training loaders; those of the validation are kept for the first step."""
        self._validated = [] if self.validation is None else [self.validation.make_batch(size)]
        return super().make_batch(size)

    def step(self, batch: Any) -> Any:
        """Forward, backward and the optimizer's step; validation after the first, beside the optimizer's state."""
        if not self._started:
            self.module.on_fit_start()
        self._start("start", "epoch_start")
        data = batch[0].batch
        self._hook("batch_start", data, 0)
        outputs = self._automatic(data) if self.module.automatic_optimization else self._manual(data)
        self._hook("batch_end", outputs, data, 0)
        if self._validated and self.validation is not None:
            with in_mode(self.module, training=False), torch.no_grad():
                self.validation.step(self._validated.pop())

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The trainer's optimizers."""
        return tuple(self.trainer.optimizers)

    def stateful(self) -> Sequence[Any]:
        """Learning-rate schedulers, the gradient scaler where there is one, and what the module holds."""
        scaler = getattr(self.trainer.strategy.precision_plugin, "scaler", None)
        schedulers = [config.scheduler for config in self.trainer.strategy.lr_scheduler_configs]
        return (*schedulers, *(() if scaler is None else (scaler,)), *super().stateful())

    def release(self) -> None:
        """Let go of a validation batch that no step has taken."""
        self._validated = []

    def _automatic(self, batch: Any) -> dict[str, Any]:
        """As the trainer's loop: the gradients of the step before are there until the forward is done."""
        trainer, module = self.trainer, self.module
        optimizers = module.optimizers()
        optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
        outputs: list[Any] = []

        def closure() -> torch.Tensor | None:
            output = self._training_step(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            outputs[:] = [output]
            module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            if loss is None:
                return None
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
            return loss.detach()  # type: ignore[no-any-return]

        module.optimizer_step(trainer.current_epoch, 0, optimizer, closure)
        if getattr(trainer.strategy.precision_plugin, "scaler", None) is not None:
            materialise_state(trainer.optimizers[0])
        last = outputs[0] if outputs else None
        if isinstance(last, torch.Tensor):
            return {"loss": last.detach()}
        return dict(last) if isinstance(last, Mapping) else {}

    def _manual(self, batch: Any) -> Any:
        """The module's own optimization, in its `training_step`."""
        output = self._training_step(batch)
        return {"loss": output.detach()} if isinstance(output, torch.Tensor) else output

    def _training_step(self, batch: Any) -> Any:
        return self.trainer.strategy.training_step(*(batch, 0)[: self._arguments])


def step_arguments(module: Any, name: str) -> int:
    """How many of batch, batch index and loader index a step takes."""
    step = getattr(module, name)
    parameters = list(inspect.signature(step).parameters.values())
    if parameters and parameters[0].name == "dataloader_iter":
        raise RequestError(
            f"{name}(dataloader_iter) fetches its batches itself, so that brim cannot try a size; "
            f"write {name}(batch, batch_idx), or leave the stage out of stages="
        )
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def check_strategy(trainer: Any, module: Any) -> None:
    """Refuse strategies under which one rank cannot run a step alone."""
    model = trainer.strategy.model
    if model is not module and not isinstance(model, DistributedDataParallel) and model is not None:
        raise RequestError(
            f"the strategy {type(trainer.strategy).__name__} runs the module as {type(model).__name__}, which one rank "
            "cannot run alone, so that ranks cannot try sizes; brim works with one device and with ddp: leave the "
            "callback out and set the batch size yourself"
        )


@contextlib.contextmanager
def quiet(
    trainer: Any, module: Any, silent_logger: Callable[[], Any], silent_profiler: Callable[[], Any]
) -> Iterator[None]:
    """While inside, no callback is called, nothing is logged or profiled, and `self.all_gather` stays on this rank.

    A gathered tensor is as large as it would be; its values are this rank's own.
    """
    callbacks, loggers, stopping = trainer.callbacks, trainer.loggers, trainer.should_stop
    profiler = trainer.profiler
    ranks = trainer.world_size
    silenced: dict[str, Any] = {"log": _ignore, "log_dict": _ignore, "print": _ignore}
    if ranks > 1:
        silenced["all_gather"] = lambda data, *_, **__: _repeated(data, ranks)
    with contextlib.ExitStack() as stack:
        for name, function in silenced.items():
            set_attribute(stack, module, name, function)
        trainer.callbacks = []
        trainer.loggers = [silent_logger() for _ in loggers]
        trainer.profiler = silent_profiler()
        try:
            yield
        finally:
            trainer.callbacks, trainer.loggers, trainer.should_stop = callbacks, loggers, stopping
            trainer.profiler = profiler


def set_attribute(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of the instance, past a module's own `__setattr__`, until the stack is closed."""
    attributes = vars(owner)
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = value


def _ignore(*_: Any, **__: Any) -> None:
    return


def _repeated(data: Any, ranks: int) -> Any:
    if isinstance(data, torch.Tensor):
        return torch.stack([data] * ranks)
    if isinstance(data, Mapping):
        return {name: _repeated(part, ranks) for name, part in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_repeated(part, ranks) for part in data)
    return torch.tensor([data] * ranks)


def _overrides(data: Any, name: str, module: Any) -> bool:
    """Whether a data module defines a hook itself; by default it is inherited from the class that modules share."""
    own, shared = getattr(type(data), name, None), [getattr(kind, name, None) for kind in type(module).__mro__]
    return own is not None and own not in shared
