"""`brim.accumulate`: the windows of somebody's own training loop, in micro-batches that fit.

    for loss in brim.accumulate(loss_of, train_set, model=model, effective_batch_size=256, optimizer=optimizer):
        optimizer.step()
        optimizer.zero_grad()

brim calls the loss function on micro-batches and runs their backward, inside its own code: an out-of-memory error is
caught there, the window rewound and run again in smaller micro-batches (`micro_batches.py`). The optimizer is the
caller's. Gradients of a model in `DistributedDataParallel` are summed here, after all ranks have finished the window:
its own sum happens inside a backward, where a rank that runs out of memory would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from brim.errors import LostError, RequestError
from brim.memory.devices import existing_device, memory_of, resolve_limit
from brim.memory.failures import classify, memory_remedies
from brim.memory.transfer import on_device
from brim.models.placement import Precision
from brim.ranks.unwrap import data_parallel, refuse_sharded
from brim.ranks.world import World, current_world
from brim.records import Plan
from brim.running.notes import log_note
from brim.settings.setting_checks import whole
from brim.settings.shared import check_functions, checked, checked_batch_size
from brim.settings.sizes import parse_bytes
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter, WindowDone, WindowWork
from brim.training.objective import Batch, LossSum, Objective
from brim.training.optimizers import GradientSums, absent_bytes, state_bytes_when_made, tensors_of_state
from brim.training.own_windows import CollatedWindow, EpochRequest, LoopWindow, WindowSource, make_windows
from brim.training.window_ranks import WindowRanks

__all__ = ["Accumulation", "accumulate"]

ACCUMULATION_SCHEMA = "brim.accumulation/1"

LossFunction = Callable[[Any], "torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """What `accumulate` was asked for, checked."""

    batch_size: int | None
    plan: Plan | None
    cost: Callable[[Any], int] | None
    collate: Callable[[list[Any]], Any]
    limit_bytes: int | None  # as named
    scaler: torch.amp.GradScaler | None
    optimizer: torch.optim.Optimizer | None
    note: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _OwnBatch(Batch):
    """A micro-batch as the loss function gets it; its dtypes are the caller's."""

    samples: int = 0

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> _OwnBatch:
        """Every tensor on the device."""
        del dtype
        return _OwnBatch(on_device(self.inputs, device), None, self.samples)


class _OwnLoss(Objective):
    """Somebody's loss function as an objective: a mean over samples, or a sum with its weight."""

    task = "own"
    metrics = ("loss",)
    counts_samples = False

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        del model  # the function has it already
        assert isinstance(batch, _OwnBatch)
        returned = self._function(batch.inputs)
        if isinstance(returned, tuple) and len(returned) == 2:
            total, weight = returned
            return LossSum(_one_element(total), _checked_weight(weight))
        return LossSum(_one_element(returned) * batch.samples, float(batch.samples))

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        raise NotImplementedError("a loss function of a training loop is not validated with")


def _one_element(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:60]
        raise RequestError(
            f"the loss function returned {shown}: return the mean loss of the micro-batch, a tensor with one element, "
            "or a pair of the sum of its losses and how many they are (tokens)"
        )
    if not loss.requires_grad:
        raise RequestError(
            "the loss has no gradient: return it as it was computed, without .item() or .detach(), and not under "
            "torch.no_grad()"
        )
    return loss.reshape(())


def _checked_weight(weight: Any) -> torch.Tensor | float:
    """How many losses a sum has; most often something else that the function returned beside its loss."""
    if isinstance(weight, torch.Tensor):
        right, shown = weight.numel() == 1 and not weight.requires_grad, f"a tensor of shape {list(weight.shape)}"
        shown += " with a gradient" if weight.requires_grad else ""
    else:
        right = isinstance(weight, Real) and not isinstance(weight, bool) and float(weight) >= 0
        shown = f"{weight!r:.60}"
    if not right:
        raise RequestError(
            f"the loss function returned a pair whose second entry is {shown}: that must be the number of losses "
            "(tokens) that the first is the sum of; return the loss alone, where it is a mean"
        )
    return weight  # type: ignore[no-any-return]


