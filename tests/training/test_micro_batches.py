"""A window that does not fit runs again in smaller micro-batches, as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import DoesNotFitError, LostError
from brim.memory.devices import CpuMemory, memory_of
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter, WindowDone, WindowWork
from brim.training.objective import Batch, Classification, LossSum
from tests.trials import micro_ran

WIDTH = 16
CLASSES = 3


class Faulty(Classification):
    """Raises what `fault` gives for the n-th forward of a length, if it gives anything."""

    def __init__(self, fault: Callable[[int, int], Exception | None]) -> None:
        super().__init__(CLASSES)
        self.fault = fault
        self.lengths: list[int] = []

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert batch.labels is not None
        self.lengths.append(len(batch.labels))
        found = super().loss(model, batch)
        error = self.fault(len(self.lengths), len(batch.labels))
        if error is not None:
            raise error
        return found


@pytest.fixture(autouse=True)
def quick_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for cycles takes a fifth of a second each time, and nothing here depends on it."""
    monkeypatch.setattr(CpuMemory, "release", lambda self, thorough=True: None)


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def network(*, dropout: float = 0.0, normalise: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 32)]
    layers += [nn.BatchNorm1d(32)] if normalise else []
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers)


def micro_batches(model: nn.Module, objective: Classification, **options: Any) -> MicroBatches:
    request = MicroBatchRequest(**{"ceiling": None, "largest": 32, **options.pop("sizes", {})})
    gradients = GradientPass(model=model, objective=objective, device=torch.device("cpu"))
    meter = PeakMeter(memory_of("cpu"), enabled=options.pop("metered", False), **options.pop("meter", {}))
    return MicroBatches(gradients, MicroBatchSizer(request), meter, **options)


def work(count: int = 32, seed: int = 1) -> WindowWork:
    draw = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(count, WIDTH, generator=draw), torch.randint(0, CLASSES, (count,), generator=draw)

    def fetch(items: Sequence[int]) -> Batch:
        rows = torch.tensor(list(items))
        return Batch(inputs[rows], labels[rows])

    return WindowWork(items=range(count), costs=[1] * count, samples=count, fetch=fetch)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def seen(done: WindowDone) -> list[int]:
    return [item for part in done.parts for item in part.items]


def test_a_window_is_redone_in_halves_and_its_gradients_are_the_same() -> None:
    model = network()
    plain = micro_batches(copy.deepcopy(model), Classification(CLASSES), sizes={"ceiling": 32})
    plain.run(work())
    faulty = Faulty(lambda call, length: oom() if length == 32 else None)
    redone = micro_batches(model, faulty, sizes={"ceiling": 32})
    told: list[str] = []
    redone._note = told.append
    done = redone.run(work())
    assert faulty.lengths == [32, 16, 16]
    assert seen(done) == list(range(32))
    assert redone.sizes.oom_events == 1
    assert "a micro-batch of 32 failed" in told[0]
    for one, other in zip(gradients(model), gradients(plain.gradients.model), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("first", "failing", "lengths"),
    [
        (32, (1, 2), [32, 16, 8, 8, 8, 8]),  # the first part fails, twice
        (16, (2,), [16, 16, 8, 8, 8, 8]),  # one part has run: its gradients and statistics are there
    ],
)
def test_a_redone_window_is_an_undisturbed_one_bit_for_bit(
    first: int, failing: tuple[int, ...], lengths: list[int]
) -> None:
    """Gradients, running statistics and random numbers are all from the window's start."""
    model, reference = network(dropout=0.5, normalise=True), network(dropout=0.5, normalise=True)
    calm = micro_batches(reference, Classification(CLASSES), sizes={"ceiling": 8})
    torch.manual_seed(7)
    calm.run(work())
    expected = torch.rand(3)
    faulty = Faulty(lambda call, length: oom() if call in failing else None)
    stormy = micro_batches(model, faulty, sizes={"ceiling": first})
    torch.manual_seed(7)
    stormy.run(work())
    assert faulty.lengths == lengths
    assert torch.equal(torch.rand(3), expected)
    for one, other in zip(gradients(model), gradients(reference), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_real_limit_on_the_cpu_is_met_by_smaller_micro_batches() -> None:
    model = network()
    inner = work(count=512)
    free = micro_batches(copy.deepcopy(model), Classification(CLASSES), sizes={"ceiling": 512, "largest": 512})
    free.run(inner)
    limit = 96 * 1024
    tight = micro_batches(
        model, Classification(CLASSES), metered=True, sizes={"ceiling": 512, "largest": 512, "limit_bytes": limit}
    )
    with tight._memory.limited(limit):
        done = tight.run(inner)
    assert tight.sizes.oom_events > 0
    assert tight.meter.peak.peak_allocated_bytes <= limit
    assert seen(done) == list(range(512))
    for one, other in zip(gradients(model), gradients(free.gradients.model), strict=True):
        torch.testing.assert_close(one, other)


def test_the_size_grows_back_when_the_pressure_has_passed() -> None:
    pressure = [True]
    faulty = Faulty(lambda call, length: oom() if pressure[0] and length > 4 else None)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 32})
    runner.run(work())
    assert runner.sizes.next_size() == 4
    pressure[0] = False
    for _ in range(2):
        runner.run(work())
    assert 4 < runner.sizes.next_size() < 8  # towards the size that failed, and not to it
    for _ in range(100):
        runner.run(work())
    assert runner.sizes.next_size() > 16
    assert runner.sizes.oom_events == 3  # 32, 16, 8: and none since


