"""`brim.accumulate`: the gradients of one big batch in a loop of one's own, whatever runs out of memory on the way."""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import brim
from brim.memory.devices import CpuMemory
from brim.training.batch_parts import part_of, samples_in

WIDTH, CLASSES = 32, 5


@pytest.fixture(autouse=True)
def quick_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for cycles takes a fifth of a second each time, and nothing here depends on it."""
    monkeypatch.setattr(CpuMemory, "release", lambda self, thorough=True: None)


def network(*, dropout: float = 0.0, normalise: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 64)]
    layers += [nn.BatchNorm1d(64)] if normalise else []
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, CLASSES)]
    return nn.Sequential(*layers).double()


def data(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, WIDTH, generator=draw, dtype=torch.float64),
        torch.randint(0, CLASSES, (count,), generator=draw),
    )


def mean_loss(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda batch: functional.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def big_batch(model: nn.Module, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = copy.deepcopy(model)
    loss = mean_loss(model)(batch)
    loss.backward()
    return loss.detach(), gradients(model)


def silent(line: str) -> None:
    """Notes that a test does not read."""


class OutOfMemoryAt:
    """A loss function that runs out of memory in some of its calls, the first half of them after a part of backward."""

    def __init__(self, function: Callable[[Any], torch.Tensor], calls: set[int]) -> None:
        self.function, self.calls = function, calls
        self.made = 0
        self.lengths: list[int] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        self.made += 1
        self.lengths.append(len(batch[0]))
        loss = self.function(batch)
        if self.made in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss


# ------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("count", [1, 7, 64])
def test_gradients_and_loss_are_those_of_the_single_big_batch(count: int) -> None:
    model = network()
    batch = data(count)
    expected, wanted = big_batch(model, batch)
    windows = brim.accumulate(mean_loss(model), model=model)
    loss = windows(batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), wanted)
    assert sum(length * number for length, number in windows.micro_batches.items()) == count


def test_a_real_limit_in_the_middle_is_met_by_smaller_micro_batches() -> None:
    """Eight windows of short rows, one of which is sixteen times as long: it alone does not fit at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    lengths = [4] * 5 + [64] + [4] * 2
    draw = torch.Generator().manual_seed(2)
    batches = [torch.randn(32, length, 8, generator=draw, dtype=torch.float64) for length in lengths]

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    losses = []
    windows = brim.accumulate(
        loss_of, batches, model=model, batch_size=32, device="cpu", memory_limit="512KiB", note=silent
    )
    at_window: list[list[torch.Tensor]] = []
    for loss in windows:
        losses.append(loss)
        at_window.append(gradients(model))
        model.zero_grad()
    assert windows.oom_events > 0
    assert windows.peak_reserved_bytes is not None
    assert windows.peak_reserved_bytes <= 512 * 1024
    assert "its window runs again in smaller ones" in windows.notes[0]
    for batch, loss, found in zip(batches, losses, at_window, strict=True):
        model.zero_grad()
        whole = loss_of(batch)
        whole.backward()
        torch.testing.assert_close(loss, whole.detach())
        torch.testing.assert_close(found, gradients(model))


def test_a_redone_window_is_an_undisturbed_one_bit_for_bit() -> None:
    """Dropout draws the same numbers, and running statistics count each sample once."""
    runs = []
    for calls in (set(), {2}):
        model = network(dropout=0.5, normalise=True)
        loss_of = OutOfMemoryAt(mean_loss(model), calls)
        windows = brim.accumulate(loss_of, model=model, batch_size=16 if calls else 8, note=silent)
        torch.manual_seed(7)
        loss = windows(data(32))
        runs.append((loss, *gradients(model), *model.buffers(), torch.rand(3)))
    assert loss_of.lengths == [16, 16, 8, 8, 8, 8]
    assert all(torch.equal(calm, stormy) for calm, stormy in zip(*runs, strict=True))


