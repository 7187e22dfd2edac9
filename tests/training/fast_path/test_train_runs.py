"""Each run of a stack equals the run alone: losses, weights, validations, stops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import DoesNotFitError, RequestError
from brim.training.fast_path.task import (
    EpochPlan,
    Outputs,
    RowData,
    RunOutcome,
    RunsListener,
    RunSpec,
    RunsRequest,
    Settings,
    TrainingTask,
    epoch_orders,
)
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from brim.workloads.optimizers import make_optimizer
from tests.training.fast_path.fast_path_problems import (
    head,
    preference_criterion,
    preference_problem,
    preference_rows,
    specs,
    supervised_problem,
)

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


class Notes(RunsListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def train(problem: TrainingTask, count: int, path: str, **more: Any) -> TrainedRuns:
    run = {key: more.pop(key) for key in ("listener", "micro_batch_size", "memory_limit_bytes") if key in more}
    settings = Settings(**{"epochs": 3, "batch_size": 8, **more})
    listener = run.pop("listener", None)
    asked = RunsRequest(task=problem, specs=specs(count), settings=settings, device="cpu", path=path, **run)
    return train_runs(asked, listener=listener)


def assert_same(one: RunOutcome, other: RunOutcome, tolerance: float = 1e-12) -> None:
    assert one.spec == other.spec
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), rtol=tolerance, atol=tolerance)
    assert one.weights.keys() == other.weights.keys()
    for name, weights in one.weights.items():
        torch.testing.assert_close(weights, other.weights[name], rtol=tolerance, atol=tolerance)


def hand_written(
    problem: TrainingTask, spec: RunSpec, settings: Settings
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that a user would write: the measure of all paths."""
    model = problem.make_model(spec.seed)
    optimizer = make_optimizer(settings.optimizer, model.parameters(), spec.lr)
    plan = EpochPlan(lengths=problem.data.lengths, batch_size=settings.batch_size)
    losses = []
    for epoch in range(settings.epochs):
        orders = epoch_orders(plan, seed=spec.seed, epoch=epoch)
        total = 0.0
        for step in range(plan.steps):
            counts = plan.counts(step)
            rows = torch.cat(
                [
                    order[step * full : step * full + count]
                    for order, full, count in zip(orders, plan.full, counts, strict=True)
                ]
            )
            batch = {name: tensor[rows] for name, tensor in problem.data.tensors.items()}
            loss = problem.criterion(model(batch["features"]), batch, counts)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / plan.steps)
    return losses, model.state_dict()


