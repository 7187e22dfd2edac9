"""Classifies errors: out of memory, perhaps out of memory, a size limit, fatal, or something else.

The only file that reads the text of an exception. It says what an error is, not what to do about it:
splitting, retrying and giving up belong to the search and the executor.

    try:
        step(batch)
    except Exception as error:
        failure = classify(error)
        if failure.kind is FailureKind.OTHER:
            raise
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal

from brim.errors import BrimError
from brim.settings.caller import named

__all__ = [
    "HALF_PRECISION",
    "Failure",
    "FailureKind",
    "classify",
    "classify_exit",
    "memory_remedies",
    "memory_savings",
    "without_tracebacks",
]


class FailureKind(enum.Enum):
    """What a failure means for the next attempt."""

    OUT_OF_MEMORY = "out_of_memory"  # a smaller size helps
    AMBIGUOUS = "ambiguous"  # memory or a bug: one smaller attempt, then the original error
    SIZE_LIMIT = "size_limit"  # a smaller size helps, but no amount of memory would
    FATAL = "fatal"  # this process cannot continue
    OTHER = "other"  # not about memory: raise it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What one error, or one exit code, was found to be."""

    kind: FailureKind
    reason: str  # one short line for people
    device_lost: bool = False  # the device itself is gone: a fresh process would not get it back either
    communicator_dead: bool = False  # the collective library failed: its process group must be made again
    requested_bytes: int | None = None  # the allocation that failed, when the message says
    own_limit: bool = False  # this process's own limit refused it: other processes had no part in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    pattern: re.Pattern[str]
    kind: FailureKind
    reason: str
    device_lost: bool = False
    communicator_dead: bool = False


def _rule(
    pattern: str, kind: FailureKind, reason: str, *, device_lost: bool = False, communicator_dead: bool = False
) -> _Rule:
    return _Rule(
        pattern=re.compile(pattern, re.IGNORECASE | re.DOTALL),
        kind=kind,
        reason=reason,
        device_lost=device_lost,
        communicator_dead=communicator_dead,
    )


_OOM = FailureKind.OUT_OF_MEMORY