class Accumulation:
    """Windows of a training loop, each accumulated in micro-batches that fit; made by `brim.accumulate`.

    Iterating gives the mean loss of one window after the other, with its gradients in `.grad`; every iteration is an
    epoch. Called with one batch it does that window alone. Sizes found are kept from window to window.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> windows = brim.accumulate(lambda batch: model(batch).square().mean(), model=model)
        >>> loss = windows(torch.ones(32, 4))
        >>> model.weight.grad.shape, windows.oom_events
        (torch.Size([1, 4]), 0)
    """

    def __init__(
        self,
        function: LossFunction,
        modules: Sequence[nn.Module],
        source: WindowSource | None,
        asked: _Asked,
        device: Any,
    ) -> None:
        self._model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._asked = asked
        self._source = source
        self._objective = _OwnLoss(function)
        self._memory = memory_of(device)
        self._metered = asked.limit_bytes is not None or not self._memory.meter_slows
        limit = resolve_limit(self._memory, asked_bytes=asked.limit_bytes, margin=None)
        self._limit_bytes = limit.usable_bytes
        self._micro: MicroBatches | None = None
        self._restored: Mapping[str, Any] | None = None
        self._state_bytes: int | None = None
        self._ranks = WindowRanks(self._model, self._memory.device)
        self._divisor = 0  # of all ranks' sums
        self.notes: list[str] = []

    @property
    def micro_batch_size(self) -> int | None:
        """The largest micro-batch that the next window will have, in samples or in cost; None before the first."""
        return None if self._micro is None else self._micro.sizes.next_size()

    @property
    def micro_batches(self) -> Mapping[int, int]:
        """How many micro-batches of each length finished windows were made of."""
        return {} if self._micro is None else dict(self._micro.sizes.lengths)

    @property
    def oom_events(self) -> int:
        """How often a micro-batch did not fit, and its window was run again."""
        return 0 if self._micro is None else self._micro.sizes.oom_events

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most memory that a micro-batch used; None where it was not measured."""
        return None if self._micro is None else self._micro.meter.peak.peak_reserved_bytes or None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The mean loss of each window of an epoch, as a tensor that nothing has waited for."""
        if self._source is None:
            raise RequestError("there is no data to iterate over: give samples=, or call this with one batch at a time")
        for window in self._source.windows():
            loss = self._run(window)
            self._source.advance()  # not before: a checkpoint after Ctrl-C in its midst begins with this window
            yield loss

    def __len__(self) -> int:
        """Windows of an epoch."""
        if self._source is None:
            raise RequestError("there is no data to count: give samples=")
        return len(self._source)

    def __call__(self, batch: Any) -> torch.Tensor:
        """The mean loss of one window: a collated batch, whose samples are cut into micro-batches that fit."""
        return self._run(CollatedWindow(batch, self._asked.cost))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep: the sizes, and the window at which the epoch stands. JSON values."""
        sizes = self._restored if self._micro is None else self._micro.sizes.to_json()
        return {
            "schema": ACCUMULATION_SCHEMA,
            "sizes": sizes,
            "source": None if self._source is None else self._source.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called: at the sizes found, and with the window that comes next."""
        found = state.get("schema") if isinstance(state, Mapping) else type(state).__name__
        if found != ACCUMULATION_SCHEMA:
            raise RequestError(
                f"the state to load is of {found!r}, not {ACCUMULATION_SCHEMA!r}: give what state_dict() of "
                "brim.accumulate returned"
            )
        if self._source is not None and state["source"] is not None:
            self._source.load(state["source"])
        self._restored = state["sizes"]
        if self._micro is not None and self._restored is not None:
            self._micro.sizes.restore(self._restored)

    def _run(self, window: LoopWindow) -> torch.Tensor:
        """One window on this rank, then on all: an error of one is an error of all."""
        micro = self._micro_for(window)
        held = [(parameter, parameter.grad) for parameter in micro.gradients.trainable()]
        sums = GradientSums(micro, self._ranks.group)
        outcome: WindowDone | None = None
        failed: Exception | None = None
        samples = self._divisor or max(len(window), 1)
        micro.begun = False
        try:
            try:
                with self._limited(), self._ranks.alone():
                    outcome = micro.run(self._work(window, samples))
            except LostError as error:
                failed = _lost(error)
            except Exception as error:
                failed = error
            absent = self._ranks.vote(sums, micro, failed)
            assert outcome is not None
            figures = sums.make(outcome, samples, absent=absent)
        except BaseException as error:  # Ctrl-C as well: what a part of the window has added would count in the next
            for parameter, before in held:
                parameter.grad = before
            if micro.begun and not isinstance(error, Exception):  # after which the window may come again
                micro.rewinder.rewind()
            raise
        _add_back(held)
        return (figures[0] / figures[1]).detach()

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        if self._asked.limit_bytes is None:
            return contextlib.nullcontext()
        return self._memory.limited(self._limit_bytes)

    def _work(self, window: LoopWindow, samples: int) -> WindowWork:
        items = sorted(range(len(window)), key=lambda item: -window.cost(item))
        costs = [window.cost(item) for item in items]

        def fetch(part: Sequence[int]) -> Batch:
            return _OwnBatch(window.part(part, self._asked.collate), None, len(part))

        return WindowWork(items=items, costs=costs, samples=samples, fetch=fetch)

    def _micro_for(self, window: LoopWindow) -> MicroBatches:
        """Made for the first window; a longer one later allows longer micro-batches."""
        if self._micro is not None:
            self._micro.sizes.allow(len(window))
            return self._micro
        asked = self._asked
        unit: Literal["samples", "tokens"] = "samples" if asked.cost is None else "tokens"
        request = MicroBatchRequest(
            ceiling=asked.batch_size,
            known=asked.plan.size if asked.plan is not None and asked.plan.unit == unit else None,
            smallest=_smallest(self._model),
            unit=unit,
            uniform=asked.cost is None,
            limit_bytes=self._limit_bytes if self._metered else None,
            largest=max(len(window), 1),
        )
        gradients = GradientPass(
            model=self._model,
            objective=self._objective,
            device=self._memory.device,
            precision=Precision(weights=None),
            scaler=asked.scaler,
            further=self._of_optimizer,
        )
        meter = PeakMeter(self._memory, resident=self._resident, absent_bytes=self._absent_bytes, enabled=self._metered)
        self._micro = MicroBatches(
            gradients,
            MicroBatchSizer(request),
            meter,
            remedies=lambda length: memory_remedies(("gradient checkpointing",), batch_size=length),
            note=self._note,
        )
        if self._restored is not None:
            self._micro.sizes.restore(self._restored)
        self._divisor = self._ranks.begin(self._micro.gradients.trainable(), len(window))
        return self._micro

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self._asked.note(line)

    def _absent_bytes(self) -> int:
        """Of gradients, and of the optimizer's state before its first step, which need room as well."""
        if not self._metered:
            return 0
        optimizer = self._asked.optimizer
        if optimizer is None:
            absent = (one for one in self._model.parameters() if one.requires_grad and one.grad is None)
            return sum(one.numel() * one.element_size() for one in absent)
        if self._state_bytes is None:
            self._state_bytes = state_bytes_when_made(optimizer)
        return absent_bytes(optimizer, self._state_bytes)

    def _of_optimizer(self) -> list[torch.Tensor]:
        """What it trains; no module may have it, such as a weight of the loss."""
        groups = [] if self._asked.optimizer is None else self._asked.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _resident(self) -> list[torch.Tensor]:
        optimizer, model = self._asked.optimizer, self._model
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        state = [] if optimizer is None else list(tensors_of_state(optimizer))
        return [*model.parameters(), *model.buffers(), *gradients, *state]