@pytest.mark.parametrize("path", ["off", "resident", "stacked"])
@pytest.mark.parametrize(
    "more", [{}, {"optimizer": "sgd", "clip_norm": 0.05}, {"optimizer": "adam"}, {"batch_size": 1000}]
)
def test_every_path_equals_the_loop_written_by_hand(path: str, more: dict[str, Any]) -> None:
    problem = preference_problem()
    trained = train(problem, 3, path, **more)
    assert trained.path == path
    settings = Settings(**{"epochs": 3, "batch_size": 8, **more})
    for outcome in trained.outcomes:
        losses, weights = hand_written(problem, outcome.spec, settings)
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(losses), rtol=1e-10, atol=1e-12)
        for name, part in weights.items():
            torch.testing.assert_close(outcome.weights[name], part, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_stack_of_seeds_and_learning_rates_equals_single_runs(optimizer: str) -> None:
    problem = preference_problem()
    stacked = train(problem, 4, "stacked", optimizer=optimizer, clip_norm=0.3)
    alone = train(problem, 4, "resident", optimizer=optimizer, clip_norm=0.3)
    assert (stacked.stack, alone.stack) == (4, 1)
    for one, other in zip(stacked.outcomes, alone.outcomes, strict=True):
        assert_same(one, other)
    first, second = stacked.outcomes[:2]
    assert not torch.equal(first.weights["0.weight"], second.weights["0.weight"])


def test_buffers_of_batch_normalisation_are_each_runs_own() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()

    problem = supervised_problem(build)
    # Not Adam: the bias before a normalisation has no gradient but rounding, which Adam would blow up.
    stacked, alone = (train(problem, 3, path, optimizer="sgd") for path in ("stacked", "resident"))
    assert stacked.path == "stacked"
    for one, other in zip(stacked.outcomes, alone.outcomes, strict=True):
        assert_same(one, other, 1e-10)
    assert int(stacked.outcomes[0].weights["1.num_batches_tracked"]) == 9


def test_parameters_that_do_not_learn_and_shared_ones_keep_their_meaning() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6, dtype=torch.float64)
            self.two = nn.Linear(6, 6, dtype=torch.float64)
            self.two.weight = self.one.weight
            self.last = nn.Linear(6, 3, dtype=torch.float64)
            self.last.bias.requires_grad_(False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(torch.tanh(self.two(torch.tanh(self.one(rows)))))
            return result

    problem = supervised_problem(Tied)
    stacked, alone = train(problem, 2, "stacked"), train(problem, 2, "off")
    assert stacked.path == "stacked"
    for one, other in zip(stacked.outcomes, alone.outcomes, strict=True):
        assert_same(one, other, 1e-10)
        Tied().load_state_dict(one.weights)
    fresh = problem.make_model(0).state_dict()
    assert torch.equal(stacked.outcomes[0].weights["last.bias"], fresh["last.bias"])


def scores_of(wanted: list[list[float]]) -> Any:
    """A validation that gives each run its own list of figures, whatever the model says."""
    calls = iter(zip(*wanted, strict=True))

    def validate(outputs: Outputs) -> list[float]:
        outputs(torch.zeros(2, 6, dtype=torch.float64))
        return list(next(calls))

    return validate


def test_runs_stop_early_independently_and_keep_their_best_weights() -> None:
    figures = [[0.5, 0.6, 0.4, 0.4, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5], [0.9, 0.1, 0.2, 0.3, 0.4]]
    problem = preference_problem(validate=scores_of(figures))
    stacked = train(problem, 3, "stacked", epochs=5, patience=2)
    assert [outcome.best_epoch for outcome in stacked.outcomes] == [2, 5, 1]
    assert [outcome.epochs for outcome in stacked.outcomes] == [4, 5, 3]
    assert stacked.outcomes[0].validations == (0.5, 0.6, 0.4, 0.4)
    for outcome in stacked.outcomes:
        alone = train(preference_problem(), 3, "resident", epochs=outcome.best_epoch)
        same = alone.outcomes[outcome.spec.seed]
        for name, weights in outcome.weights.items():
            torch.testing.assert_close(weights, same.weights[name], rtol=1e-12, atol=1e-12)


def test_when_every_run_has_stopped_the_training_ends() -> None:
    problem = preference_problem(validate=scores_of([[0.5] * 9, [0.5] * 9]))
    trained = train(problem, 2, "stacked", epochs=9, patience=3)
    assert [outcome.epochs for outcome in trained.outcomes] == [4, 4]


def test_validation_sees_the_outputs_of_each_run_in_evaluation_mode() -> None:
    rows = torch.randn(5, 6, dtype=torch.float64)
    seen: list[torch.Tensor] = []

    def validate(outputs: Outputs) -> list[float]:
        seen.append(outputs(rows))
        return [0.0] * len(seen[-1])

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0)).double()

    problem = preference_problem(build, validate=validate)
    trained = train(problem, 2, "stacked", epochs=1)
    for run, outcome in enumerate(trained.outcomes):
        model = build()
        model.load_state_dict(outcome.weights)
        torch.testing.assert_close(seen[-1][run], model.eval()(rows), rtol=1e-12, atol=1e-12)