class Neighbour:
    """Another process that holds the card's memory, until it gives it back."""

    limit = 2**30

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fits: int = 4) -> None:
        self.holds, self.fits = False, fits
        monkeypatch.setattr(CpuMemory, "left_by_others_bytes", lambda memory: self.left_bytes())
        self.waits: list[float] = []
        monkeypatch.setattr("brim.training.micro_batches.wait", self.wait)
        self.gives_back_after: float = 0.0

    def left_bytes(self) -> int:
        return 0 if self.holds else self.limit

    def fault(self, call: int, length: int) -> Exception | None:
        return oom() if self.holds and length > self.fits else None

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.holds = self.holds and sum(self.waits) < self.gives_back_after


def test_the_size_returns_in_the_next_window_if_others_held_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour(monkeypatch)
    faulty = Faulty(neighbour.fault)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 32, "limit_bytes": neighbour.limit})
    told: list[str] = []
    runner._note = told.append
    runner.run(work())
    neighbour.holds = True
    for _ in range(2):
        runner.run(work())
    assert runner.sizes.next_size() <= 4 + 2  # it tries a little more now and then
    neighbour.holds = False
    done = runner.run(work())
    assert [len(part.items) for part in done.parts] == [32]
    assert runner.sizes.next_size() == 32
    assert "given memory back" in told[-1]


def test_a_size_that_failed_on_its_own_does_not_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neighbour = Neighbour(monkeypatch)
    faulty = Faulty(lambda call, length: oom() if length > 4 else None)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 32, "limit_bytes": neighbour.limit})
    for _ in range(2):
        runner.run(work())
    assert faulty.lengths == [32, 16, 8] + [4] * 16


def test_where_others_leave_nothing_at_all_the_window_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour(monkeypatch, fits=0)
    neighbour.holds, neighbour.gives_back_after = True, 8.0
    runner = micro_batches(network(), Faulty(neighbour.fault), sizes={"ceiling": 4, "limit_bytes": neighbour.limit})
    assert seen(runner.run(work(4))) == [0, 1, 2, 3]
    assert neighbour.waits == [1, 1, 2, 4]
    runner.run(work(4))
    assert runner.sizes.next_size() == 4


def test_no_wait_is_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour(monkeypatch, fits=0)
    neighbour.holds, neighbour.gives_back_after = True, 1000.0
    runner = micro_batches(network(), Faulty(neighbour.fault), sizes={"ceiling": 4, "limit_bytes": neighbour.limit})
    with pytest.raises(DoesNotFitError, match="not even a micro-batch of 1 fits"):
        runner.run(work(4))
    assert sum(neighbour.waits) == 64


def test_allocator_retries_caused_by_other_processes_keep_the_size() -> None:
    from brim.memory.devices import MemoryReading

    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, known=40, largest=40, limit_bytes=1000))
    for _ in range(6):
        sizes.begin_window()
        micro_ran(sizes, 40, 40, None, None)
        sizes.end_window()
        sizes.stepped(2, left_bytes=10)
    assert sizes.next_size() == 40
    looking = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=1024, limit_bytes=1_000_000))
    looking.begin_window()
    for _ in range(4):
        micro_ran(looking, 2, 2, 0.2, MemoryReading(peak_reserved_bytes=10_000, alloc_retries=1), 10)
    assert not looking.settled


def test_with_every_relapse_the_size_comes_back_later() -> None:
    """A limit that stays is not run into again and again."""
    faulty = Faulty(lambda call, length: oom() if length > 4 else None)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 32})
    failed_at = []
    for number in range(400):
        before = runner.sizes.oom_events
        runner.run(work())
        failed_at += [number] * (runner.sizes.oom_events > before)
    assert len(failed_at) < 14
    assert failed_at[-1] - failed_at[-2] >= 3 * (failed_at[2] - failed_at[1])


