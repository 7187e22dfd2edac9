from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from brim.errors import DoesNotFitError
from brim.memory.failures import Failure, FailureKind, classify, classify_exit, without_tracebacks

GIB = 2**30

# Every CUDA error carries this advice; "device-side assertions" in it is no assertion that failed.
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NCCL_HEAD = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)

OUT_OF_MEMORY = {
    "cuda": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "cuda-error": "CUDA error: out of memory" + CUDA_ADVICE,
    "cuda-driver": "CUDA driver error: out of memory",
    "cuda-runtime": "cuda runtime error (2) : out of memory at /opt/aten/src/THC/THCCachingHostAllocator.cpp:278",
    "hip": "HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 63.98 GiB",
    "hip-error": "HIP error: out of memory",
    "xpu": "XPU out of memory. Tried to allocate 20.00 GiB (GPU 0; 15.91 GiB total capacity)",
    "async-allocator": "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 6.89 GiB\nRequested               : 320.00 MiB\nDevice limit            : 23.69 GiB",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "hipblas": "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cusolver": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cudnn-9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cufft": "cuFFT error: CUFFT_ALLOC_FAILED",
    "mps": "MPS backend out of memory (MPS allocated: 8.50 GB, other allocations: 384 KB, max allowed: 9.07 GB). "
    "Tried to allocate 256.00 MB on private pool.",
    "level-zero-memory": "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level-zero-resources": "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "cpu-linux": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
    "cpu-windows": "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 4096 bytes.",
    "cpp": "std::bad_alloc",
    "mig": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report',
    "tegra": 'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "../c10/cuda/'
    'CUDACachingAllocator.cpp":1123, please report a bug to PyTorch.',
    "triton": "Triton Error [CUDA]: out of memory",
    "loader-killed": "DataLoader worker (pid 4711) is killed by signal: Killed. ",
}
COMMUNICATOR_DEAD = {
    "nccl": NCCL_HEAD + "Cuda failure 'out of memory'",
    "nccl-numbered": NCCL_HEAD + "Cuda failure 2 'out of memory'",
    "nccl-calloc": NCCL_HEAD + "Failed to CUDA calloc async 608 bytes",
}
AMBIGUOUS = {
    "cudnn-support": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cudnn-internal": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cudnn-algorithm": "Unable to find a valid cuDNN algorithm to run convolution",
    "cudnn-engine": "GET was unable to find an engine to execute this computation",
    "cudnn-attention": "Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, "
    "but got false.  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)",
    "cudnn-attention-older": "Expected mha_graph->execute(handle, variant_pack, workspace_ptr.get()).is_good() to be "
    "true, but got false.",
    "cublas-handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "nccl-bare": NCCL_HEAD,
}
SIZE_LIMIT = {
    "index-math": "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
    "int-max": "upsample_nearest2d: input tensor has more than INT_MAX elements",
    "mps-buffer": "Invalid buffer size: 20.00 GB",
    "launch": "CUDA error: invalid configuration argument" + CUDA_ADVICE,
}
FATAL = {
    "illegal-access": "CUDA error: an illegal memory access was encountered" + CUDA_ADVICE,
    "assert": "CUDA error: device-side assert triggered" + CUDA_ADVICE,
    "allocator": '!handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":487, please report',
    "launch-failure": "CUDA error: unspecified launch failure" + CUDA_ADVICE,
}
DEVICE_LOST = {
    "level-zero": "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "nvml": "GPU is lost",
    "ecc": "CUDA error: uncorrectable ECC error encountered" + CUDA_ADVICE,
}
NOT_MEMORY = {
    "triton": "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or "
    "`num_stages` may help. (CUDA out of memory)",
    "inductor": "No valid triton configs. OutOfResources: out of resource: shared memory, Required: 131072",
    "shm": "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are "
    "out of shared memory. Please try to raise your shared memory limit. (CUDA error: out of memory)",
    "engine-cache": "No available memory for the cache blocks. Try increasing the utilization. CUDA out of memory",
}