def test_dropout_draws_other_noise_for_each_run_of_a_stack() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1), nn.Flatten(0)).double()

    problem = preference_problem(build)
    same_seed = [RunSpec(seed=4, lr=0.01), RunSpec(seed=4, lr=0.01)]
    settings = Settings(epochs=1, batch_size=8)
    asked = RunsRequest(task=problem, specs=same_seed, settings=settings, device="cpu", path="stacked")
    trained = train_runs(asked)
    assert not torch.equal(trained.outcomes[0].weights["1.weight"], trained.outcomes[1].weights["1.weight"])


def test_a_nan_loss_ends_only_its_run_and_names_step_and_rows() -> None:
    rows = preference_rows()
    rows = RowData(tensors=rows.tensors, lengths=rows.lengths, ids=[f"mol-{row}" for row in range(40)])

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head()
            self.register_buffer("poison", torch.zeros(1, dtype=torch.float64))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(features) + self.poison
            return result

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Fragile()
        model.poison.fill_(float("nan") if seed == 1 else 0.0)
        return model

    problem = TrainingTask(make_model=make, data=rows, criterion=preference_criterion)
    for path in ("stacked", "resident"):
        trained = train(problem, 3, path)
        good, bad, other = trained.outcomes
        assert good.error is None
        assert other.error is None
        assert bad.weights == {}
        assert bad.error is not None
        order = epoch_orders(EpochPlan(lengths=(23, 17), batch_size=8), seed=1, epoch=0)
        assert "seed 1: the loss became nan in epoch 1, step 1" in bad.error
        assert f"rows mol-{order[0][0]}, mol-{order[0][1]}" in bad.error
        assert torch.isfinite(good.weights["head.0.weight"]).all()


def test_lstm_has_no_batching_rule_and_falls_back_with_a_word() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 3, batch_first=True, dtype=torch.float64)
            self.out = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(self.lstm(rows[..., None])[0][:, -1])
            return result

    notes = Notes()
    trained = train(supervised_problem(Recurrent, rows=12), 2, "auto", epochs=1, listener=notes)
    assert trained.path == "resident"
    assert any("runs are not stacked" in line for line in notes.lines)
    assert "cannot be stacked" in trained.reason
    assert all(outcome.weights for outcome in trained.outcomes)


def test_an_optimizer_that_is_not_elementwise_falls_back_with_a_word() -> None:
    notes = Notes()
    trained = train(preference_problem(), 2, "stacked", optimizer="adagrad", listener=notes)
    assert trained.path == "resident"
    assert notes.lines == ["runs are not stacked: optimizer adagrad with these options is not elementwise"]
    assert trained.outcomes[0].weights


def test_a_parameter_outside_the_loss_is_left_to_torch() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 3, dtype=torch.float64)
            self.spare = nn.Linear(6, 3, dtype=torch.float64)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(rows)
            return result

    problem = supervised_problem(Spare)
    trained = train(problem, 2, "auto")
    assert trained.path == "resident"
    assert "spare.weight takes no part" in trained.reason
    assert torch.equal(trained.outcomes[0].weights["spare.weight"], problem.make_model(0).state_dict()["spare.weight"])


def test_the_choice_is_measured_and_reported() -> None:
    trained = train(preference_problem(), 3, "auto")
    assert trained.path in ("resident", "stacked")
    assert {(trial.path, trial.runs) for trial in trained.trials} == {("resident", 1), ("stacked", 3)}
    assert all(trial.seconds_per_step and trial.peak_allocated_bytes for trial in trained.trials)
    assert "times the rate" in trained.reason