def _add_back(held: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Gradients that were there before the window count as well, in the tensors that they were in."""
    with torch.no_grad():
        for parameter, before in held:
            if before is None:
                continue
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before


def _lost(error: LostError) -> LostError:
    """The device is gone; where to continue is the caller's to know."""
    if error.__cause__ is None:
        return error
    lost = LostError(
        f"{classify(error.__cause__).reason}; the device cannot be used again by this process: start the program again "
        "from its last checkpoint"
    )
    lost.__cause__ = error.__cause__
    return lost


def _smallest(model: nn.Module) -> int:
    """Batch normalisation that trains may see one value per channel in a micro-batch of one."""
    normalised = (one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm))
    return 2 if any(one.training for one in normalised) else 1


def accumulate(
    loss: LossFunction,
    samples: Any = None,
    *,
    model: nn.Module | Sequence[nn.Module],
    effective_batch_size: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    sizer: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    cost: Callable[[Any], int] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    note: Callable[[str], None] | None = None,
) -> Accumulation:
    """Gradients of an effective batch, accumulated over micro-batches that fit, for a training loop of your own.

    brim cuts each window (the samples of one optimizer step) into micro-batches, calls `loss` and the backward of each
    with the right weight, and gives the mean loss of the window; the gradients are then those of the single big batch,
    to rounding. Micro-batches grow while that is faster. After an out-of-memory error gradients, buffers and random
    generators are put back as they were before the window, and it runs again in smaller ones. The optimizer's step
    stays with you. Batch normalisation sees micro-batches, as under any accumulation.

    Under torchrun with a model in `DistributedDataParallel`, each rank finds its own sizes and brim sums the gradients
    once all ranks have finished the window; an error of one rank is raised on all.

    Args:
        loss: Takes a micro-batch and returns its mean loss, or a pair of the sum of its losses and how many they are
            (tokens): then gradients are divided by the number in the whole window.
        samples: A data set (with `effective_batch_size`), or a `DataLoader` whose batches are the windows; left out,
            the result is called with one batch at a time.
        model: The module or modules that the loss is computed with; also a loss that has weights of its own.
        effective_batch_size: Samples of a window, over all ranks, which each take their share of the data set.
        batch_size: `auto`, or the largest micro-batch in samples.
        sizer: A plan of `brim.find`, whose size the micro-batches start with.
        optimizer: Yours, whose state takes memory from its first step on: room is left for it.
        scaler: For float16: losses are scaled by it before the backward.
        collate_fn: Puts the samples of a micro-batch together; torch's by default. Only for a data set.
        cost: The cost of a sample (tokens), or, of a `DataLoader`'s batch, of each of its samples: micro-batches are
            then capped in padded cost, the costliest samples first.
        shuffle: Another order in every epoch, the same on all ranks. Only for a data set, like the next three.
        seed: Of that order.
        drop_last: Leave out the last window of an epoch if it is shorter.
        num_workers: Processes that load samples.
        device: Where micro-batches are moved and memory is watched; by default where the model is.
        memory_limit: Use at most this much, such as `"24GiB"`. On the CPU this bounds eager operations only.
        note: Is given a line for every window that ran again; by default the logger `brim` is.

    Returns:
        The windows: iterate over them for their losses, epoch by epoch, or call it with a batch of your own.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Not even the smallest micro-batch fits.
        LostError: The device or a rank was lost.

    Examples:
        >>> model, rows = torch.nn.Linear(4, 1), torch.randn(100, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> windows = brim.accumulate(lambda batch: model(batch).square().mean(), rows, model=model,
        ...                           effective_batch_size=64, optimizer=optimizer)
        >>> for loss in windows:
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> len(windows), sum(length * count for length, count in windows.micro_batches.items())
        (2, 100)
    """
    modules = [model] if isinstance(model, nn.Module) else list(model or ())
    _check(loss, modules, sizer, optimizer)
    check_functions(collate_fn=collate_fn, cost=cost, note=note)
    if scaler is not None and not hasattr(scaler, "scale"):
        raise RequestError(f"scaler={scaler!r:.60}: give a torch.amp.GradScaler, or leave it out")
    num_workers = checked("num_workers", num_workers, whole(0)) or 0
    asked = _Asked(
        batch_size=checked_batch_size(batch_size),
        plan=sizer,
        cost=cost,
        collate=collate_fn or default_collate,
        limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        scaler=scaler,
        optimizer=optimizer,
        note=note or log_note,
    )
    world = current_world()
    if world.size > 1:
        refuse_sharded(modules, instead="train it with brim train (training.fsdp), or accumulate without brim")
    if not data_parallel(modules):
        world = World(0, 1, 0)
    epochs = None
    if effective_batch_size is not None:
        epochs = EpochRequest(
            effective_batch=effective_batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
            num_workers=num_workers,
        )  # fmt: skip
    else:
        _refuse_for_batches(
            collate_fn=collate_fn, shuffle=shuffle, seed=seed, drop_last=drop_last, num_workers=num_workers
        )
    source = make_windows(samples, epochs, cost, world)
    return Accumulation(loss, modules, source, asked, _device(device, modules))


