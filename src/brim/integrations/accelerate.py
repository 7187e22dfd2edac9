"""accelerate's decorator, called as accelerate calls it, with brim's sizes underneath. Imports nothing of accelerate.

The decorated function is called with a batch size before its own arguments, and again with a smaller one after an
out-of-memory error. The next size follows from bytes (`sizing/falling.py`); a function that has returned is never run
again; the reduced size is kept for later calls. Knows nothing of what the function does, so that it cannot undo it:
random generators and what `restore` names are put back, everything else that was seen to change is named in a note.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from brim.errors import DoesNotFitError, LostError, RequestError
from brim.memory.devices import DeviceMemory, MemoryReading, existing_device, memory_of, resolve_limit
from brim.memory.failing_place import progress_at
from brim.memory.failures import Failure, FailureKind, classify, memory_remedies, without_tracebacks
from brim.memory.snapshot import StateSnapshot
from brim.models.placement import resolve_device
from brim.ranks.world import current_world
from brim.records import Probe, Verdict
from brim.running.notes import log_note
from brim.settings.setting_checks import is_whole
from brim.settings.sizes import format_bytes, parse_bytes
from brim.sizing.falling import FallingSizer
from brim.sizing.sizer import Trial
from brim.workloads.callables import returns_early

__all__ = ["NoExecutableBatchSizeError", "SizedFunction", "find_executable_batch_size"]

MOST_SHOWN = 60  # characters of an argument in an error

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_SMALLER_HELPS = (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT, FailureKind.AMBIGUOUS)


class NoExecutableBatchSizeError(DoesNotFitError, RuntimeError):
    """Not even a batch of one fits; also a `RuntimeError`, which callers of accelerate's decorator catch."""


class SizedFunction(Protocol[_P, _R_co]):
    """A function whose batch size is found: called without it."""

    trials: list[Probe]  # of every call so far

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...


class _Decorator(Protocol):
    def __call__(self, function: Callable[Concatenate[int, _P], _R], /) -> SizedFunction[_P, _R]: ...


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    max_batch_size: int | None = None,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    restore: Sequence[Any] = (),
    per_rank: bool = False,
    note: Callable[[str], None] | None = None,
) -> _Decorator: ...


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, _P], _R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    max_batch_size: int | None = None,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    restore: Sequence[Any] = (),
    per_rank: bool = False,
    note: Callable[[str], None] | None = None,
) -> SizedFunction[_P, _R]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    max_batch_size: int | None = None,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    restore: Sequence[Any] = (),
    per_rank: bool = False,
    note: Callable[[str], None] | None = None,
) -> Any:
    """Call a function with a batch size as its first argument, and again with a smaller one while memory runs out.

    In place of accelerate's decorator of the same name, with the same parameters; those after them are brim's own.
    After an out-of-memory error memory is given back, the random generators are put back, and the next size follows
    from the bytes that were needed and from how far the function had come. A function that has returned is never run
    again, so that no larger size is tried; where one step can be run alone, `brim.find` finds the fastest size.

    What the function changed before the error stays as it is (weights, optimizer state, files) unless `restore` names
    it; a note says which modules and optimizers, of those that the function was given or refers to, have changed.

    Args:
        function: Takes the batch size, then its own arguments. Without it, the result is the decorator.
        starting_batch_size: The size of the first call, and the largest unless `max_batch_size` allows more.
        reduce_batch_size_fn: Gives the next size after an error, instead of the bytes.
        max_batch_size: Let later calls start above the size that ran, up to this, as far as its bytes allow.
        device: Whose memory is watched; by default the GPU in use, if there is one.
        memory_limit: Use at most this much, such as `"24GiB"`. On the CPU this bounds eager operations only.
        restore: Modules, optimizers and other objects to put back bit for bit before the function is called again.
        per_rank: Under torchrun, the ranks do not wait for each other inside the function: each has its own size.
        note: Is given a line for every call that failed; by default the logger `brim` is.

    Returns:
        The function without its first parameter; its attribute `trials` has a `Probe` for every call so far.

    Raises:
        NoExecutableBatchSizeError: Not even a batch of one fits: a `DoesNotFitError` and a `RuntimeError`.
        LostError: One of several ranks ran out of memory: the others wait for it inside the function.
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> @brim.find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, steps):
        ...     if batch_size > 40:
        ...         raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        ...     return batch_size, steps
        >>> train(3)
        (32, 3)
        >>> [(trial.batch_size, trial.verdict) for trial in train.trials]
        [(64, 'oom'), (32, 'fits')]
    """
    options = {
        "starting_batch_size": starting_batch_size,
        "reduce_batch_size_fn": reduce_batch_size_fn,
        "max_batch_size": max_batch_size,
        "device": device,
        "memory_limit": memory_limit,
        "restore": restore,
        "per_rank": per_rank,
        "note": note,
    }
    if function is None:
        return functools.partial(find_executable_batch_size, **options)
    _check(function, starting_batch_size, reduce_batch_size_fn, max_batch_size, restore)
    calls = _SizedCalls(
        function,
        FallingSizer(first=int(starting_batch_size), ceiling=None if max_batch_size is None else int(max_batch_size)),
        reduce=reduce_batch_size_fn,
        device=device,
        limit=None if memory_limit is None else parse_bytes(memory_limit),
        restore=restore,
        per_rank=per_rank,
        note=note or log_note,
    )

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return calls.call(args, kwargs)

    signature = inspect.signature(function)
    called.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    called.trials = calls.trials  # type: ignore[attr-defined]
    return called


