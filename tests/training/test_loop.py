from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.sizing.micro_batches import micro_batch_length
from brim.training.loop import (
    EndedEpoch,
    EpochBackend,
    EpochRules,
    Progress,
    Window,
    epoch_order,
    next_window,
    run_epochs,
)

counts = st.integers(min_value=1, max_value=200)


@given(counts, st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(count))
    assert order == epoch_order(count, seed=seed, epoch=epoch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(counts, st.integers(1, 64), st.integers(1, 4), st.integers(1, 3))
def test_windows_cover_an_epoch_and_ranks_a_window(count: int, batch: int, ranks: int, smallest: int) -> None:
    order = epoch_order(count, seed=0, epoch=0)
    position, seen = 0, []
    while position < count:
        window = next_window(position, count, batch, smallest=smallest * ranks)
        shares = [window.share(order, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        seen += [item for share in shares for item in share]
        assert sum(map(len, shares)) == window.samples
        rest = count - window.stop
        assert rest == 0 or rest >= smallest * ranks  # nothing is left that could not be a window
        position = window.stop
    assert sorted(seen) == list(range(count))


def test_a_share_does_not_depend_on_where_windows_begin() -> None:
    order = epoch_order(40, seed=1, epoch=0)
    whole = Window(start=0, stop=40).share(order, rank=1, ranks=3)
    parts = [Window(start=a, stop=b).share(order, rank=1, ranks=3) for a, b in ((0, 7), (7, 8), (8, 31), (31, 40))]
    assert [item for part in parts for item in part] == whole


@given(counts, counts, st.integers(1, 3), st.booleans())
def test_micro_batches_make_up_the_share_and_none_is_too_short(count: int, cap: int, smallest: int, even: bool) -> None:
    lengths = []
    left = count
    while left:
        lengths.append(micro_batch_length(left, cap, smallest=smallest, even=even))
        assert lengths[-1] >= 1
        left -= lengths[-1]
    assert sum(lengths) == count
    if count >= smallest:
        assert min(lengths) >= smallest
    if cap >= 2 * smallest:
        assert max(lengths) <= max(cap, 2 * smallest - 1)
    if even and smallest == 1:
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == math.ceil(count / cap)


@pytest.mark.parametrize(("left", "expected"), [(65, 33), (64, 64), (128, 64), (3, 3)])
def test_an_even_cut_leaves_no_lone_sample(left: int, expected: int) -> None:
    assert micro_batch_length(left, 64) == expected


def test_cost_is_padded_to_the_costliest_item() -> None:
    assert micro_batch_length(10, 100, costliest=30, even=False) == 3
    assert micro_batch_length(10, 100, costliest=300, even=False) == 1  # past the cap, but it cannot be made smaller


RULES = EpochRules(epochs=9, monitor="top1", higher_is_better=True, early_stopping=2)


def judged(rules: EpochRules, epochs: Sequence[dict[str, float]]) -> tuple[list[bool], Progress]:
    """Whether each epoch was the best so far, where an epoch is its figures of validation."""
    progress, better = Progress(), []
    for figures in epochs:
        progress.add_loss(figures.get("train", 1.0), 1.0)
        progress.end_epoch(figures)
        better.append(progress.judge(figures, rules))
    return better, progress


def test_best_epoch_and_patience_follow_the_validation_figure() -> None:
    better, progress = judged(RULES, [{"top1": 0.5}, {"top1": 0.7}, {"top1": 0.6}])
    assert (better, progress.best_epoch, progress.waited) == ([True, True, False], 1, 1)
    assert not progress.stopped_early
    _, progress = judged(RULES, [{"top1": 0.5}, {"top1": 0.7}, {"top1": 0.6}, {"top1": 0.7}])
    assert progress.stopped_early


@pytest.mark.parametrize("breaks_ties", [True, False])
def test_of_equals_the_lower_loss_is_better_but_no_gain(breaks_ties: bool) -> None:
    rules = dataclasses.replace(RULES, loss_breaks_ties=breaks_ties)
    better, progress = judged(rules, [{"top1": 0.5, "loss": 2.0}, {"top1": 0.5, "loss": 1.0}])
    assert better == [True, breaks_ties]
    assert progress.waited == 1


def test_a_change_below_min_delta_is_no_gain() -> None:
    rules = dataclasses.replace(RULES, monitor="loss", higher_is_better=False, early_stopping_min_delta=0.1)
    better, _ = judged(rules, [{"loss": 1.0}, {"loss": 0.95}, {"loss": 0.8}])
    assert better == [True, False, True]


def test_a_nan_figure_is_never_the_best() -> None:
    better, progress = judged(RULES, [{"top1": math.nan}, {"top1": 0.5}, {"top1": math.nan}])
    assert better == [False, True, False]
    assert (progress.best_epoch, progress.best_value) == (1, 0.5)


def test_an_epoch_without_the_monitored_figure_is_not_judged() -> None:
    better, progress = judged(RULES, [{"top1": 0.5}, {}, {"top1": 0.4}])
    assert better == [True, False, False]
    assert progress.waited == 1


def test_without_validation_the_training_loss_is_compared() -> None:
    rules = EpochRules(epochs=9, validated=False)
    progress = Progress()
    better = []
    for loss in (2.0, 1.0, 1.5):
        progress.add_loss(loss, 1.0)
        progress.end_epoch({})
        better.append(progress.judge({}, rules))
    assert better == [True, True, False]
    assert judged(dataclasses.replace(rules, monitor=None), [{}, {}])[0] == [True, True]


def test_validation_is_due_every_n_epochs_and_in_the_last_one() -> None:
    rules = EpochRules(epochs=5, eval_every=2)
    due = [rules.validates(Progress(epoch=epoch)) for epoch in range(5)]
    assert due == [False, True, False, True, True]
    assert EpochRules(epochs=5, eval_every=2, max_steps=8).validates(Progress(epoch=2, step=8))
    assert not dataclasses.replace(rules, validated=False).validates(Progress(epoch=4))


def test_max_steps_ends_a_run_only_when_its_epoch_has_ended() -> None:
    rules = EpochRules(epochs=5, max_steps=8)
    assert not rules.finished(Progress(step=8, position=16))
    assert rules.finished(Progress(step=8, position=0))


class ThreeRuns(EpochBackend):
    """The second run stops early, the third fails in its second epoch."""

    def __init__(self) -> None:
        self.progress = [Progress() for _ in range(3)]
        self.trained: list[list[int]] = []
        self.ended: list[list[tuple[int, bool, bool]]] = []

    def train_epoch(self, running: Sequence[int]) -> list[int]:
        self.trained.append(list(running))
        alive = [run for run in running if not (run == 2 and self.progress[run].epoch == 1)]
        for run in alive:
            self.progress[run].add_steps(10, steps=2)
        return alive

    def validate(self, running: Sequence[int]) -> dict[int, dict[str, float]]:
        return {run: {"top1": 0.5 if run == 1 else 0.1 * self.progress[run].epoch} for run in running}

    def epoch_facts(self, run: int) -> dict[str, Any]:
        return {"learning_rate": run}

    def epoch_ended(self, ended: Sequence[EndedEpoch]) -> None:
        self.ended.append([(epoch.run, epoch.better, epoch.stopped) for epoch in ended])


def test_runs_that_stop_or_fail_leave_the_loop_and_the_others_continue() -> None:
    backend = ThreeRuns()
    run_epochs(backend, dataclasses.replace(RULES, epochs=4))
    assert backend.trained == [[0, 1, 2], [0, 1, 2], [0, 1], [0]]
    assert backend.ended[2] == [(0, True, False), (1, False, True)]
    assert [one.epoch for one in backend.progress] == [4, 3, 1]
    assert backend.progress[0].rows[-1]["learning_rate"] == 0
    assert backend.progress[0].rows[-1]["samples"] == 40


def test_a_finished_run_is_not_trained_again() -> None:
    backend = ThreeRuns()
    backend.progress = [Progress(epoch=9), Progress(epoch=3, stopped_early=True)]
    run_epochs(backend, RULES)
    assert backend.trained == []