def each(messages: dict[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", messages.values(), ids=messages.keys())


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@each(OUT_OF_MEMORY)
def test_out_of_memory_is_recognised_by_the_message(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert not failure.communicator_dead
    assert not failure.device_lost


@pytest.mark.parametrize(("case", "library"), [("cublas", "cuBLAS"), ("hipblas", "hipBLAS"), ("cusolver", "cuSOLVER")])
def test_the_library_that_could_not_allocate_is_named(case: str, library: str) -> None:
    assert classify(RuntimeError(OUT_OF_MEMORY[case])).reason == f"{library} could not allocate its handle"


@each(COMMUNICATOR_DEAD)
def test_out_of_memory_in_nccl_marks_the_communicator_dead(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.communicator_dead


@each(AMBIGUOUS)
def test_ambiguous_messages_are_not_called_out_of_memory(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.AMBIGUOUS
    assert failure.communicator_dead == ("nccl" in message)


@each(SIZE_LIMIT)
def test_size_limits_are_distinguished_from_memory(message: str) -> None:
    assert classify(RuntimeError(message)).kind is FailureKind.SIZE_LIMIT


@each(FATAL)
def test_fatal_errors_are_distinguished(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.FATAL
    assert not failure.device_lost


@each(DEVICE_LOST)
def test_a_lost_device_is_fatal_and_reported_as_lost(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.FATAL
    assert failure.device_lost


@each(NOT_MEMORY)
def test_errors_that_only_sound_like_memory_win_over_its_message(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure.kind is FailureKind.OTHER
    assert failure.reason != "RuntimeError is not about memory"  # recognised, not merely unknown


@each({**OUT_OF_MEMORY, **AMBIGUOUS, **SIZE_LIMIT, **NOT_MEMORY})
def test_fatal_text_wins_over_any_other_text(message: str) -> None:
    poisoned = RuntimeError(f"{message}\nCUDA error: an illegal memory access was encountered")
    assert classify(poisoned).kind is FailureKind.FATAL


@each({**OUT_OF_MEMORY, **FATAL})
def test_case_does_not_matter(message: str) -> None:
    assert classify(RuntimeError(message.upper())).kind is classify(RuntimeError(message)).kind


@pytest.mark.parametrize(
    "message",
    [
        "cuda runtime error (59) : something else at /opt/pytorch/THC.cpp:1",
        "CUDA error: no kernel image is available for execution on the device" + CUDA_ADVICE,
        NCCL_HEAD + "Cuda failure 1 'invalid argument'",
        "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
        "the list of candidates is out of memory of earlier runs",
        "DataLoader worker (pid(s) 12, 13) exited unexpectedly",
    ],
)
def test_unrelated_runtime_errors_are_other(message: str) -> None:
    failure = classify(RuntimeError(message))
    assert failure == Failure(kind=FailureKind.OTHER, reason="RuntimeError is not about memory")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory of my list"),
        ValueError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        KeyError("CUBLAS_STATUS_ALLOC_FAILED"),
        AssertionError("an illegal memory access was encountered"),
        OSError(errno.ENOSPC, "No space left on device: CUDA out of memory"),
    ],
    ids=repr,
)
def test_text_of_other_types_is_not_read(error: Exception) -> None:
    assert classify(error).kind is FailureKind.OTHER


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("words never seen before"), "device out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "CUDA out of memory"),
        (torch.OutOfMemoryError("XPU out of memory."), "XPU out of memory"),
        (MemoryError(), "host out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host out of memory"),
    ],
    ids=repr,
)
def test_the_type_alone_is_enough(error: Exception, reason: str) -> None:
    assert classify(error) == Failure(
        kind=FailureKind.OUT_OF_MEMORY, reason=reason, requested_bytes=GIB if "1 GiB" in str(error) else None
    )


@pytest.mark.parametrize("error_type", ["AcceleratorError", "distributed.DistBackendError", "jit.Error"])
def test_torch_error_types_are_read(error_type: str) -> None:
    holder: object = torch
    for name in error_type.split("."):
        holder = getattr(holder, name, None)
    if holder is None:
        pytest.skip(f"this torch has no {error_type}")
    assert isinstance(holder, type)
    assert classify(holder("CUDA error: out of memory" + CUDA_ADVICE)).kind is FailureKind.OUT_OF_MEMORY


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_never_memory(interrupt: type[BaseException]) -> None:
    error = interrupt("CUDA out of memory")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert classify(error).kind is FailureKind.OTHER


def test_an_explicit_cause_decides_for_its_wrapper() -> None:
    def act() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        except torch.OutOfMemoryError as oom:
            raise ValueError("step 7 failed") from oom

    failure = classify(raised(act))
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.requested_bytes == 3 * GIB


def test_a_cause_is_found_behind_several_wrappers() -> None:
    outer, middle = ValueError("run failed"), RuntimeError("step failed")
    outer.__cause__, middle.__cause__ = middle, MemoryError()
    assert classify(outer).kind is FailureKind.OUT_OF_MEMORY


@pytest.mark.parametrize("unrelated", [ValueError("no checkpoint to go back to"), RuntimeError("bad shape")])
def test_an_error_raised_while_handling_oom_is_not_oom(unrelated: Exception) -> None:
    def act() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        except torch.OutOfMemoryError:
            raise unrelated  # noqa: B904

    error = raised(act)
    assert isinstance(error.__context__, torch.OutOfMemoryError)
    assert classify(error).kind is FailureKind.OTHER


def test_an_error_that_quotes_the_oom_it_handles_is_oom() -> None:
    def act() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        except torch.OutOfMemoryError as oom:
            raise ValueError(f"step 7 failed: {oom}")  # noqa: B904

    assert classify(raised(act)).kind is FailureKind.OUT_OF_MEMORY


def test_raise_from_none_cuts_the_chain() -> None:
    def act() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as oom:
            raise ValueError(f"step 7 failed: {oom}") from None

    assert classify(raised(act)).kind is FailureKind.OTHER


def test_a_fatal_cause_wins_over_an_outer_out_of_memory() -> None:
    error = RuntimeError("CUDA error: out of memory")
    error.__cause__ = RuntimeError("CUDA error: device-side assert triggered")
    assert classify(error).kind is FailureKind.FATAL


def test_brims_own_conclusion_is_not_retried_as_oom() -> None:
    error = DoesNotFitError("not even one sample fits")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert classify(error).kind is FailureKind.OTHER


def test_a_circular_chain_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first).kind is FailureKind.OTHER
    member = torch.OutOfMemoryError(OUT_OF_MEMORY["cuda"])
    member.__cause__ = ExceptionGroup("tasks", [member, ValueError("b")])
    assert classify(member).kind is FailureKind.OUT_OF_MEMORY


MEMORY = torch.OutOfMemoryError(OUT_OF_MEMORY["cuda"])


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([MEMORY, RuntimeError(OUT_OF_MEMORY["cublas"])], FailureKind.OUT_OF_MEMORY),
        ([ExceptionGroup("inner", [MEMORY])], FailureKind.OUT_OF_MEMORY),
        ([MEMORY, RuntimeError(SIZE_LIMIT["index-math"])], FailureKind.OUT_OF_MEMORY),
        ([MEMORY, RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")], FailureKind.AMBIGUOUS),
        ([MEMORY, ValueError("shapes differ")], FailureKind.OTHER),
        ([MEMORY, DoesNotFitError("nothing fits")], FailureKind.OTHER),
        ([MEMORY, ValueError("shapes differ"), RuntimeError(FATAL["assert"])], FailureKind.FATAL),
    ],
)
def test_a_group_of_errors_is_about_memory_only_if_all_of_them_are(errors: list[Exception], kind: FailureKind) -> None:
    assert classify(ExceptionGroup("tasks", errors)).kind is kind


def test_no_error_of_a_group_keeps_its_frames() -> None:
    member = raised(lambda: torch.ones(2) + torch.ones(3))
    assert isinstance(member, RuntimeError)
    assert member.__traceback__ is not None
    without_tracebacks(ExceptionGroup("tasks", [member]))
    assert member.__traceback__ is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity)", 2 * GIB),
        ("CUDA out of memory. Tried to allocate 1.50 MiB", 3 * 2**19),
        ("CUDA out of memory. Tried to allocate 512.00 KiB", 2**19),
        ("CUDA out of memory. Tried to allocate 3.00 TiB", 3 * 2**40),
        ("MPS backend out of memory. Tried to allocate 256 bytes on private pool.", 256),
        ("MPS backend out of memory. Tried to allocate 256.00 MB on private pool.", 2**28),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 9223372036854775805 bytes.", 2**63 - 3),
        (OUT_OF_MEMORY["async-allocator"], 320 * 2**20),
        (COMMUNICATOR_DEAD["nccl-calloc"], 608),
        ("CUDA out of memory. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_requested_bytes_are_read(message: str, expected: int | None) -> None:
    assert classify(RuntimeError(message)).requested_bytes == expected


def test_the_requested_bytes_of_a_numpy_memory_error_are_read() -> None:
    assert classify(MemoryError("Unable to allocate 7.50 GiB for an array with shape (1,)")).requested_bytes == (
        int(7.5 * GIB)
    )


def test_a_real_allocation_too_large_for_the_host_is_out_of_memory() -> None:
    failure = classify(raised(lambda: torch.empty(2**60, dtype=torch.uint8)))
    assert failure == Failure(kind=FailureKind.OUT_OF_MEMORY, reason="host out of memory", requested_bytes=2**60)


def test_a_real_python_allocation_too_large_for_the_host_is_out_of_memory() -> None:
    assert classify(raised(lambda: bytearray(2**60))).kind is FailureKind.OUT_OF_MEMORY


def test_a_real_tensor_past_64_bits_is_a_size_limit() -> None:
    assert classify(raised(lambda: torch.empty(2**62))).kind is FailureKind.SIZE_LIMIT


def test_a_real_shape_error_is_other() -> None:
    assert classify(raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3))).kind is FailureKind.OTHER


TORCHSCRIPT = """The following operation failed in the TorchScript interpreter.
Traceback of TorchScript (most recent call last):
  File "model.py", line 7, in forward
def forward(n: int):
    # CUDA out of memory was seen here once
    return torch.empty([n], dtype=torch.uint8)
           ~~~~~~~~~~~ <--- HERE
{error}
"""


def test_torchscript_is_read_by_the_error_it_quotes() -> None:
    oom = RuntimeError(TORCHSCRIPT.format(error="RuntimeError: CUDA out of memory. Tried to allocate 4.00 GiB."))
    assert classify(oom) == Failure(
        kind=FailureKind.OUT_OF_MEMORY, reason="CUDA out of memory", requested_bytes=4 * GIB
    )


def test_quoted_source_code_is_not_read() -> None:
    assert classify(RuntimeError(TORCHSCRIPT.format(error="RuntimeError: bad shape"))).kind is FailureKind.OTHER


def test_the_native_stack_behind_a_message_is_not_read() -> None:
    text = "bad shape\nException raised from check at x.cpp:1 (most recent call first):\nframe #0: std::bad_alloc"
    assert classify(RuntimeError(text)).kind is FailureKind.OTHER


class FailingItems(torch.utils.data.Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error


class NeedsTwoArguments(Exception):  # noqa: N818
    """A DataLoader cannot make it again, and raises a RuntimeError with its text instead."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError(COMMUNICATOR_DEAD["nccl"]),
            FailureKind.OUT_OF_MEMORY,
        ),  # quotes "ncclUnhandledCudaError:"
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureKind.OUT_OF_MEMORY),
        (OSError(errno.ENOENT, "no file"), FailureKind.OTHER),
        (ValueError("CUDA out of memory"), FailureKind.OTHER),
        (NeedsTwoArguments("CUDA out of memory", "again"), FailureKind.OTHER),
    ],
    ids=repr,
)
def test_an_error_of_a_dataloader_worker_keeps_its_meaning(error: Exception, kind: FailureKind) -> None:
    # The same wrapper that a worker's error crosses the process border in, without the process.
    def reraise() -> None:
        try:
            FailingItems(error)[0]
        except Exception:
            wrapper = torch._utils.ExceptionWrapper(where="in DataLoader worker process 0")
        wrapper.reraise()

    wrapped = raised(reraise)
    assert "Original Traceback" in str(wrapped)
    assert classify(wrapped).kind is kind


def test_a_worker_that_vanished_is_judged_by_the_signal_that_killed_it() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly")
    error.__cause__ = RuntimeError(OUT_OF_MEMORY["loader-killed"])
    assert classify(error).kind is FailureKind.OUT_OF_MEMORY
    error.__cause__ = RuntimeError(NOT_MEMORY["shm"])
    assert classify(error).kind is FailureKind.OTHER


def test_reasons_are_one_short_line() -> None:
    messages = {**OUT_OF_MEMORY, **COMMUNICATOR_DEAD, **AMBIGUOUS, **SIZE_LIMIT, **FATAL, **DEVICE_LOST, **NOT_MEMORY}
    for message in messages.values():
        reason = classify(RuntimeError(message)).reason
        assert 0 < len(reason) <= 100
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("returncode", "kind"),
    [
        (-9, FailureKind.OUT_OF_MEMORY),
        (137, FailureKind.OUT_OF_MEMORY),
        (-6, FailureKind.FATAL),
        (134, FailureKind.FATAL),
        (-11, FailureKind.FATAL),
        (139, FailureKind.FATAL),
        (-7, FailureKind.FATAL),
        (135, FailureKind.FATAL),
        (1, FailureKind.OTHER),
        (9, FailureKind.OTHER),
        (-15, FailureKind.OTHER),
        (255, FailureKind.OTHER),
    ],
)
def test_exit_codes_are_distinguished(returncode: int, kind: FailureKind) -> None:
    failure = classify_exit(returncode)
    assert failure is not None
    assert failure.kind is kind


def test_a_clean_exit_is_no_failure() -> None:
    assert classify_exit(0) is None


def test_a_kill_is_not_claimed_as_proof_of_out_of_memory() -> None:
    failure = classify_exit(-9)
    assert failure is not None
    assert "signal 9" in failure.reason
    assert "not prove" in failure.reason


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(-15, "was killed by signal 15"), (143, "was killed by signal 15"), (3, "ended with exit code 3")],
)
def test_other_exits_say_how_the_process_ended(returncode: int, words: str) -> None:
    failure = classify_exit(returncode)
    assert failure is not None
    assert words in failure.reason


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"


@pytest.mark.parametrize(
    ("message", "own"),
    [
        ("memory limit of 1048576 bytes: 4096 in use, tried to allocate 4194304 bytes more", True),
        (
            f"{FULL} 139.80 GiB of which 100.00 GiB is free. Process 7 has 39.00 GiB memory in use. 24.00 GiB allowed",
            True,
        ),
        (f"{FULL} 139.80 GiB of which 412.00 MiB is free. Process 7 has 139.00 GiB memory in use.", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False),
    ],
)
def test_a_process_limit_is_distinguished_from_a_full_device(message: str, own: bool) -> None:
    failure = classify(torch.OutOfMemoryError(message))
    assert (failure.kind, failure.own_limit) == (FailureKind.OUT_OF_MEMORY, own)
