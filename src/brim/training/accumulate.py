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
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from brim.errors import RequestError
from brim.memory.devices import existing_device, memory_of, resolve_limit
from brim.memory.failures import memory_remedies
from brim.memory.transfer import moved, replaced
from brim.models.placement import Precision
from brim.ranks.agreement import Agreement, Vote
from brim.ranks.gradients import RankGroup
from brim.ranks.unwrap import data_parallel, without_collectives
from brim.ranks.world import World, current_world
from brim.records import Plan
from brim.running.notes import log_note
from brim.settings.sizes import parse_bytes
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.training.batch_parts import part_of, samples_in
from brim.training.loop import Window, epoch_order
from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter, WindowDone, WindowWork
from brim.training.objective import Batch, LossSum, Objective
from brim.training.optimizers import GradientSums, absent_bytes, state_bytes_when_made, tensors_of_state

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
        inputs = replaced(self.inputs, torch.Tensor, lambda tensor: moved(tensor, device))
        return _OwnBatch(inputs, None, self.samples)


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
            return LossSum(_one_element(total), weight)
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
        self, function: LossFunction, modules: Sequence[nn.Module], source: _Source | None, asked: _Asked, device: Any
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
        self._ranks = _Ranks(self._model, self._memory.device)
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
            yield self._run(window)

    def __len__(self) -> int:
        """Windows of an epoch."""
        if self._source is None:
            raise RequestError("there is no data to count: give samples=")
        return len(self._source)

    def __call__(self, batch: Any) -> torch.Tensor:
        """The mean loss of one window: a collated batch, whose samples are cut into micro-batches that fit."""
        return self._run(_CollatedWindow(batch, self._asked.cost))

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
        if state.get("schema") != ACCUMULATION_SCHEMA:
            raise RequestError(
                f"the state to load is of {state.get('schema')!r}, not {ACCUMULATION_SCHEMA!r}: give what state_dict() "
                "of brim.accumulate returned"
            )
        self._restored = state["sizes"]
        if self._micro is not None and self._restored is not None:
            self._micro.sizes.restore(self._restored)
        if self._source is not None and state["source"] is not None:
            self._source.load(state["source"])

    def _run(self, window: _Window) -> torch.Tensor:
        """One window on this rank, then on all: an error of one is an error of all."""
        micro = self._micro_for(window)
        held = [(parameter, parameter.grad) for parameter in micro.gradients.trainable()]
        sums = GradientSums(micro, self._ranks.group)
        outcome: WindowDone | None = None
        failed: Exception | None = None
        samples = self._divisor or max(len(window), 1)
        try:
            with self._limited(), self._ranks.alone():
                outcome = micro.run(self._work(window, samples))
        except Exception as error:
            failed = error
        try:
            absent = self._ranks.vote(sums, micro, failed)
            assert outcome is not None
            figures = sums.make(outcome, samples, absent=absent)
        except BaseException:
            for parameter, before in held:
                parameter.grad = before
            raise
        _add_back(held)
        return (figures[0] / figures[1]).detach()

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        if self._asked.limit_bytes is None:
            return contextlib.nullcontext()
        return self._memory.limited(self._limit_bytes)

    def _work(self, window: _Window, samples: int) -> WindowWork:
        items = sorted(range(len(window)), key=lambda item: -window.cost(item))
        costs = [window.cost(item) for item in items]

        def fetch(part: Sequence[int]) -> Batch:
            return _OwnBatch(window.part(part, self._asked.collate), None, len(part))

        return WindowWork(items=items, costs=costs, samples=samples, fetch=fetch)

    def _micro_for(self, window: _Window) -> MicroBatches:
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
        )
        meter = PeakMeter(
            self._memory, resident=self._resident, absent_bytes=self._absent_bytes, enabled=self._metered
        )
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

    def _resident(self) -> list[torch.Tensor]:
        optimizer, model = self._asked.optimizer, self._model
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        state = [] if optimizer is None else list(tensors_of_state(optimizer))
        return [*model.parameters(), *model.buffers(), *gradients, *state]


def _add_back(held: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """Gradients that were there before the window count as well, in the tensors that they were in."""
    with torch.no_grad():
        for parameter, before in held:
            if before is None:
                continue
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before


def _smallest(model: nn.Module) -> int:
    """Batch normalisation that trains may see one value per channel in a micro-batch of one."""
    normalised = (one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm))
    return 2 if any(one.training for one in normalised) else 1


