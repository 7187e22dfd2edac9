"""An out-of-memory error in the middle of a Lightning run, survived: the batch is done again in smaller pieces.

While a run lasts, the steps of one module instance are wrapped, and put back at its end. Until an error nothing is
different. A training batch is then redone from zeroed gradients, so that the optimizer's step sees the gradients of the
whole batch: the effective batch stays. How long pieces are is the sizer's decision, as is when a batch is whole again.

What Lightning leaves no way to redo is raised with the reason: a backward inside an accumulation window, whose earlier
batches are gone; a batch that cannot be cut; a step of manual optimization. With several ranks nothing is wrapped: the
others would wait inside their backward. Imports no Lightning.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from brim.errors import BrimError, RequestError
from brim.integrations.lightning_workload import set_attribute
from brim.memory.devices import memory_of
from brim.memory.failures import FailureKind, classify
from brim.memory.snapshot import StateSnapshot
from brim.memory.transfer import replaced
from brim.records import Probe
from brim.running.retries import survivable
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.training.micro_batches import Rewinder

__all__ = ["Survival", "cut", "joined", "name_lost_rank", "note_unsurvived", "samples_in"]

_CONTINUE = "continue from the last checkpoint with a smaller memory_limit= or a larger margin="
_IN_A_WINDOW = (
    "in the backward of a batch inside an accumulation window: Lightning keeps no earlier batch of the window, so that "
    f"it cannot be done again; {_CONTINUE}"
)
_NOT_CUT = (
    "the batch cannot be cut into samples (or the module optimizes manually), so that it cannot be done again in "
    f"pieces; {_CONTINUE}"
)
_IN_THE_STEP = (
    f"in the optimizer's step, which may have changed weights already, so that it cannot be done again; {_CONTINUE}"
)
_ELSEWHERE = (
    "outside of the steps that can be done again, as in a hook, a callback or the backward of a batch inside an "
    f"accumulation window; {_CONTINUE}"
)
_ALONE = (
    "a sample alone needs more memory than there is now; continue from the last checkpoint when others have freed "
    "theirs, or on another device"
)
_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What came of a step: its value, or an out-of-memory error."""

    value: Any = None
    error: Exception | None = None