# The first match decides, so the order is the policy: fatal, then what only sounds like memory, then memory, then the
# rest. `assert\b`, not `assert`: every CUDA error ends in advice about "device-side assertions".
_RULES = (
    _rule(
        r"device (?:is )?lost|device_lost|GPU is lost|fallen off the bus|uncorrectable ECC error",
        FailureKind.FATAL,
        "the device was lost",
        device_lost=True,
    ),
    _rule(r"illegal memory access|ILLEGAL_ADDRESS", FailureKind.FATAL, "illegal memory access on the device"),
    _rule(r"device-side assert\b", FailureKind.FATAL, "an assertion failed inside a kernel"),
    _rule(
        r"unspecified launch failure|misaligned address|illegal instruction was encountered",
        FailureKind.FATAL,
        "a kernel crashed and took the device's context with it",
    ),
    _rule(
        r"!\s*handles_\.at\(i\)\s*INTERNAL ASSERT",
        FailureKind.FATAL,
        "the CUDA allocator's expandable segments are corrupt",
    ),
    _rule(
        r"out ?of ?resources?: |OutOfResources",
        FailureKind.OTHER,
        "a Triton kernel needs more shared memory or registers than the GPU has, at any batch size",
    ),
    _rule(
        r"DataLoader worker .*(?:bus error|out of shared memory)",
        FailureKind.OTHER,
        "a DataLoader worker ran out of shared memory: /dev/shm is too small",
    ),
    _rule(
        r"No available memory for the cache blocks",
        FailureKind.OTHER,
        "the engine's own memory fraction leaves no room for its cache",
    ),
    _rule(
        r"(?:CUDA|HIP) failure:? (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?[cm]?alloc",
        _OOM,
        "NCCL ran out of device memory",
        communicator_dead=True,
    ),
    _rule(r"Triton Error \[\w+\]: out of memory", _OOM, "a Triton kernel could not be loaded: out of memory"),
    _rule(
        r"CUDA out of memory|CUDA (?:driver |runtime )?error: out of memory|cuda runtime error \(2\)"
        r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        _OOM,
        "CUDA out of memory",
    ),
    _rule(r"HIP out of memory|HIP error: out of memory|hipErrorOutOfMemory", _OOM, "HIP out of memory"),
    _rule(
        r"XPU out of memory|(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
        _OOM,
        "XPU out of memory",
    ),
    _rule(r"MPS backend out of memory", _OOM, "MPS out of memory"),
    _rule(r"Allocation on device.*?would exceed allowed memory", _OOM, "device out of memory"),
    _rule(r"CUBLAS_STATUS_ALLOC_FAILED", _OOM, "cuBLAS could not allocate its handle"),
    _rule(r"HIPBLAS_STATUS_ALLOC_FAILED", _OOM, "hipBLAS could not allocate its handle"),
    _rule(r"CUSOLVER_STATUS_ALLOC_FAILED", _OOM, "cuSOLVER could not allocate its handle"),
    _rule(
        r"(?:_STATUS|CUFFT)_ALLOC_FAILED|miopenStatusAllocFailed"
        r"|CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
        _OOM,
        "a GPU library could not allocate its workspace",
    ),
    # The allocator asserts while it words its own out-of-memory message, where NVML cannot see the device.
    _rule(
        r"NVML_SUCCESS == (?:r\s*INTERNAL ASSERT|.*INTERNAL ASSERT.*CUDACachingAllocator)",
        _OOM,
        "CUDA out of memory (its report failed too: NVML cannot see this device, often a MIG slice)",
    ),
    _rule(
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc|^MemoryError\b",
        _OOM,
        "host out of memory",
    ),
    _rule(
        r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Killed",
        _OOM,
        "a DataLoader worker was killed, most often by the host's out-of-memory killer (not proof)",
    ),
    _rule(
        r"canUse32BitIndexMath|more than INT_MAX elements",
        FailureKind.SIZE_LIMIT,
        "32-bit indexing limit of a kernel",
    ),
    _rule(r"Invalid buffer size", FailureKind.SIZE_LIMIT, "largest single buffer of the device"),
    _rule(r"invalid configuration argument", FailureKind.SIZE_LIMIT, "launch-size limit of a kernel"),
    _rule(
        r"Storage size calculation overflowed|numel: integer multiplication overflow",
        FailureKind.SIZE_LIMIT,
        "64-bit limit on the size of one tensor",
    ),
    _rule(
        r"CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_INTERNAL_ERROR|Unable to find a valid cuDNN algorithm"
        r"|unable to find an engine",
        FailureKind.AMBIGUOUS,
        "cuDNN found no way to run: a lack of workspace memory, or an unsupported call",
    ),
    # It takes 65,535 sequences at most, which is undocumented. Which ones torch passes to it differs between versions.
    _rule(
        r"mha_graph(?:->|\.)execute\(",
        FailureKind.AMBIGUOUS,
        "cuDNN's attention failed: more sequences than it takes, or an unsupported call",
    ),
    _rule(
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        FailureKind.AMBIGUOUS,
        "cuBLAS could not start: a lack of memory, or a broken context",
    ),
    # Bare only: where NCCL names the CUDA failure, and it is not memory, there is nothing ambiguous about it.
    _rule(
        r"(?:ncclUnhandledCudaError|unhandled cuda error)(?!.*(?:CUDA|HIP) failure)",
        FailureKind.AMBIGUOUS,
        "NCCL met a CUDA error that it does not name",
        communicator_dead=True,
    ),
)

_HOST_OOM = "host out of memory"
_ENOMEM_TEXT = f"[Errno {errno.ENOMEM}]"

_TRACEBACK_FRAME = re.compile(r'^\s+File "[^"\n]+", line \d+', re.MULTILINE)
_RAISED_LINE = re.compile(r"^(?:\w+\.)*(?P<name>[A-Z_]\w*(?:Error|Exception|OutOfResources))(?=: |\s*$)", re.MULTILINE)
_NATIVE_STACK = re.compile(r"\n(?:Exception raised from |C\+\+ CapturedTraceback)")

# How the error that ends a quoted traceback may be called for the quote to be read; the types of `_classify_link`.
_EXAMINED_NAMES = ("RuntimeError", "MemoryError", "AcceleratorError", "DistBackendError", "OSError", "OutOfResources")