def _check(loss: Any, modules: Sequence[Any], sizer: Any, optimizer: Any) -> None:
    if not callable(loss):
        raise RequestError(f"loss={loss!r}: give a function that takes a micro-batch and returns its loss")
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise RequestError("model=: give the module or modules that the loss is computed with")
    if any(is_lazy(one) for module in modules for one in (*module.parameters(), *module.buffers())):
        raise RequestError("model=: it has layers without shapes yet (Lazy…); call it once with a batch before")
    if not any(one.requires_grad for module in modules for one in module.parameters()):
        raise RequestError("model=: none of its weights can be trained; set requires_grad of some")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(f"optimizer=: a {type(optimizer).__name__}; give a torch optimizer, or leave it out")
    if sizer is not None and not isinstance(sizer, Plan):
        raise RequestError(f"sizer={sizer!r:.60}: give a plan of brim.find, or leave it out")


def _refuse_for_batches(**given: Any) -> None:
    """What only a data set's windows are made by: batches that are there already would ignore it."""
    for name, value in given.items():
        if value:
            raise RequestError(
                f"{name}={value!r:.60}: it is for a data set with effective_batch_size=; the batches of a DataLoader "
                "are taken as they come, so give it to the DataLoader"
            )


def _device(device: Any, modules: Sequence[nn.Module]) -> torch.device:
    if device is not None:
        return existing_device(device, argument="device=")
    return next(parameter.device for module in modules for parameter in module.parameters())