def test_a_pair_of_sum_and_weight_divides_by_the_tokens_of_the_window() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    ids = torch.randint(1, 11, (24, 9), generator=torch.Generator().manual_seed(3))
    for row in range(24):
        ids[row, 2 + row % 7 :] = 0  # padding

    def summed(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, targets = model(batch[:, :-1]), batch[:, 1:]
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()

    total, tokens = summed(ids)
    (total / tokens).backward()
    wanted = gradients(model)
    model.zero_grad()
    windows = brim.accumulate(summed, model=model, batch_size=5)
    torch.testing.assert_close(windows(ids), (total / tokens).detach())
    torch.testing.assert_close(gradients(model), wanted)


def test_gradients_that_were_there_count_as_well_and_survive_a_failure() -> None:
    model = network()
    batch = data(16)
    _, wanted = big_batch(model, batch)
    windows = brim.accumulate(OutOfMemoryAt(mean_loss(model), {2}), model=model, batch_size=8, note=silent)
    windows(batch)
    windows(batch)
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in wanted])

    def broken(batch: Any) -> torch.Tensor:
        raise ValueError("a bug of one's own")

    before = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match="a bug of one's own"):
        brim.accumulate(broken, model=model)(batch)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), before, strict=True))


def test_layers_may_be_frozen_and_replaced_between_windows() -> None:
    model, batch = network(), data(32)
    model[0].requires_grad_(False)
    loss_of = OutOfMemoryAt(mean_loss(model), set())
    windows = brim.accumulate(loss_of, model=model, batch_size=16, note=silent)
    windows(batch)
    model.zero_grad()
    model[0].requires_grad_(True)
    model[-1] = nn.Linear(64, CLASSES).double()
    expected, wanted = big_batch(model, batch)
    loss_of.calls = {loss_of.made + 2}  # after the first half of the window
    torch.testing.assert_close(windows(batch), expected)
    torch.testing.assert_close(gradients(model), wanted)
    assert windows.oom_events == 1
    windows(batch)
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in wanted])
    model[0].requires_grad_(False)
    windows(batch)
    torch.testing.assert_close(gradients(model), [2 * one for one in wanted[:2]] + [3 * one for one in wanted[2:]])


def test_weights_that_only_the_optimizer_has_are_put_back_too() -> None:
    model, batch = network(), data(32)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)  # of a loss with a weight of its own

    def summed(part: Any) -> tuple[torch.Tensor, int]:
        return functional.cross_entropy(scale * model(part[0]), part[1], reduction="sum"), len(part[1])

    (summed(batch)[0] / len(batch[1])).backward()
    wanted = [scale.grad, *gradients(model)]
    scale.grad = None
    model.zero_grad()
    optimizer = torch.optim.SGD([*model.parameters(), scale])
    windows = brim.accumulate(
        OutOfMemoryAt(summed, {2}), model=model, optimizer=optimizer, batch_size=16, note=silent
    )  # fmt: skip
    windows(batch)
    assert windows.oom_events == 1
    torch.testing.assert_close([scale.grad, *gradients(model)], wanted)