def test_a_failed_size_is_not_tried_again_at_once() -> None:
    faulty = Faulty(lambda call, length: oom() if length > 4 else None)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 32})
    runner.run(work())
    before = len(faulty.lengths)
    runner.run(work())
    assert set(faulty.lengths[before:]) == {4}


def test_nothing_smaller_left_is_exit_3_with_remedies() -> None:
    runner = micro_batches(network(), Faulty(lambda call, length: oom()), sizes={"ceiling": 4})
    with pytest.raises(DoesNotFitError, match="not even a micro-batch of 1 fits") as caught:
        runner.run(work(4))
    assert "another device with more memory" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("asked", [{}, {"ceiling": 8}, {"ceiling": 8, "fixed": True}, {"unit": "tokens"}])
def test_a_window_whose_parts_cannot_be_as_short_as_what_fits_ends_with_exit_3(asked: dict[str, Any]) -> None:
    calls_allowed = 60
    faulty = Faulty(
        lambda call, length: AssertionError("for ever") if call > calls_allowed else oom() if length > 2 else None
    )
    runner = micro_batches(network(normalise=True), faulty, sizes={"smallest": 2, "largest": 9, **asked})
    with pytest.raises(DoesNotFitError, match="not even a micro-batch of 3 fits"):
        runner.run(work(9))


def test_a_fixed_size_is_split_for_its_window_and_tried_in_full_again() -> None:
    faulty = Faulty(lambda call, length: oom() if call == 1 else None)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 16, "fixed": True})
    runner.run(work())
    runner.run(work())
    assert faulty.lengths == [16, 8, 8, 8, 8, 16, 16]


def test_fail_on_oom_is_an_error_instead() -> None:
    faulty = Faulty(lambda call, length: oom())
    runner = micro_batches(network(), faulty, sizes={"ceiling": 16, "fixed": True}, fail_on_oom=True)
    with pytest.raises(DoesNotFitError, match="fail_on_oom"):
        runner.run(work())


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    runner = micro_batches(network(), Faulty(lambda call, length: KeyError("labels")), sizes={"ceiling": 8})
    with pytest.raises(KeyError, match="labels"):
        runner.run(work())


def test_a_lost_device_is_exit_4() -> None:
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    runner = micro_batches(network(), Faulty(lambda call, length: fault), sizes={"ceiling": 8})
    with pytest.raises(LostError, match="resume"):
        runner.run(work())


def test_an_ambiguous_error_is_tried_smaller_once_and_then_raised() -> None:
    fault = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
    faulty = Faulty(lambda call, length: fault)
    runner = micro_batches(network(), faulty, sizes={"ceiling": 16})
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        runner.run(work())
    assert faulty.lengths == [16, 8]


def test_the_size_is_found_on_the_first_windows_and_nothing_is_wasted() -> None:
    """Every micro-batch that is tried is part of a window; later windows are cut evenly."""
    runner = micro_batches(network(), Classification(CLASSES))
    windows = [runner.run(work(seed=number)) for number in range(60)]  # one look in each at the largest sizes
    assert all(seen(done) == list(range(32)) for done in windows)
    assert [len(part.items) for part in windows[0].parts][:2] == [2, 2]
    assert runner.sizes.settled
    last = [len(part.items) for part in windows[-1].parts]
    assert max(last) - min(last) <= 1
    assert {probe.batch_size for probe in runner.sizes.probes} >= {2, 4}


def test_absent_gradients_and_states_count_while_the_size_is_found() -> None:
    """Bytes that do not exist yet are reserved: without that, the byte model would allow too much."""
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=1024, limit_bytes=1_000_000))
    sizes.absent_bytes = 400_000
    from brim.memory.devices import MemoryReading

    sizes.begin_window()
    for length, peak in ((2, 102_000), (2, 102_000), (4, 104_000), (4, 104_000)):
        micro_ran(
            sizes, length, length, 0.2 * length**0.1, MemoryReading(peak_allocated_bytes=peak, peak_reserved_bytes=peak)
        )
    assert sizes.live.evidence.bytes.points == [(2, 502_000), (4, 504_000)]
    assert sizes.live.evidence.bytes.largest_within(970_000) == 470


def test_a_hiccup_of_the_machine_does_not_settle_the_size() -> None:
    """Short steps are timed several times, and the best time counts."""
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=1024))
    calls = 0
    for _ in range(200):
        sizes.begin_window()
        left = 1024
        while left:
            length = sizes.next_length(left)
            calls += 1
            hiccup = 0.05 if calls % 3 == 0 else 0.0
            micro_ran(sizes, length, length, 0.001 + 1e-6 * length + hiccup, None)
            left -= length
        sizes.end_window()
    assert sizes.settled
    assert sizes.next_size() >= 512


