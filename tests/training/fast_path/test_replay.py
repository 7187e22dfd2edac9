"""What is captured and when it is replayed, on a card that is played: a graph that calls the step it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.generation.graphs import CaptureFailedError
from brim.training.fast_path import stacked_epochs
from brim.training.fast_path.task import RunsListener, Settings
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
def played_card(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.replays = 0
    monkeypatch.setattr(stacked_epochs, "graphs_work_on", lambda device: True)
    monkeypatch.setattr(stacked_epochs, "shared_pool", lambda device: object())
    monkeypatch.setattr(stacked_epochs, "capture", lambda step, pool: Graph(step))


def train(path: str = "stacked", listener: RunsListener | None = None, **more: Any) -> TrainedRuns:
    settings = Settings(**{"epochs": 5, "batch_size": 8, "lr_factor": lambda step: 0.9**step, **more})
    return train_runs(preference_problem(), specs(3), settings, device="cpu", path=path, listener=listener)


@pytest.mark.parametrize("path", ["stacked", "resident"])
def test_replayed_steps_train_as_eager_ones(path: str, played_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    played_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = 0

    def capture(step: Callable[[], Any], device: torch.device) -> Graph:
        nonlocal captured
        captured += 1
        return Graph(step)

    monkeypatch.setattr(stacked_epochs, "capture", capture)
    monkeypatch.setattr("brim.training.fast_path.choose.Paths._time", lambda self, choice: _no_trial(choice))
    train("stacked", epochs=4)  # 23 rows: two steps of eight and one of seven, of each of which two run eagerly first
    assert captured == 2
    assert Graph.replays == (2 * 4 - 2) + (4 - 2)


def _no_trial(choice: Any) -> Any:
    from brim.training.fast_path.choose import PathTrial

    return PathTrial(path=choice.path, runs=choice.stack, seconds_per_step=1.0, peak_allocated_bytes=1)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_is_told(
    played_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: Callable[[], Any], device: torch.device) -> Graph:
        raise CaptureFailedError("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(stacked_epochs, "capture", refuse)
    trained = train()
    assert not trained.graph
    (note,) = trained.notes
    assert note.startswith("steps ran eagerly, without a CUDA graph: it could not be captured: RuntimeError")
    assert all(outcome.weights for outcome in trained.outcomes)