def test_scaled_losses_give_scaled_gradients() -> None:
    model = network()
    batch = data(16)
    _, wanted = big_batch(model, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    brim.accumulate(mean_loss(model), model=model, scaler=scaler)(batch)
    torch.testing.assert_close(gradients(model), [128 * gradient for gradient in wanted])


def test_what_does_not_fit_at_all_says_so() -> None:
    model = network()
    windows = brim.accumulate(mean_loss(model), model=model, device="cpu", memory_limit="16KiB", note=silent)
    with pytest.raises(brim.DoesNotFitError, match=r"not even a micro-batch of 1 fits(.|\n)*gradient checkpointing"):
        windows(data(8))


def test_batch_normalisation_gets_no_micro_batch_of_one() -> None:
    model = network(normalise=True)
    windows = brim.accumulate(mean_loss(model), model=model, batch_size=4)
    windows(data(9))
    assert min(windows.micro_batches) >= 2


# ------------------------------------------------------------------------------------------ loops


def trained(windows: brim.Accumulation, optimizer: torch.optim.Optimizer, epochs: int = 2) -> list[float]:
    losses = []
    for _ in range(epochs):
        for loss in windows:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def test_a_data_set_and_a_loader_train_alike() -> None:
    """The same windows, by brim from a data set and by torch from a loader, in micro-batches and without."""
    inputs, labels = data(50)
    results = []
    for kind in ("data set", "loader", "plain"):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
        options: dict[str, Any] = {"model": model, "batch_size": 5, "optimizer": optimizer}
        if kind == "data set":
            rows = TensorDataset(inputs, labels)
            losses = trained(brim.accumulate(mean_loss(model), rows, effective_batch_size=16, **options), optimizer)
        elif kind == "loader":
            losses = trained(brim.accumulate(mean_loss(model), loader, **options), optimizer)
        else:
            losses = []
            for batch in [*loader, *loader]:
                optimizer.zero_grad()
                loss = mean_loss(model)(batch)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        results.append(losses)
    assert len(results[0]) == 8
    assert results[0] == pytest.approx(results[2])
    assert results[1] == pytest.approx(results[2])


class Words(NamedTuple):
    """Samples of different lengths, which loading processes give as they are."""

    rows: list[list[int]]

    def __getitem__(self, item: Any) -> Any:
        return torch.tensor(self.rows[item])

    def __len__(self) -> int:
        return len(self.rows)


def test_costs_cap_micro_batches_in_padded_tokens_and_every_sample_counts_once() -> None:
    rows = [[1 + (row + place) % 9 for place in range(1 + row % 12)] for row in range(40)]
    model = nn.Embedding(10, 3).double()
    shapes: list[torch.Size] = []

    def summed(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(batch.shape)
        known = batch != 0
        return (model(batch).square().sum(-1) * known).sum(), known.sum()

    def padded(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    windows = brim.accumulate(
        summed,
        Words(rows),
        model=model,
        effective_batch_size=20,
        cost=len,
        collate_fn=padded,
        shuffle=True,
        num_workers=1,
    )
    total = sum(float(loss) for loss in windows)
    assert total > 0
    assert sum(shape[0] for shape in shapes) == 40
    assert all(shape[1] <= 12 for shape in shapes)
    assert {shape[1] for shape in shapes} != {12}  # padded to the longest of its own micro-batch


def test_costs_and_sizes_may_be_whole_numbers_of_numpy() -> None:
    model, rows = nn.Linear(4, 1), torch.ones(8, 4)
    windows = brim.accumulate(
        lambda batch: model(batch).mean(), rows, model=model, effective_batch_size=numpy.int64(4),
        batch_size=numpy.int64(2), cost=lambda row: numpy.int64(3),
    )  # fmt: skip
    assert len(list(windows)) == 2
    assert windows.micro_batches == {2: 4}


def test_a_checkpoint_continues_with_the_next_window_and_the_size_found() -> None:
    inputs, labels = data(60)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, brim.Accumulation]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        windows = brim.accumulate(
            OutOfMemoryAt(mean_loss(model), {1}), TensorDataset(inputs, labels), model=model, effective_batch_size=16,
            batch_size=16, shuffle=True, note=silent,
        )  # fmt: skip
        return model, optimizer, windows

    def steps(windows: brim.Accumulation, optimizer: torch.optim.Optimizer, losses: list[float]) -> Iterator[None]:
        for _ in range(2):
            for loss in windows:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                yield

    model, optimizer, windows = fresh()
    whole: list[float] = []
    saved: dict[str, Any] = {}
    for number, _ in enumerate(steps(windows, optimizer, whole)):
        if number == 5:  # in the second epoch
            saved = json.loads(json.dumps(windows.state_dict()))
            weights = copy.deepcopy(model.state_dict())
    model, optimizer, windows = fresh()
    model.load_state_dict(weights)
    windows.load_state_dict(saved)
    resumed = [float(loss) for loss in _stepped(windows, optimizer)]
    assert resumed == pytest.approx(whole[6:])
    assert set(windows.micro_batches) <= {8, 4, 6}
    with pytest.raises(brim.RequestError, match="state_dict"):
        windows.load_state_dict({"schema": "another"})
    with pytest.raises(brim.RequestError, match="is of 'NoneType'"):
        windows.load_state_dict(None)  # type: ignore[arg-type]


def _stepped(windows: brim.Accumulation, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for loss in windows:
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_checkpoint_in_the_midst_of_an_epoch_is_not_continued_with_other_windows() -> None:
    model, rows = network(), TensorDataset(*data(40))

    def windows(effective_batch_size: int) -> brim.Accumulation:
        return brim.accumulate(
            mean_loss(model), rows, model=model, effective_batch_size=effective_batch_size, note=silent
        )

    first = windows(10)
    epoch = iter(first)
    next(epoch)
    with pytest.raises(brim.RequestError, match=r"\(effective_batch_size 10, now 20\): samples would be left out"):
        windows(20).load_state_dict(first.state_dict())
    list(epoch)
    further = windows(20)
    further.load_state_dict(first.state_dict())
    assert len(list(further)) == 2


def test_a_window_that_ctrl_c_cuts_short_leaves_nothing_and_is_the_next_of_a_checkpoint() -> None:
    """Continued, it is an undisturbed run bit for bit: dropout, running statistics and gradients."""

    def losses(interrupt_at: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, calls = network(dropout=0.5, normalise=True), 0

        def interrupted(batch: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            loss = mean_loss(model)(batch)
            if calls == interrupt_at:
                raise KeyboardInterrupt
            return loss

        windows = brim.accumulate(
            interrupted, TensorDataset(*data(40)), model=model, effective_batch_size=10, batch_size=5, note=silent
        )
        found: list[torch.Tensor] = []
        while len(found) < 4:
            try:
                for loss in windows:
                    found.append(loss)
                    model.zero_grad()
            except KeyboardInterrupt:
                assert gradients(model) == []
                windows.load_state_dict(json.loads(json.dumps(windows.state_dict())))
        return found, list(model.buffers())

    torch.manual_seed(5)
    expected = losses(0)
    torch.manual_seed(5)
    found = losses(6)  # the second micro-batch of the third window
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_epoch_that_is_left_early_is_followed_by_a_whole_one() -> None:
    model = network()
    windows = brim.accumulate(mean_loss(model), TensorDataset(*data(40)), model=model, effective_batch_size=10)
    for _ in windows:
        break
    assert len(list(windows)) == len(windows) == 4


def test_autocast_around_the_loop_holds_inside_the_loss_function() -> None:
    model = network().float()
    dtypes = []

    def loss_of(batch: Any) -> torch.Tensor:
        scores = model(batch[0].float())
        dtypes.append(scores.dtype)
        return functional.cross_entropy(scores.float(), batch[1])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        brim.accumulate(loss_of, model=model)(data(8))
    assert set(dtypes) == {torch.bfloat16}


def test_a_plan_is_where_micro_batches_start() -> None:
    model = network()
    plan = brim.find(
        step=lambda batch: mean_loss(model)(batch).backward(), make_batch=data, model=model, device="cpu",
        max_batch_size=16, no_cache=True,
    )  # fmt: skip
    windows = brim.accumulate(mean_loss(model), model=model, sizer=plan)
    windows(data(64))
    assert max(windows.micro_batches) == plan.batch_size


# ------------------------------------------------------------------------------------------ mistakes


class Stream(IterableDataset[int]):
    """One that knows its length, as some do."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda batch: 3.0, "returned 3.0"),
        (lambda batch: torch.ones(2, requires_grad=True), r"a tensor of shape \[2\]"),
        (lambda batch: torch.ones(()), "the loss has no gradient"),
        (lambda batch: (torch.ones((), requires_grad=True), None), "whose second entry is None"),
        (lambda batch: (torch.ones((), requires_grad=True), -1), "whose second entry is -1"),
        (
            lambda batch: (torch.ones((), requires_grad=True), torch.ones(4, 5)),
            r"a tensor of shape \[4, 5\]: that must",
        ),
        (lambda batch: (torch.ones((), requires_grad=True),) * 2, r"shape \[\] with a gradient"),
    ],
)
def test_what_a_loss_function_must_return_is_said(loss: Any, message: str) -> None:
    with pytest.raises(brim.RequestError, match=message):
        brim.accumulate(loss, model=network())(data(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": 3}, "loss=3"),
        ({"model": []}, "model="),
        ({"model": None}, "model="),
        ({"model": nn.ReLU()}, "none of its weights"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"sizer": 8}, "sizer=8"),
        ({"optimizer": [1]}, "optimizer=: a list"),
        ({"cost": 3}, "cost=3: give a function"),
        ({"collate_fn": 3}, "collate_fn=3: give a function"),
        ({"scaler": 3}, "scaler=3: give a torch.amp.GradScaler"),
        ({"num_workers": "many"}, "num_workers='many': it must be a whole number from 0"),
        ({"samples": torch.ones(4, 2)}, "without effective_batch_size="),
        ({"samples": DataLoader(range(4)), "effective_batch_size": 2}, "is a DataLoader"),
        ({"samples": iter([1]), "effective_batch_size": 2}, "no length or no samples by number"),
        ({"samples": {"inputs": [1]}, "effective_batch_size": 2}, "a dict has no length or no samples by number"),
        ({"samples": Stream(), "effective_batch_size": 2}, "a Stream has no length or no samples by number"),
        ({"model": nn.LazyLinear(2)}, "model=: it has layers without shapes yet"),
        ({"samples": DataLoader(range(4)), "shuffle": True}, "shuffle=True: .* give it to the DataLoader"),
        ({"num_workers": 2}, "num_workers=2: it is for a data set"),
        ({"samples": [1], "effective_batch_size": 0}, "effective_batch_size=0"),
        ({"samples": [1], "effective_batch_size": True}, "effective_batch_size=True"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(change: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"loss": lambda batch: batch, "model": network()} | change
    with pytest.raises(brim.RequestError, match=message):
        brim.accumulate(asked.pop("loss"), **asked)


def test_without_data_it_can_only_be_called() -> None:
    windows = brim.accumulate(lambda batch: batch, model=network())
    with pytest.raises(brim.RequestError, match="give samples="):
        list(windows)
    with pytest.raises(brim.RequestError, match="give samples="):
        len(windows)
    assert windows.micro_batch_size is None


# ------------------------------------------------------------------------------------------ batches in parts


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[str]


def test_a_batch_is_cut_along_its_samples_whatever_holds_them() -> None:
    batch = {"pair": Pair(torch.arange(6), list("abcdef")), "more": [torch.ones(6, 2), torch.tensor(3.0)], "name": "x"}
    assert samples_in(batch) == 6
    part = part_of(batch, 2, 4)
    assert part["pair"] == Pair(part["pair"].left, ["c", "d"])
    assert part["pair"].left.tolist() == [2, 3]
    assert part["more"][0].shape == (2, 2)
    assert part["more"][1].item() == 3.0
    assert part["name"] == "x"


def test_a_mapping_of_a_tokeniser_keeps_its_type_and_what_else_it_has() -> None:
    class Encoding(collections.UserDict):  # as BatchEncoding of transformers
        n_sequences = 0

        def __getattr__(self, name: str) -> Any:
            return vars(self)["data"][name]

    batch = Encoding(input_ids=torch.arange(12).view(4, 3), labels=torch.arange(4))
    batch.n_sequences = 2
    part = part_of(batch, 1, 3)
    assert part.input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert (part.labels.tolist(), part.n_sequences) == ([1, 2], 2)
    assert batch.labels.tolist() == [0, 1, 2, 3]


def test_columns_of_texts_are_not_taken_for_samples() -> None:
    """As torch's `default_collate` makes them of pairs of texts: two columns, not two samples."""
    columns = default_collate([("a", "x"), ("b", "y"), ("c", "z")])
    with pytest.raises(brim.RequestError, match="dictionary of columns"):
        samples_in(columns)
    assert samples_in({"source": list(columns[0]), "target": list(columns[1])}) == 3


@pytest.mark.parametrize("batch", ["text", {"a": 3}, (torch.ones(2), torch.ones(3))])
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any) -> None:
    with pytest.raises(brim.RequestError, match="collate_fn="):
        samples_in(batch)