def test_the_rest_of_a_window_is_neither_warm_up_nor_trial() -> None:
    """20 of 32 right after the climb took as long as 32: counted, they would have ended the search at half the rate."""
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=128))
    sizes.live.size = 32
    sizes.begin_window()
    micro_ran(sizes, 32, 32, 1.0, None)
    assert not sizes.new
    micro_ran(sizes, 32, 32, 0.5, None)
    assert (sizes.live.size, sizes.new) == (64, True)
    micro_ran(sizes, 44, 44, 9.0, None)
    assert sizes.new
    sizes.end_window()
    sizes.begin_window()
    micro_ran(sizes, 64, 64, 2.0, None)
    assert not sizes.new
    micro_ran(sizes, 40, 40, 9.0, None)
    assert (sizes.live.size, sizes.settled) == (64, False)


def test_the_size_used_is_that_of_the_windows_after_it_was_found() -> None:
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=128))
    for _ in range(6):
        sizes.begin_window()
        for _ in range(32):
            micro_ran(sizes, 4, 4, 0.1, None)
        sizes.end_window()
    used = sizes.sizes_used()
    assert used is not None
    assert used.median == 4
    sizes.live.phase = "settled"
    sizes.begin_window()
    for _ in range(2):
        micro_ran(sizes, 64, 64, None, None)
    sizes.end_window()
    used = sizes.sizes_used()
    assert used is not None
    assert (used.smallest, used.median, used.largest) == (4, 64, 64)
    again = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=128))
    again.restore(sizes.to_json())
    assert again.sizes_used() == used


def test_a_micro_batch_that_ran_short_of_memory_does_not_count_as_fitting() -> None:
    from brim.memory.devices import MemoryReading

    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=1024, limit_bytes=1_000_000))
    sizes.begin_window()
    for _ in range(2):
        micro_ran(sizes, 2, 2, 0.2, MemoryReading(peak_reserved_bytes=10_000))
    assert sizes.next_size() == 4
    for cap in (4, 3):  # the first time the allocator may be putting its cache in order
        micro_ran(sizes, 4, 4, 0.2, MemoryReading(peak_reserved_bytes=20_000, alloc_retries=1))
        assert sizes.next_size() == cap
    assert sizes.settled
    assert [probe.verdict for probe in sizes.probes] == ["fits", "thrashes"]


def test_an_allocator_retry_in_the_first_micro_batch_is_ignored() -> None:
    from brim.memory.devices import MemoryReading

    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, largest=1024, limit_bytes=1_000_000))
    sizes.begin_window()
    for _ in range(2):
        micro_ran(sizes, 2, 2, 0.2, MemoryReading(peak_reserved_bytes=10_000))
    micro_ran(sizes, 4, 4, 0.2, MemoryReading(peak_reserved_bytes=999_000, alloc_retries=1))
    micro_ran(sizes, 4, 4, 0.2, MemoryReading(peak_reserved_bytes=20_000))
    assert sizes.next_size() > 4
    assert [probe.verdict for probe in sizes.probes] == ["fits", "fits"]


@pytest.mark.parametrize(
    ("retries", "cap"), [((1, 1, 0, 1, 1), 40), ((1, 1, 1, 0, 0), 36), ((1,) * 6, 30), ((1,) * 60, 26)]
)
def test_repeated_allocator_retries_lower_a_settled_size(retries: tuple[int, ...], cap: int) -> None:
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, known=40, largest=40))
    for step in retries:
        sizes.begin_window()
        length = sizes.next_length(400)  # in equal parts: 40, then 34
        micro_ran(sizes, length, length, None, None)
        sizes.end_window()
        sizes.stepped(step)
    assert sizes.next_size() == cap


def test_allocator_retries_do_not_change_a_fixed_size() -> None:
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=40, fixed=True))
    for _ in range(6):
        sizes.begin_window()
        micro_ran(sizes, 40, 40, None, None)
        sizes.end_window()
        sizes.stepped(5)
    assert sizes.next_size() == 40


def test_weights_of_a_window_are_the_models_in_its_order_each_once() -> None:
    """Also shared ones, and where a layer stands twice or is missing."""
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {"a": nn.Sequential(shared, nn.BatchNorm1d(4)), "b": nn.ModuleList([shared, nn.Linear(4, 2)])}
    )
    model["c"] = nn.Linear(4, 4)
    model["c"].weight = shared.weight
    model.register_module("missing", None)
    next(model["a"][1].parameters()).requires_grad_(False)
    expected = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = micro_batches(model, Classification(CLASSES)).gradients.trainable()
    assert [id(one) for one in found] == [id(one) for one in expected]