def _check(function: Any, first: Any, reduce: Any, most: Any, restore: Any) -> None:
    if not callable(function):
        instead = f"; write starting_batch_size={function!r}" if isinstance(function, numbers.Integral) else ""
        raise RequestError(
            f"function={function!r}: give a function that takes the batch size as its first argument{instead}"
        )
    if returns_early(function):
        raise RequestError(
            f"function={function!r}: a generator or an async function returns before its body runs, so that running "
            "out of memory is not seen; decorate a plain function around all that it does"
        )
    signature = inspect.signature(function).parameters
    parameters = list(signature)
    by_name = bool(parameters) and signature[parameters[0]].kind is inspect.Parameter.KEYWORD_ONLY
    if not parameters or parameters[0] in ("self", "cls") or by_name:
        others = "".join(f", {name}" for name in parameters if name != "batch_size")
        name = getattr(function, "__name__", "function")
        raise RequestError(
            f"function={name}({'*, ' if by_name else ''}{', '.join(parameters)}): the batch size is put before all "
            f"other arguments{', also of a method' if parameters and not by_name else ''}; write def "
            f"{name}(batch_size{others})"
        )
    if not is_whole(first, least=0):
        raise RequestError(f"starting_batch_size={first!r}: give a whole number from 1")
    if reduce is not None and not callable(reduce):
        raise RequestError(f"reduce_batch_size_fn={reduce!r}: give a function, or leave it out")
    if not isinstance(restore, (list, tuple)):
        raise RequestError(f"restore=: a {type(restore).__name__}; give a list, such as restore=[model, optimizer]")
    if most is not None and not is_whole(most, least=first):
        raise RequestError(f"max_batch_size={most!r}: give a whole number from {first}, where the first call starts")