class _Wrapped:
    """A step that something else runs; a copy of its module, or one that was saved, has its own step."""

    def __init__(self, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original, self._run = original, run

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(*arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._original,)  # a method, which is bound to what its module becomes


@dataclasses.dataclass(frozen=True)
class _Logged:
    """A call of `self.log` that waits for the other pieces of its batch."""

    log: Callable[..., None]
    name: str
    value: Any
    flags: tuple[Any, ...]  # what else was not named
    settings: dict[str, Any]  # with `batch_size`: what the value counts


class _Cutter:
    """How batches of one kind are cut, and what is known of how long pieces may be."""

    def __init__(self) -> None:
        self.sizes: MicroBatchSizer | None = None
        self.levels = 1  # see `samples_in`
        self.running = 0  # samples of the batch or piece that runs; 0 once it has failed

    def needs_cutting(self, length: int) -> bool:
        """Whether a batch of so many samples must be cut, by what happened to those before it."""
        sizes = self.sizes
        if sizes is None or (sizes.oom_events == 0 and sizes.request.ceiling != length):
            sizes = self.sizes = MicroBatchSizer(MicroBatchRequest(ceiling=length))
        self.running = length
        return sizes.next_size() < length

    def pieces(self, batch: Any, length: int) -> Iterator[tuple[Any, int]]:
        """The pieces of a batch; one that has failed by the next time comes again, in smaller ones."""
        assert self.sizes is not None
        self.sizes.begin_window()
        start = 0
        while start < length:
            self.running = self.sizes.next_length(length - start)
            yield cut(batch, start, start + self.running, levels=self.levels), self.running
            if self.running:
                self.sizes.record(Probe(batch_size=self.running, verdict="fits"))
                start += self.running
        self.sizes.end_window()


class Survival:
    """Wraps the steps of a module for one run; `close` puts them back.

    Args:
        trainer: The trainer of the run.
        module: The module whose steps are wrapped.
        stage: `fit`, `validate`, `test` or `predict`.
        loss_of: Whether the loss of a batch is the mean over its samples, or their sum.
        note: Is given a sentence for each batch that is redone.
    """

    def __init__(
        self, trainer: Any, module: Any, stage: str, *, loss_of: Literal["mean", "sum"], note: Callable[[str], None]
    ) -> None:
        self.trainer, self.module = trainer, module
        self.loss_of = loss_of
        self.note = note
        self._training, self._evaluation = _Cutter(), _Cutter()
        self._rewinder: Rewinder | None = None
        self._redoing = False  # the batch was reported by a forward whose backward failed
        self._forward_done = False  # the forward of this batch has ended
        self._backward_done = False  # and its backward: an error after it is the optimizer's
        self._zeroed = False  # this batch has zeroed the gradients itself: the trainer's own zeroing is left out
        self._added = False  # a piece of this batch has added to the gradients
        self._can_cut = False  # whether the training batch that runs can be cut
        self._undo = contextlib.ExitStack()
        if stage == "fit":
            self._wrap("optimizer_step", self._optimizer_step)
            self._wrap("optimizer_zero_grad", self._optimizer_zero_grad)
            self._wrap("training_step", self._training_step)
        self._wrap(_STEPS.get(stage, "validation_step"), self._evaluation_step, training=False)

    def close(self) -> None:
        """Put the module's own steps back."""
        self._undo.close()

    def _wrap(self, name: str, by: Callable[..., Any], *, training: bool = True) -> None:
        original = getattr(self.module, name, None)
        if original is None:
            return

        def run(*arguments: Any, **named: Any) -> Any:
            if self.trainer.training is not training:  # a step that calls another: the outer one is redone
                return original(*arguments, **named)
            return by(original, *arguments, **named)

        set_attribute(self._undo, self.module, name, _Wrapped(original, run))

    # ------------------------------------------------------------------------------------------ evaluation

    def _evaluation_step(self, original: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
        length, cutter = samples_in(batch), self._evaluation
        if length is None or not cutter.needs_cutting(length):
            done = _tried(functools.partial(original, batch, *arguments), can_cut=length is not None)
            if done.error is None:
                return done.value
            self._shrink(cutter, done.error)
        assert length is not None  # otherwise the error was raised
        return self._evaluated(original, batch, length, arguments)

    def _evaluated(self, original: Callable[..., Any], batch: Any, length: int, arguments: tuple[Any, ...]) -> Any:
        """Piece by piece; of one that fails only its own samples come again, so that none is counted twice."""
        outputs: list[Any] = []
        samples: list[int] = []
        logged: list[_Logged] = []
        for piece, count in self._evaluation.pieces(batch, length):
            before = len(logged)
            with self._logging_into(logged, count):
                done = _tried(functools.partial(original, piece, *arguments), can_cut=True)
            if done.error is None:
                outputs.append(done.value)
                samples.append(count)
            else:
                del logged[before:]
                self._shrink(self._evaluation, done.error)
        _log(logged)
        return joined(outputs, samples)

    # ------------------------------------------------------------------------------------------ training

    def _optimizer_step(
        self, original: Callable[..., Any], epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> Any:
        """The closure runs forward and backward: what fails in it is done again, before any weight has changed."""

        def redone() -> Any:
            while True:
                self._forward_done = self._backward_done = False
                done = _tried(optimizer_closure, can_cut=True)
                if done.error is None:
                    self._redoing, self._backward_done = False, True
                    return done.value
                if not self._forward_done:
                    raise done.error  # `_training_step` has tried what can be tried
                _refuse(done.error, _NOT_CUT if not self._can_cut else "")
                _refuse(done.error, _IN_A_WINDOW if self.trainer.accumulate_grad_batches > 1 else "")
                self._shrink(self._training, done.error)
                self._redoing = True

        self._redoing = self._backward_done = False
        try:
            return original(epoch, batch_idx, optimizer, redone if callable(optimizer_closure) else optimizer_closure)
        except Exception as error:
            if self._backward_done and survivable(error).kind is FailureKind.OUT_OF_MEMORY:
                _refuse(error, _IN_THE_STEP)
            raise
        finally:
            self._redoing = False

    def _optimizer_zero_grad(self, original: Callable[..., Any], epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not self._zeroed:
            original(epoch, batch_idx, optimizer)

    def _training_step(self, original: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
        several = isinstance(self.trainer.train_dataloader, (Mapping, list, tuple))  # a batch of each of these loaders
        self._training.levels = 2 if several else 1
        length = samples_in(batch, levels=self._training.levels) if self.module.automatic_optimization else None
        self._zeroed, self._added, self._can_cut = False, False, length is not None
        if not self._redoing:
            self._mark()
        while True:
            step = functools.partial(original, batch, *arguments)
            if length is not None and (self._training.needs_cutting(length) or self._redoing):
                assert self._rewinder is not None
                self._rewinder.rewind()
                step = functools.partial(self._trained, original, batch, length, arguments)
            done = _tried(step, can_cut=length is not None)
            if done.error is None:
                self._forward_done = True
                return done.value
            _refuse(done.error, _IN_A_WINDOW if self._added and not self._begins_window() else "")
            self._shrink(self._training, done.error)

    def _mark(self) -> None:
        """Remember buffers and random generators, to begin the batch again from them."""
        self._rewinder = self._rewinder or Rewinder(self.module)
        self._rewinder.mark()

    def _trained(self, original: Callable[..., Any], batch: Any, length: int, arguments: tuple[Any, ...]) -> Any:
        """Forward and backward of all pieces but the last, whose backward is the trainer's own."""
        trainer, total = self.trainer, 0.0
        optimizer = trainer.optimizers[0]
        self._zeroed = self._added = False
        if self._begins_window():
            self.module.optimizer_zero_grad(trainer.current_epoch, trainer.fit_loop.batch_idx, optimizer)
        self._zeroed = True
        done, loss, outputs, samples = 0, None, [], []
        with self._counted_once() as logged:
            for piece, count in self._training.pieces(batch, length):
                with self._logging_into(logged, count):
                    output = original(piece, *arguments)
                loss = output["loss"] if isinstance(output, Mapping) else output
                outputs.append(_without_loss(output))
                samples.append(count)
                done += count
                if loss is None:
                    continue
                loss = loss * (count / length if self.loss_of == "mean" else 1.0)
                if done < length:
                    self._added = True
                    with torch.autocast(trainer.strategy.root_device.type, enabled=False), self._without_hooks():
                        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
                    total = total + loss.detach()
        if loss is not None:
            loss = loss + total
        return {**_joined_extras(outputs, samples), "loss": loss} if isinstance(output, Mapping) else loss

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Hooks around a backward are for that of a batch: the trainer's own, of the last piece, when all is added."""
        callbacks = self.trainer.callbacks
        with contextlib.ExitStack() as stack:
            for name in ("on_before_backward", "on_after_backward"):
                set_attribute(stack, self.module, name, lambda *_: None)
            stack.callback(setattr, self.trainer, "callbacks", callbacks)
            self.trainer.callbacks = []
            yield

    def _begins_window(self) -> bool:
        """Whether no batch before this one has left gradients."""
        return bool(self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0)

    @contextlib.contextmanager
    def _counted_once(self) -> Iterator[list[_Logged]]:
        """Metrics (of torchmetrics) and what is logged count if all pieces are done, and no forward was before."""
        kind = getattr(sys.modules.get("torchmetrics"), "Metric", None)
        metrics = [part for part in self.module.modules() if kind is not None and isinstance(part, kind)]
        before = StateSnapshot.take(metrics)
        logged: list[_Logged] = []
        counts = False
        try:
            yield logged
            counts = not self._redoing
        finally:
            if not counts:
                rng = StateSnapshot.take()  # of nothing but the random generators
                before.restore()
                rng.restore()
        if counts:
            _log(logged)

    # ------------------------------------------------------------------------------------------ pieces

    def _shrink(self, cutter: _Cutter, error: Exception) -> None:
        """Smaller pieces from here on; nothing refers to the failed step any more."""
        assert cutter.sizes is not None
        failed, cutter.running = cutter.running, 0
        if cutter.sizes.hopeless(failed):
            _refuse(error, _ALONE)
        memory = memory_of(self.trainer.strategy.root_device)
        memory.release()
        cutter.sizes.record(Probe(batch_size=failed, verdict="oom"), memory.left_by_others_bytes())
        pieces = cutter.sizes.next_size()
        self.note(f"out of memory with {failed} samples in {self._where()}: the batch runs again in pieces of {pieces}")

    def _where(self) -> str:
        return f"epoch {self.trainer.current_epoch}, step {self.trainer.global_step}"

    @contextlib.contextmanager
    def _logging_into(self, logged: list[_Logged], samples: int) -> Iterator[None]:
        """`self.log`, which `log_dict` calls, is kept until all pieces are done; it weighs a value by its samples."""
        original = self.module.log

        def log(name: str, value: Any, *flags: Any, batch_size: int | None = None, **settings: Any) -> None:
            settings["batch_size"] = samples if batch_size is None else batch_size
            logged.append(_Logged(original, name, _detached(value), flags, settings))

        with contextlib.ExitStack() as stack:
            set_attribute(stack, self.module, "log", log)
            yield


def _tried(step: Callable[[], Any], *, can_cut: bool) -> _Outcome:
    """What a step returns, or the out-of-memory error that it raises; other errors are raised as they are."""
    try:
        return _Outcome(value=step())
    except BrimError:
        raise
    except Exception as error:
        if survivable(error).kind is not FailureKind.OUT_OF_MEMORY:
            raise
        _refuse(error, "" if can_cut else _NOT_CUT)
        traceback.clear_frames(error.__traceback__)  # their variables hold the failed step's tensors
        return _Outcome(error=error)


def _refuse(error: Exception, why: str) -> None:
    """Raise an error with the reason why it is not survived, if there is one."""
    if why:
        error.add_note(f"brim: {why}")
        raise error


def _log(logged: list[_Logged]) -> None:
    """What pieces have logged, as their batch would have: means and sums of single values once, under each name."""
    by_name: dict[str, list[_Logged]] = {}
    for one in logged:
        by_name.setdefault(one.name, []).append(one)
    for calls in by_name.values():
        for one in _of_batch(calls):
            one.log(one.name, one.value, *one.flags, **one.settings)


def _of_batch(calls: list[_Logged]) -> list[_Logged]:
    """One call in place of those of the pieces; the same ones where their values are metrics or reduced otherwise."""
    last, counts = calls[-1], [one.settings["batch_size"] for one in calls]
    reduced = last.settings.get("reduce_fx", "mean")
    total = sum(counts)
    if reduced not in ("mean", "sum", torch.mean, torch.sum) or total == 0:
        return calls
    if not all(isinstance(one.value, (int, float)) or type(one.value) is torch.Tensor for one in calls):
        return calls
    if reduced in ("sum", torch.sum):
        value = sum(one.value for one in calls)
    else:
        value = sum(one.value * (count / total) for one, count in zip(calls, counts, strict=True))
    return [dataclasses.replace(last, value=value, settings={**last.settings, "batch_size": total})]


def note_unsurvived(error: BaseException) -> None:
    """A note for an out-of-memory error that came past all wrapped steps, and so has none."""
    noted = any(note.startswith("brim: ") for note in getattr(error, "__notes__", ()))
    if not noted and not isinstance(error, BrimError) and classify(error).kind is FailureKind.OUT_OF_MEMORY:
        error.add_note(f"brim: {_ELSEWHERE}")


def name_lost_rank(trainer: Any, error: BaseException) -> None:
    """A note for an out-of-memory error of one of several ranks, which is not survived."""
    if not isinstance(error, BrimError) and classify(error).kind is FailureKind.OUT_OF_MEMORY:
        error.add_note(
            f"brim: rank {trainer.global_rank} of {trainer.world_size} ran out of memory, and the others wait for it "
            f"inside their step, so that nothing can be done again; {_CONTINUE} on every rank"
        )


def samples_in(batch: Any, *, levels: int = 1) -> int | None:
    """How many samples a batch has, if it can be cut: what all its tensors have in front, and its lists of texts.

    None where a structure may mean something else, such as a list of tensors inside a batch. `levels`: how many outer
    ones are structure, also where they are lists: 1, and 2 in a batch that holds one of each of several loaders.
    """
    lengths: set[int] = set()
    if not _collect_lengths(batch, lengths, levels) or len(lengths) != 1:
        return None
    length = lengths.pop()
    return length if length > 0 else None


def _collect_lengths(part: Any, lengths: set[int], levels: int) -> bool:
    if isinstance(part, torch.Tensor):
        lengths.add(part.shape[0] if part.dim() else -1)
        return True
    if isinstance(part, Mapping):
        return all(_collect_lengths(one, lengths, levels - 1) for one in part.values())
    if isinstance(part, tuple) or (isinstance(part, list) and levels > 0):
        return all(_collect_lengths(one, lengths, levels - 1) for one in part)
    if isinstance(part, list):
        lengths.add(len(part))
        return all(isinstance(one, (str, bytes, int, float)) for one in part)
    return part is None


def cut(batch: Any, start: int, end: int, *, levels: int = 1) -> Any:
    """The samples from `start` to `end` of a batch that can be cut."""
    if isinstance(batch, torch.Tensor):
        return batch[start:end]
    if isinstance(batch, Mapping):
        named = {name: cut(part, start, end, levels=levels - 1) for name, part in batch.items()}
        make: Any = type(batch)
        return named if make is dict else make(named)
    if isinstance(batch, tuple) or (isinstance(batch, list) and levels > 0):
        parts = [cut(part, start, end, levels=levels - 1) for part in batch]
        make = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    return batch[start:end] if isinstance(batch, list) else batch


def _detached(value: Any) -> Any:
    return replaced(value, torch.Tensor, torch.Tensor.detach)


def _without_loss(output: Any) -> dict[str, Any]:
    """What a training step returns beside its loss, without the graph that it came from."""
    if not isinstance(output, Mapping):
        return {}
    return {name: _detached(part) for name, part in output.items() if name != "loss"}


def _joined_extras(outputs: list[dict[str, Any]], samples: list[int]) -> dict[str, Any]:
    """The same for the whole batch; of what cannot be put together, the last piece's."""
    extras: dict[str, Any] = {}
    for name, last in outputs[-1].items():
        try:
            extras[name] = joined([one[name] for one in outputs], samples)
        except (RequestError, KeyError):
            extras[name] = last
    return extras


def joined(outputs: list[Any], samples: list[int]) -> Any:
    """What a step would have returned for the whole batch: tensors joined, single values averaged over samples."""
    first = outputs[0]
    counted = list(zip(outputs, samples, strict=True))
    if first is None:
        return None
    if isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point():
        weighted = torch.stack([one.double() * count for one, count in counted]).sum() / sum(samples)
        return weighted.to(first.dtype)
    if isinstance(first, torch.Tensor) and all(one.shape[:1] == (count,) for one, count in counted):
        return torch.cat(outputs)
    if isinstance(first, float):
        return sum(one * count for one, count in counted) / sum(samples)
    if isinstance(first, Mapping):
        return {name: joined([one[name] for one in outputs], samples) for name in first}
    if isinstance(first, (list, tuple)):
        fields = all(
            isinstance(part, torch.Tensor) and part.shape[:1] == (count,) for one, count in counted for part in one
        )
        if not fields and all(len(one) == count for one, count in counted):
            return type(first)(item for one in outputs for item in one)
        if len({len(one) for one in outputs}) == 1:
            return type(first)(joined(list(parts), samples) for parts in zip(*outputs, strict=True))
    raise RequestError(
        f"a batch ran out of memory, and what its pieces return ({type(first).__name__}) cannot be put together; "
        "return tensors with the samples in front, or give a smaller memory_limit="
    )