def test_a_trial_leaves_nothing_behind() -> None:
    problem = preference_problem()
    tried, told = train(problem, 3, "auto"), train(problem, 3, "resident")
    for one, other in zip(tried.outcomes, told.outcomes, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("micro", [1, 3, 7])
def test_micro_batches_leave_a_pairwise_step_as_it_is(micro: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()

    problem = preference_problem(build)
    whole = train(problem, 2, "resident")
    cut = train(problem, 2, "auto", micro_batch_size=micro)
    assert (cut.micro_batch_size, cut.accumulation_steps) == (micro, -(-16 // micro))
    for one, other in zip(cut.outcomes, whole.outcomes, strict=True):
        assert_same(one, other, 1e-10)


def test_micro_batches_drop_the_same_units_in_both_passes() -> None:
    """A single micro-batch for all rows draws the noise that the whole batch would draw."""
    from brim.training.fast_path.runs import PlainRun

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(0)).double()

    batch = {"features": torch.randn(10, 6, dtype=torch.float64)}
    run = PlainRun(
        build(), RunSpec(seed=0, lr=0.1), preference_problem(), Settings(epochs=1, batch_size=5, optimizer="sgd"),
        torch.device("cpu"), micro_batch_size=4,
    )  # fmt: skip
    model = build()
    torch.manual_seed(5)
    run.step(batch, (5, 5), 1.0)
    torch.manual_seed(5)
    outputs = torch.cat([model(part) for part in batch["features"].split(4)])
    loss = preference_criterion(outputs, batch, (5, 5))
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        moved = parameter - 0.1 * parameter.grad
        torch.testing.assert_close(run.weights(0)[name], moved.detach(), rtol=1e-10, atol=1e-12)


def test_out_of_memory_halves_the_stack_then_the_batch_and_changes_nothing() -> None:
    width, hidden = 64, 512
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(256, width, generator=generator, dtype=torch.float64)
    data = RowData(tensors={"features": rows}, lengths=(128, 128))

    def build() -> nn.Module:
        return head(width, hidden)

    problem = preference_problem(build, data=data)
    free = train(problem, 2, "resident", batch_size=128, epochs=2)
    assert free.peak_allocated_bytes is not None
    notes = Notes()
    tight = train(
        problem, 2, "auto", batch_size=128, epochs=2, listener=notes,
        memory_limit_bytes=int(0.75 * free.peak_allocated_bytes),
    )  # fmt: skip
    assert tight.oom_events > 0
    assert tight.accumulation_steps > 1
    assert any("micro-batches" in line for line in notes.lines)
    for one, other in zip(tight.outcomes, free.outcomes, strict=True):
        assert_same(one, other, 1e-9)


def test_rows_that_do_not_fit_are_reported_with_remedies() -> None:
    problem = preference_problem()
    with pytest.raises(DoesNotFitError, match="not even one row at a time"):
        train(problem, 2, "auto", memory_limit_bytes=3000)


def test_autocast_trains_stacks_like_single_runs() -> None:
    def build() -> nn.Module:
        return head(dtype=torch.float32)

    problem = preference_problem(build, data=preference_rows(dtype=torch.float32))
    stacked, alone = (
        train(problem, 2, path, autocast_dtype=torch.bfloat16, epochs=2) for path in ("stacked", "resident")
    )
    for one, other in zip(stacked.outcomes, alone.outcomes, strict=True):
        torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), rtol=2e-2, atol=0)
        assert one.weights["0.weight"].dtype == torch.float32


def test_infinite_gradients_skip_the_step_of_their_run_alone() -> None:
    """Seed 1's energies overflow a scale of 2¹⁶ in float32; seed 0's do not."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(0)
        model = head(dtype=torch.float32)
        with torch.no_grad():
            model[2].weight.mul_(1e19 if seed else 1.0)  # type: ignore[operator,union-attr]
        return model

    problem = TrainingTask(make_model=make, data=preference_rows(dtype=torch.float32), criterion=preference_criterion)
    trained = train(problem, 2, "stacked", loss_scaling=True, epochs=1, batch_size=50, optimizer="sgd")
    calm, wild = trained.outcomes
    assert (calm.skipped_steps, wild.skipped_steps) == (0, 1)
    assert torch.equal(wild.weights["0.weight"], make(1).state_dict()["0.weight"])
    plain = train(problem, 1, "resident", epochs=1, batch_size=50, optimizer="sgd").outcomes[0]
    for name, weights in calm.weights.items():  # scaled and unscaled by a power of two: the same bits, nearly
        torch.testing.assert_close(weights, plain.weights[name], rtol=1e-5, atol=1e-7)


def test_the_learning_rate_follows_its_factor() -> None:
    problem = preference_problem()
    none = train(problem, 2, "stacked", lr_factor=lambda step: 0.0, optimizer="sgd")
    assert torch.equal(none.outcomes[0].weights["0.weight"], problem.make_model(0).state_dict()["0.weight"])
    half = train(problem, 2, "stacked", lr_factor=lambda step: 0.5**step)
    other = train(problem, 2, "off", lr_factor=lambda step: 0.5**step)
    for one, two in zip(half.outcomes, other.outcomes, strict=True):
        assert_same(one, two, 1e-10)


def test_figures_count_what_was_trained() -> None:
    trained = train(preference_problem(), 3, "stacked", epochs=2)
    assert (trained.effective_batch_size, trained.rows_per_step, trained.steps_per_epoch) == (8, 16, 3)
    assert (trained.rows, trained.pairs) == (3 * 2 * (23 + 23), 3 * 2 * 23)
    assert trained.train_seconds > 0


def test_one_run_is_resident_and_an_unknown_path_is_refused() -> None:
    assert train(preference_problem(), 1, "stacked").path == "resident"
    with pytest.raises(RequestError, match="--fast-path fast"):
        train(preference_problem(), 1, "fast")


def test_optimizers_that_need_a_closure_are_refused() -> None:
    with pytest.raises(RequestError, match="--optimizer lbfgs evaluates the loss several times"):
        train(preference_problem(), 1, "auto", optimizer="lbfgs")


def test_rows_of_different_length_are_refused() -> None:
    with pytest.raises(RequestError, match="labels has 3 rows where 4 are wanted"):
        RowData(tensors={"features": torch.zeros(4, 2), "labels": torch.zeros(3)}, lengths=(4,))


def test_what_belongs_to_a_run_goes_with_it() -> None:
    """Per-run targets: each run learns its own constant."""
    data = RowData(
        tensors={"features": torch.ones(8, 1, dtype=torch.float64)},
        per_run={"target": torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 8).contiguous()},
        lengths=(8,),
    )

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)).double()

    def criterion(outputs: torch.Tensor, batch: Any, counts: Any) -> torch.Tensor:
        return (outputs - batch["target"]).square().mean()

    problem = preference_problem(build, data=data, criterion=criterion)
    settings = Settings(epochs=60, batch_size=8, optimizer="sgd", optimizer_options={"momentum": 0.0})
    runs = [RunSpec(seed=seed, lr=0.2) for seed in range(3)]
    for path in ("stacked", "resident", "off"):
        trained = train_runs(RunsRequest(task=problem, specs=runs, settings=settings, device="cpu", path=path))
        for run, outcome in enumerate(trained.outcomes):
            total = float(outcome.weights["0.weight"].sum() + outcome.weights["0.bias"].sum())
            assert total == pytest.approx(run + 1, abs=1e-6)


def test_models_are_not_touched_by_training() -> None:
    kept = {seed: head() for seed in range(2)}
    before = copy.deepcopy(kept[0].state_dict())
    problem = preference_problem()
    problem = TrainingTask(
        make_model=lambda seed: copy.deepcopy(kept[seed]), data=problem.data, criterion=problem.criterion
    )
    train(problem, 2, "stacked")
    assert all(torch.equal(before[name], part) for name, part in kept[0].state_dict().items())


def test_on_the_cpu_a_smaller_stack_is_tried_and_every_run_trained() -> None:
    trained = train(preference_problem(), 9, "stacked", epochs=1)
    assert {trial.runs for trial in trained.trials} == {1, 4, 9}
    assert trained.stack in (4, 9)
    alone = train(preference_problem(), 9, "resident", epochs=1)
    for one, other in zip(trained.outcomes, alone.outcomes, strict=True):
        assert_same(one, other)