_REQUESTED = re.compile(
    r"(?:tr(?:ied|ying) to allocate|unable to allocate|CUDA (?:host )?[cm]?alloc(?: async)?|requested\s*:|buffer size:)"
    r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>bytes?|[KMGTPE]i?B)\b",
    re.IGNORECASE,
)

# The CPU's meter, and an allocator that refuses what the device has free: its own fraction is used up.
_OWN_METER = re.compile(r"^memory limit of \d+ bytes: ")
_FREE = re.compile(r"of which (?P<number>\d+(?:\.\d+)?)\s*(?P<unit>bytes?|[KMGTPE]i?B) is free", re.IGNORECASE)

_LAST_SIGNAL = 64
_SIGNALS = {
    6: (FailureKind.FATAL, "the process aborted (signal 6)"),
    7: (FailureKind.FATAL, "bus error (signal 7): often /dev/shm is full"),
    9: (_OOM, "killed by signal 9, most often by the host's out-of-memory killer, which this does not prove"),
    11: (FailureKind.FATAL, "segmentation fault (signal 11)"),
}


def classify(error: BaseException) -> Failure:
    """Say what an error is, by its type first and its text second.

    An error that is not recognised itself is judged by its cause (`raise … from oom`). One that was
    merely raised while an out-of-memory error was being handled is not, unless it quotes that error whole.
    A group of errors, as of tasks that ran side by side, is about memory only if every one of them is.
    """
    found = _classify_chain(error, seen=set())
    return found or Failure(kind=FailureKind.OTHER, reason=f"{type(error).__name__} is not about memory")


def without_tracebacks(error: Exception) -> Exception:
    """The error, and all that it stands for, without the frames that keep a failed step's tensors alive."""
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
            links += link.exceptions if isinstance(link, BaseExceptionGroup) else ()
    return error


def classify_exit(returncode: int) -> Failure | None:
    """Say how a process ended, from its exit code (−9 and 137 both mean signal 9); None when all went well."""
    if returncode == 0:
        return None
    number = -returncode if returncode < 0 else returncode - 128
    if number in _SIGNALS:
        kind, reason = _SIGNALS[number]
        return Failure(kind=kind, reason=reason)
    ending = f"was killed by signal {number}" if 0 < number <= _LAST_SIGNAL else f"ended with exit code {returncode}"
    return Failure(kind=FailureKind.OTHER, reason=f"the process {ending}")


def _classify_chain(error: BaseException, *, seen: set[int]) -> Failure | None:
    verdicts = []
    for link in _chain(error, seen):
        verdict = _classify_group(link, seen) if isinstance(link, ExceptionGroup) else _classify_link(link)
        if verdict is not None and verdict.kind is FailureKind.FATAL:
            return verdict
        verdicts.append(verdict)
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _classify_group(group: ExceptionGroup[Exception], seen: set[int]) -> Failure | None:
    """The worst of its errors decides: a smaller size has to help all of them."""
    found = [_classify_chain(error, seen=seen) for error in group.exceptions if id(error) not in seen]
    known = [failure for failure in found if failure is not None]
    for kind in (FailureKind.FATAL, FailureKind.OTHER, FailureKind.AMBIGUOUS):
        worst = next((failure for failure in known if failure.kind is kind), None)
        if worst is not None:
            return worst
    return known[0] if known and len(known) == len(found) else None


