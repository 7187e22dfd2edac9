"""`brim.find_executable_batch_size` in the place of accelerate's: the cases of accelerate's own tests, and brim's.

The table in docs/integrations/accelerate.md has a row for each.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from accelerate.utils import find_executable_batch_size as theirs
from torch import nn

import brim
from brim.memory.devices import CpuMemory

Decorator = Callable[..., Any]
OOM = "CUDA out of memory."


@pytest.fixture(autouse=True)
def quick_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for cycles takes a fifth of a second each time, and nothing here depends on it."""
    monkeypatch.setattr(CpuMemory, "release", lambda self, thorough=True: None)


def fitting(most: int) -> tuple[list[int], Callable[..., Any]]:
    """A function that runs at up to `most`, and the sizes that it was called with."""
    sizes: list[int] = []

    def loop(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        sizes.append(batch_size)
        if batch_size > most:
            raise RuntimeError(OOM)
        return batch_size, args, kwargs

    return sizes, loop


def halving(start: int) -> Callable[[], int]:
    current = start

    def halve() -> int:
        nonlocal current
        current //= 2
        return current

    return halve


both = pytest.mark.parametrize("decorator", [theirs, brim.find_executable_batch_size], ids=["accelerate", "brim"])


# ------------------------------------------------------------------------------------------ what both do alike


@both
def test_the_function_is_called_until_a_size_fits_and_its_result_returned(decorator: Decorator) -> None:
    sizes, loop = fitting(8)
    size, args, kwargs = decorator(loop, starting_batch_size=128)()
    assert sizes[0] == 128
    assert sizes == sorted(set(sizes), reverse=True)
    assert size == sizes[-1] <= 8
    assert (args, kwargs) == ((), {})


@both
def test_arguments_follow_the_batch_size(decorator: Decorator) -> None:
    @decorator(starting_batch_size=64)
    def loop(batch_size: int, name: str, *, rate: float) -> tuple[int, str, float]:
        if batch_size > 16:
            raise RuntimeError(OOM)
        return batch_size, name, rate

    size, name, rate = loop("hello", rate=0.5)
    assert size <= 16
    assert (name, rate) == ("hello", 0.5)


@both
def test_a_start_at_zero_is_a_runtime_error(decorator: Decorator) -> None:
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        decorator(lambda batch_size: None, starting_batch_size=0)()


@both
def test_a_function_that_never_fits_is_a_runtime_error(decorator: Decorator) -> None:
    sizes, loop = fitting(0)
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        decorator(loop, starting_batch_size=16)()
    assert sizes[-1] == 1


@both
def test_a_reduction_of_the_users_own_decides_the_sizes(decorator: Decorator) -> None:
    sizes, loop = fitting(16)
    decorator(starting_batch_size=256, reduce_batch_size_fn=halving(256))(loop)()
    direct, again = fitting(16)
    decorator(again, starting_batch_size=256, reduce_batch_size_fn=halving(256))()
    assert sizes == direct == [256, 128, 64, 32, 16]


@both
def test_a_batch_size_that_is_passed_by_hand_is_a_type_error_that_says_so(decorator: Decorator) -> None:
    @decorator(starting_batch_size=128)
    def loop(batch_size: int, first: str, second: str) -> None:
        raise AssertionError("it must not be called")

    with pytest.raises(TypeError, match=r"(?i)batch size"):
        loop(128, "hello", "world")


def test_a_batch_size_that_is_passed_by_name_is_left_out_of_the_call_that_is_shown() -> None:
    def loop(batch_size: int, first: str, second: str) -> None:
        raise AssertionError("it must not be called")

    with pytest.raises(TypeError, match=r"call loop\('hello', second='world'\)"):
        brim.find_executable_batch_size(loop)("hello", batch_size=128, second="world")


def test_the_call_that_is_shown_is_in_one_line_and_one_that_works() -> None:
    def loop(batch_size: int, model: nn.Module, rows: torch.Tensor) -> None:
        raise AssertionError("it must not be called")

    sized = brim.find_executable_batch_size(loop)
    with pytest.raises(TypeError, match=r"call loop\(<Sequential>, <Tensor>\)$") as raised:
        sized(128, nn.Sequential(nn.Linear(2, 2)), torch.ones(40, 40))  # type: ignore[call-arg, arg-type]
    assert "\n" not in str(raised.value)
    with pytest.raises(TypeError, match=r"missing a required argument: 'rows'$"):
        sized(nn.Linear(2, 2))  # type: ignore[call-arg]


def test_sizes_may_be_whole_numbers_of_numpy() -> None:
    sizes, loop = fitting(4)
    options: dict[str, Any] = {"max_batch_size": numpy.int64(20), "note": lambda line: None}
    brim.find_executable_batch_size(loop, numpy.int64(16), lambda: numpy.int64(4), **options)()
    assert sizes == [16, 4]
    assert [type(size) for size in sizes] == [int, int]


@both
def test_any_other_error_is_raised_as_it_is(decorator: Decorator) -> None:
    @decorator(starting_batch_size=16)
    def loop(batch_size: int) -> None:
        raise ValueError("Oops, we had an error!")

    with pytest.raises(ValueError, match=r"Oops, we had an error!"):
        loop()


@both
def test_the_reduced_size_is_kept_for_later_calls(decorator: Decorator) -> None:
    sizes, loop = fitting(30)
    decorated = decorator(loop, starting_batch_size=64)
    first, *_ = decorated()
    del sizes[:]
    assert decorated()[0] == first
    assert sizes == [first]


@both
def test_a_function_that_has_returned_is_not_run_again(decorator: Decorator) -> None:
    sizes, loop = fitting(1000)
    assert decorator(loop, starting_batch_size=8)()[0] == 8
    assert sizes == [8]


@both
def test_it_decorates_without_parentheses_and_methods_too(decorator: Decorator) -> None:
    class Trainer:
        @decorator
        def train(batch_size: int, self: Trainer, steps: int) -> tuple[int, int]:  # noqa: N805  # as accelerate has it
            return batch_size, steps

    assert Trainer().train(3) == (128, 3)


# ------------------------------------------------------------------------------------------ what differs on purpose


def test_far_fewer_tries_than_a_tenth_less_each_time() -> None:
    """accelerate's own case, up to 8 of 128: 23 tries there."""
    sizes, loop = fitting(8)
    brim.find_executable_batch_size(loop, starting_batch_size=128)()
    assert sizes == [128, 64, 32, 16, 8]


def test_arguments_beyond_a_star_are_no_mistake() -> None:
    def loop(batch_size: int, *rest: int) -> tuple[int, ...]:
        return rest

    with pytest.raises(TypeError):
        theirs(loop)(1, 2, 3)
    assert brim.find_executable_batch_size(loop)(1, 2, 3) == (1, 2, 3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
)
def test_errors_that_accelerate_does_not_know_are_survived(error: Exception) -> None:
    def loop(batch_size: int) -> int:
        if batch_size > 4:
            raise error
        return batch_size

    with pytest.raises(type(error)):
        theirs(loop, starting_batch_size=8)()
    assert brim.find_executable_batch_size(loop, starting_batch_size=8)() == 4


def test_an_error_that_may_not_be_memory_is_tried_once_and_then_raised() -> None:
    sizes: list[int] = []

    def loop(batch_size: int) -> None:
        sizes.append(batch_size)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if")

    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        brim.find_executable_batch_size(loop, starting_batch_size=8)()
    assert sizes == [8, 4]


def test_when_nothing_fits_the_error_has_its_cause_and_brims_kind() -> None:
    _, loop = fitting(0)
    with pytest.raises(brim.DoesNotFitError, match="What may help") as caught:
        brim.find_executable_batch_size(loop, starting_batch_size=2)()
    assert OOM in str(caught.value.__cause__)


@pytest.mark.parametrize("returned", [8, 9, "4", None])
def test_a_reduction_that_does_not_reduce_is_refused(returned: Any) -> None:
    _, loop = fitting(1)
    with pytest.raises(brim.RequestError, match="must return a smaller whole number"):
        brim.find_executable_batch_size(loop, 8, lambda: returned)()


@pytest.mark.parametrize(
    "wrong",
    [
        {"starting_batch_size": -1}, {"starting_batch_size": 1.5}, {"reduce_batch_size_fn": 3}, {"max_batch_size": 4},
        {"restore": nn.Sequential(nn.Linear(2, 2))},
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_where_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(brim.RequestError, match=next(iter(wrong))):
        brim.find_executable_batch_size(fitting(1)[1], **{"starting_batch_size": 8} | wrong)
    with pytest.raises(brim.RequestError, match=r"function=3: .* write starting_batch_size=3"):
        brim.find_executable_batch_size(3)


def test_a_function_without_a_place_for_the_batch_size_is_refused() -> None:
    class Trainer:
        def train(self, batch_size: int) -> int:  # would be called with the batch size as self
            return batch_size

    with pytest.raises(brim.RequestError, match=r"write def train\(batch_size, self\)"):
        brim.find_executable_batch_size(Trainer.train)
    with pytest.raises(brim.RequestError, match=r"write def nothing\(batch_size\)"):

        @brim.find_executable_batch_size
        def nothing() -> None: ...

    with pytest.raises(brim.RequestError, match=r"function=by_name\(\*, batch_size\): .* def by_name\(batch_size\)"):

        @brim.find_executable_batch_size  # type: ignore[type-var, arg-type]
        def by_name(*, batch_size: int) -> None: ...

    assert brim.find_executable_batch_size(Trainer().train, starting_batch_size=4)() == 4


def test_a_function_that_returns_before_its_body_runs_is_refused() -> None:
    def batches(batch_size: int) -> Any:
        yield batch_size

    async def train(batch_size: int) -> None:
        pass

    for function in (batches, train, functools.partial(train)):
        with pytest.raises(brim.RequestError, match="returns before its body runs"):
            brim.find_executable_batch_size(function)


def test_models_whose_writes_torch_does_not_count_can_be_given() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    sizes, loop = fitting(4)
    brim.find_executable_batch_size(loop, starting_batch_size=8, note=lambda line: None)(model, nn.LazyLinear(2))
    assert sizes == [8, 4]


def test_a_note_says_above_only_of_a_size_above_the_one_that_ran() -> None:
    most = [16]

    def loop(batch_size: int) -> int:
        if batch_size > most[0]:
            raise RuntimeError(OOM)
        torch.ones(batch_size, 2**10)
        return batch_size

    notes: list[str] = []
    options: dict[str, Any] = {"device": "cpu", "memory_limit": "1MiB", "note": notes.append}
    sized = brim.find_executable_batch_size(loop, 16, max_batch_size=18, **options)
    assert sized() == 16
    most[0] = 12
    sized()
    at = {trial.batch_size: "above" in note for trial, note in zip(sized.trials[1:], notes, strict=False)}
    assert at[18]
    assert not at[16]


def test_the_decorated_function_keeps_its_name_and_shows_what_it_takes() -> None:
    @brim.find_executable_batch_size
    def train(batch_size: int, steps: int) -> int:
        """Trains."""
        return batch_size * steps

    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert list(inspect.signature(train).parameters) == ["steps"]


# ------------------------------------------------------------------------------------------ with real memory


def stack(layers: int = 8, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def training(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int]) -> Callable[[int], int]:
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        for _ in range(2):
            model(torch.ones(batch_size, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    return train


def tries_by_tenths(start: int, size: int) -> int:
    tries = 1
    while start > size:
        start, tries = int(start * 0.9), tries + 1
    return tries


def test_a_real_limit_is_met_near_the_largest_size_in_few_tries() -> None:
    model = stack()
    sizes: list[int] = []
    train = training(model, torch.optim.SGD(model.parameters(), lr=0.0), sizes)
    fits = brim.find_executable_batch_size(
        train, starting_batch_size=4096, device="cpu", memory_limit="1MiB", note=lambda line: None
    )
    size = fits()
    assert [trial.verdict for trial in fits.trials] == ["oom"] * (len(sizes) - 1) + ["fits"]
    assert all(trial.needed_bytes > 2**20 for trial in fits.trials[:-1])
    assert 2 * len(sizes) < tries_by_tenths(4096, size)
    larger = brim.find_executable_batch_size(
        train, starting_batch_size=round(1.25 * size), device="cpu", memory_limit="1MiB", note=lambda line: None
    )
    assert larger() < round(1.25 * size)  # the size found was at least four fifths of what fits


def test_a_later_call_starts_higher_only_where_that_was_asked() -> None:
    model = stack()
    sizes: list[int] = []
    train = training(model, torch.optim.SGD(model.parameters(), lr=0.0), sizes)
    options: dict[str, Any] = {"starting_batch_size": 16, "device": "cpu", "memory_limit": "1MiB"}
    kept = brim.find_executable_batch_size(train, **options)
    assert [kept(), kept()] == [16, 16]
    asked = brim.find_executable_batch_size(train, **options, max_batch_size=4096, note=lambda line: None)
    assert asked() == 16
    assert 16 < asked() < 1024


def test_it_says_what_the_failed_call_has_changed_and_puts_back_what_is_named() -> None:
    model, other = stack(2), stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def train(batch_size: int, network: nn.Module) -> torch.Tensor:
        drawn = torch.rand(3)
        other(torch.ones(2, 64))  # read, not changed
        network(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        if batch_size > 4:
            raise RuntimeError(OOM)
        return drawn

    notes: list[str] = []
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    drawn = brim.find_executable_batch_size(train, starting_batch_size=8, note=notes.append)(model)
    assert torch.equal(drawn, expected)  # random generators are put back in any case
    assert "it is called again with 4" in notes[0]
    assert "network (Sequential), optimizer (SGD)" in notes[1]
    assert "other" not in notes[1]

    model.load_state_dict(before)
    optimizer.state.clear()
    optimizer.zero_grad()
    notes.clear()
    named = brim.find_executable_batch_size(train, starting_batch_size=8, restore=[model, optimizer], note=notes.append)
    named(model)
    assert len(notes) == 1
    single = stack(2)
    single_optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    single.load_state_dict(before)
    single(torch.ones(2, 64)).square().mean().backward()
    single_optimizer.step()
    pairs = zip(model.state_dict().values(), single.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)  # one step was made, not two


def test_what_the_object_of_a_method_holds_is_watched_and_not_kept() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.lost: list[bool] = []

        def train(self, batch_size: int) -> int:
            before = weakref.ref(self.head)
            self.head = nn.Linear(2, 2)
            self.lost.append(before() is None)
            with torch.no_grad():
                self.model.weight.add_(1)
            if batch_size > 4:
                raise RuntimeError(OOM)
            return batch_size

    trainer, notes = Trainer(), list[str]()
    assert brim.find_executable_batch_size(trainer.train, 8, note=notes.append)() == 4
    assert "has changed: self.model (Linear). Make" in notes[1]
    assert trainer.lost == [True, True]


def test_an_error_that_a_failed_call_has_left_behind_says_so() -> None:
    """Memory ran out between the two halves of Adam's state; the next step misses the second."""
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB, as its gradient and each half
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def train(batch_size: int) -> None:
        model(torch.ones(batch_size, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    options: dict[str, Any] = {"device": "cpu", "memory_limit": "14MiB", "note": lambda line: None}
    decorated = brim.find_executable_batch_size(train, starting_batch_size=8, **options)
    with pytest.raises(KeyError, match="exp_avg_sq") as caught:
        decorated()
    assert "optimizer (Adam)" in caught.value.__notes__[0]
    optimizer.state.clear()
    optimizer.zero_grad()
    named = brim.find_executable_batch_size(train, starting_batch_size=8, restore=[model, optimizer], **options)
    with pytest.raises(brim.DoesNotFitError):
        named()


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_failed_call_held_is_gone_before_the_next_one(wrapped: bool) -> None:
    """Not even by the error that an error was raised from; nothing here waits for the garbage collector."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fail(kept: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(OOM)

    def train(batch_size: int) -> list[bool]:
        gone = [one() is None for one in held]
        activations = torch.ones(batch_size)
        held.append(weakref.ref(activations))
        if batch_size > 2:
            try:
                fail(activations)
            except torch.OutOfMemoryError as error:
                if wrapped:
                    raise RuntimeError("the step failed") from error
                raise
        return gone

    assert brim.find_executable_batch_size(train, starting_batch_size=8, note=lambda line: None)() == [True, True]


def test_without_a_listener_a_retry_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, loop = fitting(4)
    brim.find_executable_batch_size(loop, starting_batch_size=8)()
    assert "loop() failed at batch size 8 (CUDA out of memory): it is called again with 4" in caplog.text


def test_one_of_several_ranks_does_not_begin_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    sizes, loop = fitting(4)
    with pytest.raises(brim.LostError, match=r"rank 1 of 2 ran out of memory in loop\(\) at batch size 8"):
        brim.find_executable_batch_size(loop, starting_batch_size=8)()
    assert sizes == [8]
    assert brim.find_executable_batch_size(loop, starting_batch_size=8, per_rank=True)()[0] == 4


# ------------------------------------------------------------------------------------------ as toma is used


def test_a_chunked_tensor_continues_at_the_chunk_that_failed() -> None:
    """toma's `chunked`, by `brim.batches`: what was done stays done."""
    done: list[tuple[int, int]] = []
    rows = torch.arange(64.0)
    result = torch.zeros(64)
    for batch in brim.batches(rows, batch_size=32, note=lambda line: None):
        with batch as chunk:
            if len(batch) > 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
            result[list(batch.indices)] = chunk * 2
            done.append((batch.indices[0], batch.indices[-1] + 1))
    assert torch.equal(result, rows * 2)
    assert [start for start, _ in done] == sorted({start for start, _ in done})
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(done))