class _SizedCalls:
    """The calls of one function: its size from call to call, and a record of each."""

    def __init__(
        self,
        function: Callable[..., Any],
        sizer: FallingSizer,
        *,
        reduce: Callable[[], int] | None,
        device: Any,
        limit: int | None,
        restore: Sequence[Any],
        per_rank: bool,
        note: Callable[[str], None],
    ) -> None:
        self.trials: list[Probe] = []
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._sizer = sizer
        self._reduce = reduce
        self._device = device
        self._limit = limit
        self._restore = list(restore)
        self._per_rank = per_rank
        self._note = note
        self._ambiguous = False  # an error that may or may not be memory was survived in this call

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Until the function has returned, or no smaller size is left."""
        self._check_arguments(args, kwargs)
        memory = self._memory()
        memory.release()
        snapshot = self._snapshot()
        self._ambiguous = False
        self._begin(memory)
        self._sizer.begin_call()
        error: Exception | None = None
        changed: list[str] = []  # by the call before, which failed
        while (size := self._sizer.next_size()) > 0:
            watched = _Watched(self._function, args, kwargs, restored=self._restore)
            try:
                result, failed = self._try(size, memory, args, kwargs)
            except Exception as own:
                if changed:
                    own.add_note(self._begun_again(changed))
                raise
            if failed is None:
                return result[0]
            # The except block has ended: nothing pins the failed call's tensors any more.
            failure, error, trial = failed
            changed = watched.changed()
            memory.release()
            snapshot.restore()
            self._refuse_alone(failure, size, error)
            self._begin(memory)
            self._fall(trial)
            self._report(size, failure, changed)
        remedies = "\n  - ".join(memory_remedies((), batch_size=1))
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero: not even a batch of 1 fits in {self._name}().\n"
            f"What may help:\n  - {remedies}"
        ) from error

    def _begin(self, memory: DeviceMemory) -> None:
        self._sizer.begin(limit_bytes=self._limit_now(memory), resident_bytes=memory.resident_bytes())

    def _check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        signature, size = inspect.signature(self._function), self._sizer.next_size()
        try:
            signature.bind(size, *args, **kwargs)
        except TypeError as error:
            first = next(iter(signature.parameters), "")
            own = args if first in kwargs else args[1:]
            named = {name: value for name, value in kwargs.items() if name != first}
            shown = ", ".join([*map(_shown, own), *(f"{name}={_shown(value)}" for name, value in named.items())])
            by_hand = (
                f". The batch size is put before the arguments of the call: where you gave it yourself, call "
                f"{self._name}({shown})"
            )
            raise TypeError(
                f"{self._name}(): {error}{by_hand if _binds(signature, size, *own, **named) else ''}"
            ) from None

    def _memory(self) -> DeviceMemory:
        if self._device is not None:
            return memory_of(existing_device(self._device, argument="device="))
        # A rank that has not chosen its card yet will take its own: a context on another would stay there.
        return memory_of("cuda" if torch.cuda.is_initialized() else resolve_device("auto"))

    def _limit_now(self, memory: DeviceMemory) -> int | None:
        """What the function may use: what was named, or what there is; on the CPU nothing is measured without."""
        if self._limit is not None:
            return resolve_limit(memory, asked_bytes=self._limit, margin=None).usable_bytes
        return None if memory.meter_slows else memory.available_bytes()

    def _snapshot(self) -> StateSnapshot:
        modules = [one for one in self._restore if isinstance(one, nn.Module)]
        optimizers = [one for one in self._restore if isinstance(one, Optimizer)]
        others = [one for one in self._restore if not isinstance(one, (nn.Module, Optimizer))]
        return StateSnapshot.take(modules, optimizers, others)

    def _try(
        self, size: int, memory: DeviceMemory, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Failure, Exception, Trial] | None]:
        """One call: what it returned, or why a smaller one may succeed; every other error is raised as it is."""
        reading = MemoryReading()
        try:
            with self._metered(memory, reading):
                result = self._function(size, *args, **kwargs)
        except Exception as error:
            failure = classify(error)
            may_pass = failure.kind in _SMALLER_HELPS
            if not may_pass or (failure.kind is FailureKind.AMBIGUOUS and (self._ambiguous or size == 1)):
                raise
            self._ambiguous = failure.kind is FailureKind.AMBIGUOUS
            trial = self._failed(size, failure, reading, progress_at(error.__traceback__))
            return (), (failure, without_tracebacks(error), trial)
        self._ran(size, reading)
        return (result,), None

    @contextlib.contextmanager
    def _metered(self, memory: DeviceMemory, reading: MemoryReading) -> Iterator[None]:
        """Under the limit that was named; without one, the function has the device as it would have it alone."""
        if memory.meter_slows and self._limit is None:
            yield
            return
        inner = MemoryReading()
        limit = self._limit_now(memory) if self._limit is not None else None
        try:
            with (
                contextlib.nullcontext() if limit is None else memory.limited(limit),
                memory.metered() as inner,
            ):
                yield
        finally:
            reading.peak_allocated_bytes = inner.peak_allocated_bytes
            reading.peak_reserved_bytes = inner.peak_reserved_bytes
            reading.alloc_retries = inner.alloc_retries

    def _ran(self, size: int, reading: MemoryReading) -> None:
        verdict: Literal["fits", "thrashes"] = "thrashes" if reading.alloc_retries else "fits"
        peak = reading.peak_reserved_bytes or None
        self._sizer.record(Trial(size=size, verdict=verdict, peak_bytes=peak))
        self._remember(size, verdict, reading)

    def _failed(self, size: int, failure: Failure, reading: MemoryReading, progress: float | None) -> Trial:
        needed = None
        if failure.requested_bytes and reading.peak_allocated_bytes:
            needed = reading.peak_allocated_bytes + failure.requested_bytes
        verdict: Verdict = "size_limit" if failure.kind is FailureKind.SIZE_LIMIT else "oom"
        self._remember(size, verdict, reading, needed_bytes=needed, detail=failure.reason)
        return Trial(size=size, verdict=verdict, needed_bytes=needed, progress=progress)

    def _remember(
        self, size: int, verdict: Verdict, reading: MemoryReading, *, needed_bytes: int | None = None, detail: str = ""
    ) -> None:
        self.trials.append(
            Probe(
                batch_size=size,
                verdict=verdict,
                peak_allocated_bytes=reading.peak_allocated_bytes or None,
                peak_reserved_bytes=reading.peak_reserved_bytes or None,
                alloc_retries=reading.alloc_retries,
                needed_bytes=needed_bytes,
                detail=detail,
            )
        )

    def _fall(self, trial: Trial) -> None:
        """To the next size: the user's, or by the bytes."""
        self._sizer.record(trial)
        if self._reduce is None:
            return
        chosen = self._reduce()
        if not is_whole(chosen, least=0) or chosen >= trial.size:
            raise RequestError(
                f"reduce_batch_size_fn returned {chosen!r} after a batch of {trial.size} did not fit: it must return a "
                "smaller whole number"
            )
        self._sizer.set_next(int(chosen))

    def _refuse_alone(self, failure: Failure, size: int, error: Exception) -> None:
        """With other ranks inside the same function, a rank cannot begin again alone."""
        world = current_world()
        if world.size == 1 or self._per_rank:
            return
        raise LostError(
            f"rank {world.rank} of {world.size} ran out of memory in {self._name}() at batch size {size} "
            f"({failure.reason}): the other ranks wait for it inside the same call and cannot be given another size. "
            f"Start all ranks again with a smaller starting_batch_size; per_rank=True, where none waits for another"
        ) from error

    def _report(self, size: int, failure: Failure, changed: list[str]) -> None:
        following = self._sizer.next_size()
        if following == 0:
            return
        needed = self.trials[-1].needed_bytes
        bytes_ = "" if needed is None else f", {format_bytes(needed)} needed at least"
        above = " above the size that had run" if 0 < self._sizer.largest_run < size else ""
        self._note(
            f"{self._name}() failed at batch size {size}{above} ({failure.reason}{bytes_}): it is called again with "
            f"{following}"
        )
        if changed:
            self._note(self._begun_again(changed))

    def _begun_again(self, changed: Sequence[str]) -> str:
        return (
            f"{self._name}() begins again with what the failed call has changed: {', '.join(changed)}. Make it inside "
            "the function, or name it in restore="
        )


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _shown(value: Any) -> str:
    """An argument in an error, in one line: a model or a tensor by its kind."""
    text = repr(value)
    return text if "\n" not in text and len(text) <= MOST_SHOWN else f"<{type(value).__name__}>"