def _chain(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The error, then what it stands for, outermost first; nothing behind an interrupt or brim's own verdict."""
    link: BaseException | None = error
    while link is not None and id(link) not in seen and _may_wrap(link):
        seen.add(id(link))
        yield link
        link = link.__cause__ or _quoted_context(link)


def _may_wrap(error: BaseException) -> bool:
    # KeyboardInterrupt and SystemExit end the run whatever they interrupted. A BrimError raised from an OOM is the
    # conclusion drawn from it (DoesNotFitError): splitting again on it would never end.
    return isinstance(error, Exception) and not isinstance(error, BrimError)


def _quoted_context(error: BaseException) -> BaseException | None:
    context = error.__context__
    if context is None or error.__suppress_context__:
        return None
    quoted = str(context).strip()
    return context if quoted and quoted in str(error) else None


def _classify_link(error: BaseException) -> Failure | None:
    """The verdict on one error alone; None where neither its type nor its text says anything."""
    message = _own_message(str(error))
    requested_bytes = _requested_bytes(message)
    if isinstance(error, _torch_types("OutOfMemoryError")):
        # The rule gives the wording only; a message it does not know is still out of memory.
        rule = next((r for r in _RULES if r.kind is _OOM and r.pattern.search(message)), None)
        return Failure(
            kind=_OOM,
            reason=rule.reason if rule else "device out of memory",
            requested_bytes=requested_bytes,
            own_limit=_is_own_limit(message, requested_bytes),
        )
    if isinstance(error, MemoryError) or _is_enomem(error):
        return Failure(kind=_OOM, reason=_HOST_OOM, requested_bytes=requested_bytes)
    if not isinstance(error, _examined_types()):
        return None
    for rule in _RULES:
        if rule.pattern.search(message):
            return Failure(
                kind=rule.kind,
                reason=rule.reason,
                device_lost=rule.device_lost,
                communicator_dead=rule.communicator_dead,
                requested_bytes=requested_bytes,
            )
    return None


def _examined_types() -> tuple[type[BaseException], ...]:
    # torch's AcceleratorError (2.8 and later) and DistBackendError are RuntimeErrors; torch.jit.Error is not.
    return (RuntimeError, *_torch_types("jit", "Error"))


def _torch_types(*path: str) -> tuple[type[BaseException], ...]:
    """An exception type of torch, if torch is loaded: one that is not loaded has raised nothing."""
    found: object = sys.modules.get("torch")
    for name in path:
        found = getattr(found, name, None)
    return (found,) if isinstance(found, type) else ()


def _is_enomem(error: BaseException) -> bool:
    # A DataLoader makes its worker's OSError again from the text alone, without the number.
    return isinstance(error, OSError) and (
        error.errno == errno.ENOMEM or (error.errno is None and _ENOMEM_TEXT in _own_message(str(error)))
    )


def _own_message(text: str) -> str:
    """The message without quoted source code: a DataLoader or TorchScript puts a whole traceback in it.

    Of a quoted traceback only the error it ends with counts, and only if it is of a kind that is examined:
    `raise ValueError("CUDA out of memory")` in somebody's source is neither.
    """
    text = _NATIVE_STACK.split(text, maxsplit=1)[0]
    if not _TRACEBACK_FRAME.search(text):
        return text
    raised = list(_RAISED_LINE.finditer(text))
    if not raised or not raised[-1]["name"].endswith(_EXAMINED_NAMES):
        return ""
    return text[raised[-1].start("name") :]


def _is_own_limit(text: str, requested_bytes: int | None) -> bool:
    free = _FREE.search(text)
    refused_what_is_free = free is not None and requested_bytes is not None and requested_bytes <= _size(free)
    return refused_what_is_free or _OWN_METER.match(text) is not None


def _requested_bytes(text: str) -> int | None:
    found = _REQUESTED.search(text)
    return None if found is None else _size(found)


def _size(found: re.Match[str]) -> int:
    unit = found["unit"].upper()
    power = 0 if unit.startswith("BYTE") else "BKMGTPE".index(unit[0])  # torch divides by 1024 even for "GB"
    return int(Decimal(found["number"]) * 1024**power)


HALF_PRECISION = "half precision (about half of what is in float32)"


def memory_savings(*, half_precision: str = "", smaller: str = "", checkpointing: str = "") -> tuple[str, ...]:
    """What makes a batch of the same size take less, the gentlest first.

    Each argument says how it is asked for, such as `--dtype bfloat16`; an empty one leaves it out.
    """
    found = (
        HALF_PRECISION.replace("half precision", f"half precision: {half_precision}") if half_precision else "",
        smaller,
        f"{checkpointing} (trades activations for time)" if checkpointing else "",
    )
    return tuple(part for part in found if part)


def memory_remedies(
    savings: Sequence[str],
    *,
    batch_size: int = 1,
    more: str | None = None,
) -> list[str]:
    """Remedies for a workload that does not fit: a smaller batch, what `savings` names, more memory."""
    if more is None:
        more = f"another device with more memory, or a larger {named('memory_limit')}"
    smaller = [f"a smaller batch (it was {batch_size})"] if batch_size > 1 else []
    return [*smaller, *savings, more]