# ------------------------------------------------------------------------------------------------ ranks


class _Ranks:
    """The other ranks of a model in `DistributedDataParallel`; alone, and for a model of this rank's own, a no-op."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._wrapped = data_parallel([model])
        world = current_world()
        self.world = world if self._wrapped else World(0, 1, 0)
        self._device = device
        self._agreement: Agreement | None = None
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        """The ranks as one for arithmetic."""
        if self._group is None:
            self._group = RankGroup(self._device)
            self._group.world = self.world
        return self._group

    def begin(self, parameters: Sequence[nn.Parameter], samples: int) -> int:
        """Connect the ranks; what the sums of every window are divided by on all of them, 0 alone: by its samples."""
        if self.world.size == 1:
            return 0
        stack = contextlib.ExitStack()
        self._agreement = stack.enter_context(Agreement(purpose="a window of brim.accumulate"))
        weakref.finalize(self, stack.close)
        with self._agreement.step(int) as step:
            self.group.prepare(parameters)
            step.value = samples
        return max(sum(step.values), 1)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """While inside, forwards and backwards involve no other rank."""
        return contextlib.nullcontext() if self.world.size == 1 else without_collectives([self._model])

    def vote(self, sums: GradientSums, micro: MicroBatches, failed: Exception | None) -> set[int]:
        """All continue, or all stop with the same error; which parameters have a gradient on no rank."""
        if self._agreement is None:
            if failed is not None:
                raise failed
            return set()
        moving = micro.rewinder.moving()
        vote = Vote(error=failed) if failed is not None else Vote(value={"absent": sums.absent(), "moving": moving})
        votes: list[Any] = self._agreement.gather(vote)
        if any(one.broadcast_buffers for one in self._wrapped):  # rank 0's, as DistributedDataParallel has it
            places = sorted({place for one in votes for place in one["moving"]})
            self.group.copy_from_first(micro.rewinder.buffers_at(places))
        return set.intersection(*(set(one["absent"]) for one in votes))


# ------------------------------------------------------------------------------------------------ windows


class _Window(Sized):
    """The samples of one optimizer step on this rank."""

    def cost(self, item: int) -> int:
        """Of one of them."""
        raise NotImplementedError

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        """Some of them as a micro-batch."""
        raise NotImplementedError


class _CollatedWindow(_Window):
    """A batch as a `DataLoader` made it."""

    def __init__(self, batch: Any, cost: Callable[[Any], int] | None) -> None:
        self._batch = batch
        self._length = samples_in(batch)
        self._cost = 1 if cost is None else _checked_cost(cost(batch))

    def __len__(self) -> int:
        return self._length

    def cost(self, item: int) -> int:
        del item  # all are padded to the same length
        return self._cost

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        del collate
        return part_of(self._batch, items[0], items[-1] + 1)


class _SampleWindow(_Window):
    """Samples that are put together micro-batch by micro-batch."""

    def __init__(self, samples: Sequence[Any], cost: Callable[[Any], int] | None) -> None:
        self._samples = samples
        self._costs = [1 if cost is None else _checked_cost(cost(sample)) for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def cost(self, item: int) -> int:
        return self._costs[item]

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        return collate([self._samples[item] for item in items])


def _checked_cost(cost: Any) -> int:
    if not isinstance(cost, int) or isinstance(cost, bool) or cost < 0:
        raise RequestError(f"cost= returned {cost!r:.60}: it must be a whole number from 0")
    return max(cost, 1)


class _Source(Sized):
    """Where windows come from."""

    def windows(self) -> Iterator[_Window]:
        """Those of one epoch."""
        raise NotImplementedError

    def state(self) -> Any:
        """Where it stands, as JSON values."""
        return None

    def load(self, state: Any) -> None:
        """Continue there."""


class _Batches(_Source):
    """Windows that the caller's own loader makes."""

    def __init__(self, batches: Iterable[Any], cost: Callable[[Any], int] | None) -> None:
        self._batches = batches
        self._cost = cost

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # an iterable without a length says so itself

    def windows(self) -> Iterator[_Window]:
        for batch in self._batches:
            yield _CollatedWindow(batch, self._cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EpochRequest:
    """How a data set is divided into windows."""

    effective_batch: int
    shuffle: bool
    seed: int
    drop_last: bool
    num_workers: int


class _DataSet(_Source):
    """Windows of a data set: each rank has its share of every one."""

    def __init__(self, data: Any, asked: _EpochRequest, cost: Callable[[Any], int] | None, world: World) -> None:
        self._data = data
        self._asked = asked
        self._cost = cost
        self._world = world
        self._epoch = 0
        self._done = 0  # windows of this epoch

    def __len__(self) -> int:
        count = len(self._data) / self._asked.effective_batch
        return math.floor(count) if self._asked.drop_last else math.ceil(count)

    def windows(self) -> Iterator[_Window]:
        shares = self._shares()[self._done :]
        loader: Any = DataLoader(
            self._data,
            batch_sampler=shares,
            num_workers=self._asked.num_workers,
            collate_fn=list,  # samples as they are: micro-batches are put together later
            generator=torch.Generator().manual_seed(self._asked.seed + self._epoch),  # a draw from the run's own moves it
        )
        for samples in loader:
            self._done += 1
            yield _SampleWindow(samples, self._cost)
        self._epoch, self._done = self._epoch + 1, 0

    def state(self) -> Any:
        return {"epoch": self._epoch, "windows": self._done}

    def load(self, state: Any) -> None:
        self._epoch, self._done = int(state["epoch"]), int(state["windows"])

    def _shares(self) -> list[list[int]]:
        count, asked = len(self._data), self._asked
        order = epoch_order(count, seed=asked.seed, epoch=self._epoch) if asked.shuffle else range(count)
        starts = range(0, len(self) * asked.effective_batch, asked.effective_batch)
        windows = [Window(start=start, stop=min(start + asked.effective_batch, count)) for start in starts]
        return [window.share(order, rank=self._world.rank, ranks=self._world.size) for window in windows]


# ------------------------------------------------------------------------------------------------ the call


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
        model: The module or modules that the loss is computed with.
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
    modules = [model] if isinstance(model, nn.Module) else list(model)
    _check(loss, modules, batch_size, sizer)
    asked = _Asked(
        batch_size=None if batch_size == "auto" else batch_size,
        plan=sizer,
        cost=cost,
        collate=collate_fn or default_collate,
        limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        scaler=scaler,
        optimizer=optimizer,
        note=note or log_note,
    )
    world = current_world() if data_parallel(modules) else World(0, 1, 0)
    epochs = None
    if effective_batch_size is not None:
        epochs = _EpochRequest(
            effective_batch=effective_batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
            num_workers=num_workers,
        )  # fmt: skip
    source = _source(samples, epochs, cost, world)
    return Accumulation(loss, modules, source, asked, _device(device, modules))


def _source(
    samples: Any, epochs: _EpochRequest | None, cost: Callable[[Any], int] | None, world: World
) -> _Source | None:
    if epochs is None:
        if samples is None:
            return None
        if not isinstance(samples, Iterable) or isinstance(samples, torch.Tensor):
            raise RequestError(
                f"samples: a {type(samples).__name__} without effective_batch_size=; give both, or a DataLoader whose "
                "batches are the windows"
            )
        return _Batches(samples, cost)
    if not isinstance(epochs.effective_batch, int) or epochs.effective_batch < 1:
        raise RequestError(f"effective_batch_size={epochs.effective_batch!r}: give a whole number from 1")
    if isinstance(samples, DataLoader):
        raise RequestError(
            "samples is a DataLoader, whose batches are the effective batch already; leave effective_batch_size= out, "
            "or give its data set"
        )
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise RequestError(
            f"samples: a {type(samples).__name__} has no length or no samples by number; give a data set that has both, "
            "or a DataLoader without effective_batch_size="
        )
    return _DataSet(samples, epochs, cost, world)


def _check(loss: Any, modules: Sequence[Any], batch_size: Any, sizer: Any) -> None:
    if not callable(loss):
        raise RequestError(f"loss={loss!r}: give a function that takes a micro-batch and returns its loss")
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise RequestError("model=: give the module or modules that the loss is computed with")
    if not any(one.requires_grad for module in modules for one in module.parameters()):
        raise RequestError("model=: none of its weights can be trained; set requires_grad of some")
    if batch_size != "auto" and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise RequestError(f"batch_size={batch_size!r}: give 'auto' or a whole number from 1")
    if sizer is not None and not isinstance(sizer, Plan):
        raise RequestError(f"sizer={sizer!r:.60}: give a plan of brim.find, or leave it out")


def _device(device: Any, modules: Sequence[nn.Module]) -> torch.device:
    if device is not None:
        return existing_device(device, argument="device=")
    return next(parameter.device for module in modules for parameter in module.parameters())