class _Watched:
    """The modules and optimizers that a function was given or refers to, to say which of them a failed call changed."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, restored: Sequence[Any]
    ) -> None:
        parameters = [*inspect.signature(function).parameters][1:]
        named = dict(zip(parameters, args, strict=False)) | dict(kwargs) | _referred_to(function)
        known = {id(one) for one in restored}
        self._before = [
            (name, weakref.ref(value), _versions(value))  # one that the function replaces takes no memory
            for of, holder in named.items()
            for name, value in _trained(of, holder)
            if id(value) not in known
        ]

    def changed(self) -> list[str]:
        """As in `model (Linear)`, as far as torch counts writes to a tensor."""
        return [
            f"{name} ({type(value).__name__})"
            for name, held, before in self._before
            if (value := held()) is not None and _versions(value) != before
        ]


def _trained(name: str, value: Any) -> Iterator[tuple[str, nn.Module | Optimizer]]:
    """A module or optimizer, or those that an object holds, such as the trainer whose method is called."""
    if isinstance(value, (nn.Module, Optimizer)):
        yield name, value
    elif not isinstance(value, (type, ModuleType)):
        for attribute, part in (getattr(value, "__dict__", None) or {}).items():
            if isinstance(part, (nn.Module, Optimizer)):
                yield f"{name}.{attribute}", part


def _referred_to(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables outside of a function that its body names, and the object whose method it is."""
    bound = {"self": function.__self__} if inspect.ismethod(function) else {}
    try:
        variables = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # no Python function, or a variable that has no value yet
        return bound
    return {**variables.globals, **variables.nonlocals, **bound}


def _versions(value: nn.Module | Optimizer) -> list[tuple[int, int]]:
    """Which tensors there are, and how often each was written to."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    else:
        tensors = [one for state in value.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return [(id(tensor), _version(tensor)) for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    uncounted = not is_lazy(tensor) and tensor.is_inference()
    return 0 if uncounted else tensor._version
