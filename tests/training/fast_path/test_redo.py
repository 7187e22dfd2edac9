"""An epoch whose captured steps gave no number is run again, eagerly, from where it began."""

from __future__ import annotations

import pytest
import torch

from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.stacked_epochs import EpochRunner, StackFigures, train_together
from brim.training.fast_path.stacked_runs import StackedRuns
from brim.training.fast_path.task import RunOutcome, RunsListener, Settings
from tests.training.fast_path.fast_path_problems import preference_problem, specs

SETTINGS = Settings(epochs=4, batch_size=8)


class Replaying(EpochRunner):
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


def train(*, spoilt: int | None, hopeless: bool = False) -> tuple[list[RunOutcome], StackFigures, Replaying]:
    problem = preference_problem()
    plan, device = problem.plan(SETTINGS), torch.device("cpu")
    models = [problem.make_model(spec.seed) for spec in specs(3)]
    runs = StackedRuns(models, specs(3), problem.criterion, SETTINGS, device)
    feed = RowFeed(problem.data, plan, specs(3), stacked=True, device=device, resident=True)
    runner = Replaying(runs, feed, plan, spoilt=spoilt, hopeless=hopeless)
    outcomes, figures = train_together(runner, SETTINGS, problem, RunsListener())
    return outcomes, figures, runner


@pytest.mark.parametrize("spoilt", [0, 2], ids=["the one it was captured in", "a later one"])
def test_the_epoch_is_redone_and_the_result_is_that_of_an_undisturbed_run(spoilt: int) -> None:
    disturbed, figures, runner = train(spoilt=spoilt)
    undisturbed, _, _ = train(spoilt=None)
    assert runner.eager_epochs == [spoilt]
    assert f"from epoch {spoilt + 1} on energies lie too far apart" in figures.notes[0]
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-12)
        for name, weights in one.weights.items():
            torch.testing.assert_close(weights, other.weights[name], rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_no_number_eagerly_either_ends_its_run_alone() -> None:
    outcomes, figures, runner = train(spoilt=2, hopeless=True)
    assert runner.eager_epochs[0] == 2
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert "in epoch 3, step 8" in str(outcomes[1].error)
    assert "the weights of epoch 2 are kept" in str(outcomes[1].error)
    assert figures.notes == []
    assert torch.isfinite(outcomes[1].weights["0.weight"]).all()
