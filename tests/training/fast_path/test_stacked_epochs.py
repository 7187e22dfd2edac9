"""Which steps are captured and replayed, on a simulated card: a graph that calls the step it holds.

An epoch whose captured steps gave no number is run again, eagerly, from where it began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.generation.graphs import CaptureFailedError
from brim.training.fast_path import stacked_epochs
from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.stacked_epochs import EpochRunner, StackFigures, train_together
from brim.training.fast_path.stacked_runs import StackedRuns
from brim.training.fast_path.task import RunOutcome, RunsListener, RunsRequest, Settings
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from tests.training.fast_path.fast_path_problems import preference_problem, specs


class Graph:
    """Calls the step that it was made of."""

    replays = 0

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def replay(self) -> None:
        Graph.replays += 1
        self._step()


@pytest.fixture
def simulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.replays = 0
    monkeypatch.setattr(stacked_epochs, "graphs_work_on", lambda device: True)
    monkeypatch.setattr(stacked_epochs, "shared_pool", lambda device: object())
    monkeypatch.setattr(stacked_epochs, "capture", lambda step, pool: Graph(step))


def train(path: str = "stacked", listener: RunsListener | None = None, **more: Any) -> TrainedRuns:
    settings = Settings(**{"epochs": 5, "batch_size": 8, "lr_factor": lambda step: 0.9**step, **more})
    asked = RunsRequest(task=preference_problem(), specs=specs(3), settings=settings, device="cpu", path=path)
    return train_runs(asked, listener=listener)


@pytest.mark.parametrize("path", ["stacked", "resident"])
def test_replayed_steps_train_as_eager_ones(path: str, simulated_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = train(path)
    assert replayed.graph
    assert Graph.replays >= 11  # those of the trial not counted
    monkeypatch.setattr(stacked_epochs, "graphs_work_on", lambda device: False)
    eager = train(path)
    assert not eager.graph
    for one, other in zip(replayed.outcomes, eager.outcomes, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-12)
        for name, weights in one.weights.items():
            torch.testing.assert_close(weights, other.weights[name], rtol=1e-12, atol=1e-12)


def test_the_last_and_smaller_step_of_an_epoch_has_a_graph_of_its_own(
    simulated_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = 0

    def capture(step: Callable[[], Any], device: torch.device) -> Graph:
        nonlocal captured
        captured += 1
        return Graph(step)

    monkeypatch.setattr(stacked_epochs, "capture", capture)
    monkeypatch.setattr("brim.training.fast_path.choose.PathChooser._time", lambda self, choice: _no_trial(choice))
    train("stacked", epochs=4)  # 23 rows: two steps of eight and one of seven, of each of which two run eagerly first
    assert captured == 2
    assert Graph.replays == (2 * 4 - 2) + (4 - 2)


def _no_trial(choice: Any) -> Any:
    from brim.training.fast_path.choose import PathTrial

    return PathTrial(path=choice.path, runs=choice.stack, seconds_per_step=1.0, peak_allocated_bytes=1)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_is_noted(
    simulated_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: Callable[[], Any], device: torch.device) -> Graph:
        raise CaptureFailedError("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(stacked_epochs, "capture", refuse)
    trained = train()
    assert not trained.graph
    (note,) = trained.notes
    assert note.startswith("steps ran eagerly, without a CUDA graph: it could not be captured: RuntimeError")
    assert all(outcome.weights for outcome in trained.outcomes)


SETTINGS = Settings(epochs=4, batch_size=8)


class SpoiltRunner(EpochRunner):
    """Behaves as a runner on a card whose graph gives no number in one epoch, and spoils the weights on the way."""

    def __init__(self, *arguments: object, spoilt: int | None, hopeless: bool = False) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.spoilt, self.hopeless = spoilt, hopeless
        self.eager_epochs: list[int] = []

    @property
    def may_replay(self) -> bool:
        return self.graph_failure is None

    def run(self, epoch: int, *, eager: bool = False) -> torch.Tensor:
        losses = super().run(epoch, eager=eager)
        if eager:
            self.eager_epochs.append(epoch)
        if epoch == self.spoilt and (not eager or self.hopeless):
            losses = losses.clone()
            losses[1, 1:] = torch.nan
            self.runs._weights[1] = torch.nan  # type: ignore[attr-defined]
        return losses


def train_spoilt(*, spoilt: int | None, hopeless: bool = False) -> tuple[list[RunOutcome], StackFigures, SpoiltRunner]:
    problem = preference_problem()
    plan, device = problem.plan(SETTINGS), torch.device("cpu")
    models = [problem.make_model(spec.seed) for spec in specs(3)]
    runs = StackedRuns(models, specs(3), problem, SETTINGS, device)
    feed = RowFeed(problem.data, plan, specs(3), stacked=True, device=device, resident=True)
    runner = SpoiltRunner(runs, feed, plan, spoilt=spoilt, hopeless=hopeless)
    outcomes, figures = train_together(runner, SETTINGS, problem, RunsListener())
    return outcomes, figures, runner


@pytest.mark.parametrize("spoilt", [0, 2], ids=["the one it was captured in", "a later one"])
def test_the_epoch_is_redone_and_the_result_is_that_of_an_undisturbed_run(spoilt: int) -> None:
    disturbed, figures, runner = train_spoilt(spoilt=spoilt)
    undisturbed, _, _ = train_spoilt(spoilt=None)
    assert runner.eager_epochs == [spoilt]
    assert f"from epoch {spoilt + 1} on energies lie too far apart" in figures.notes[0]
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-12)
        for name, weights in one.weights.items():
            torch.testing.assert_close(weights, other.weights[name], rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_no_number_eagerly_either_ends_its_run_alone() -> None:
    outcomes, figures, runner = train_spoilt(spoilt=2, hopeless=True)
    assert runner.eager_epochs[0] == 2
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert "in epoch 3, step 8" in str(outcomes[1].error)
    assert "the weights of epoch 2 are kept" in str(outcomes[1].error)
    assert figures.notes == []
    assert torch.isfinite(outcomes[1].weights["0.weight"]).all()
