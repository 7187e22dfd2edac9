"""An out-of-memory error in the middle of a Lightning run: its batch runs again in pieces, or it says why not."""

from __future__ import annotations

import contextlib
import copy
import io
import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.integrations.lightning import BatchSize
from brim.integrations.lightning_survival import cut, joined, name_lost_rank, samples_in
from brim.memory.devices import memory_of
from tests.integrations.lightning_modules import QUIET, SAMPLES, Classifier, Plain, samples, state_of, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, fails: Callable[[], bool]) -> torch.Tensor:
        ctx.fails = fails
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.fails():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grad, None


class Pressed(Plain):
    """Runs out of memory above some samples in one batch of its run, in the forward or in the backward."""

    def __init__(self, *, at: int = -1, where: str = "forward", above: int = 3, batch_size: int = 8) -> None:
        super().__init__(batch_size)
        self.at, self.where, self.above = at, where, above
        self.lengths: list[int] = []

    def pressed(self, batch: Any, batch_idx: int) -> bool:
        return (self.trainer.current_epoch, batch_idx) == (0, self.at) and len(batch[0]) > self.above

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.lengths.append(len(batch[0]))
        fails = self.pressed(batch, batch_idx)
        if fails and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        loss = super().training_step(batch, batch_idx)
        return FailsInBackward.apply(loss, lambda: fails) if self.where == "backward" else loss

    def evaluated(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.lengths.append(len(batch[0]))
        if self.pressed(batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.evaluated(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.evaluated(batch, batch_idx)
        self.log("test_loss", loss)
        return {"loss": loss}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.evaluated(batch, batch_idx)
        return self.net(batch[0])


def fixed_size(**settings: Any) -> BatchSize:
    """At the size that the module has, without trials that matter: 8 samples."""
    return BatchSize(max_batch_size=8, multiple_of=8, **settings)


def fitted(module: Pressed, callback: BatchSize | None = None, **settings: Any) -> tuple[pl.Trainer, dict[str, Any]]:
    callback = callback or fixed_size()
    ran = trainer(callback, limit_val_batches=0, **settings)
    ran.fit(module)
    return ran, state_of(ran, module)


def same_to_rounding(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_runs_out_of_memory_is_redone_in_pieces(where: str) -> None:
    pl.seed_everything(5, verbose=False)
    calm, expected = fitted(Pressed())
    pl.seed_everything(5, verbose=False)
    module, callback = Pressed(at=3, where=where), fixed_size()
    ran, after = fitted(module, callback)
    same_to_rounding(after["weights"], expected["weights"])
    assert callback.oom_events == 2  # 8 samples, then 4
    assert "pieces of 2" in callback.notes[-1]
    assert ran.global_step == SAMPLES // 8
    assert after["names"] == sorted(vars(module))
    torch.testing.assert_close(ran.callback_metrics["loss_epoch"], calm.callback_metrics["loss_epoch"])
    torch.testing.assert_close(ran.callback_metrics["loss_step"], calm.callback_metrics["loss_step"])  # in pieces too
    assert "training_step" not in vars(module)


def test_an_optimizer_that_calls_its_closure_again_logs_every_call() -> None:
    class Searching(Pressed):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    runs = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        ran, state = fitted(Searching(at=at, where="backward"))
        runs.append({**state["weights"], **ran.callback_metrics})
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-4)


def test_hooks_around_a_backward_see_the_gradients_of_the_whole_batch() -> None:
    class Halving(Pressed):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad /= 2  # type: ignore[operator]

    class Counting(pl.Callback):
        count = 0

        def on_after_backward(self, *_: Any) -> None:
            self.count += 1

    states = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        counting, callback = Counting(), fixed_size()
        ran = trainer(callback, counting, limit_val_batches=0)
        ran.fit(module := Halving(at=at, where="backward"))
        states.append(state_of(ran, module)["weights"])
        assert counting.count == ran.global_step == SAMPLES // 8
    assert callback.oom_events == 2
    assert "on_after_backward" not in vars(module)
    same_to_rounding(states[0], states[1])


def test_sums_and_values_that_are_no_means_are_logged_for_the_whole_batch() -> None:
    class Logging(Pressed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            count = torch.tensor(float(len(batch[0])))
            self.log_dict({"samples": count}, on_step=True, on_epoch=True, reduce_fx="sum")
            self.log("highest", batch[1].max().float(), True, on_step=False, on_epoch=True, reduce_fx="max")
            return loss

    runs = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        runs.append({name: float(value) for name, value in fitted(Logging(at=at))[0].callback_metrics.items()})
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert (runs[1]["samples_step"], runs[1]["samples_epoch"]) == (8, SAMPLES)


def test_metrics_count_a_batch_once_when_its_backward_is_redone() -> None:
    module = Pressed(at=3, where="backward")
    _, after = fitted(module)
    assert float(after["metric"]["mean_value"]) == SAMPLES


class PressedTwice(Pressed):
    """Of one batch the first piece fits, and the second one of its length does not."""

    def __init__(self, at: int) -> None:
        super().__init__(at=at, above=4)

    def pressed(self, batch: Any, batch_idx: int) -> bool:
        second = len(batch[0]) == 4 and self.lengths[-2] == 4
        return super().pressed(batch, batch_idx) or (batch_idx == self.at and self.lengths.count(4) == 2 and second)

    def evaluated(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().evaluated(batch, batch_idx)
        self.seen.update(len(batch[0]))
        return loss


def test_a_piece_that_counted_before_another_failed_counts_once() -> None:
    pl.seed_everything(5, verbose=False)
    calm, expected = fitted(Pressed())
    pl.seed_everything(5, verbose=False)
    ran, after = fitted(PressedTwice(at=3))
    assert float(after["metric"]["mean_value"]) == SAMPLES
    torch.testing.assert_close(ran.callback_metrics["loss_epoch"], calm.callback_metrics["loss_epoch"])
    same_to_rounding(after["weights"], expected["weights"])


@pytest.mark.parametrize("together", [dict, list])
def test_a_batch_of_several_loaders_is_cut_in_each_of_them(together: type) -> None:
    class Two(Pressed):
        def train_dataloader(self) -> Any:
            loaders = {"one": self.make_loader(), "other": self.make_loader()}
            return loaders if together is dict else list(loaders.values())

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            one, other = batch.values() if together is dict else batch
            return super().training_step(one, batch_idx) + self.loss(other)

    states = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        states.append(fitted(Two(at=at), callback := fixed_size())[1])
    assert callback.oom_events == 2
    same_to_rounding(states[0]["weights"], states[1]["weights"])


def test_what_a_training_step_returns_beside_its_loss_is_of_the_whole_batch() -> None:
    class Answering(Pressed):
        answers = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "rows": self.net(batch[0])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.answers += len(outputs["rows"])

    module = Answering(at=3)
    fitted(module)
    assert module.answers == SAMPLES


class Neighbour(pl.Callback):
    """Leaves so many bytes beside what is held, during one batch: a real limit, through the meter."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self.limited = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            memory = memory_of("cpu")
            state = [tensor for one in trainer.optimizers[0].state.values() for tensor in one.values()]
            held = [*pl_module.parameters(), *(one.grad for one in pl_module.parameters()), *state, *batch]
            held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
            self.limited.enter_context(memory.limited(held_bytes + self.left_bytes))
            self.limited.enter_context(memory.metered(held))

    def on_train_batch_end(self, *_: Any) -> None:
        self.limited.close()


def test_a_neighbour_that_takes_memory_does_not_end_a_fit() -> None:
    states = []
    for left_bytes in (2**30, 36 * 1024):
        pl.seed_everything(5, verbose=False)
        callback = BatchSize(max_batch_size=64, multiple_of=64)
        ran = trainer(callback, Neighbour(left_bytes), limit_val_batches=0)
        ran.fit(module := Plain(2, data=samples(256)))
        states.append(state_of(ran, module))
    assert callback.oom_events >= 1
    assert ran.global_step == 256 // 64
    same_to_rounding(states[0]["weights"], states[1]["weights"])


def test_pieces_grow_again_after_a_quiet_stretch() -> None:
    module = Pressed(at=1)
    fitted(module, max_epochs=20)
    assert 2 in module.lengths
    assert module.lengths[-1] == 4


class WithoutIndex(Pressed):
    """Its step takes no index of the batch."""

    def pressed(self, batch: Any, batch_idx: int) -> bool:
        return batch_idx >= 0 and super().pressed(batch, batch_idx)

    def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, self.trainer.fit_loop.batch_idx)


@pytest.mark.parametrize("at", [2, 3, 4])  # 4 begins a window: gradients of the one before are there still
@pytest.mark.parametrize("kind", [Pressed, WithoutIndex])
def test_a_forward_inside_an_accumulation_window_is_redone(kind: type[Pressed], at: int) -> None:
    pl.seed_everything(5, verbose=False)
    _, expected = fitted(kind(), accumulate_grad_batches=4)
    pl.seed_everything(5, verbose=False)
    callback = fixed_size()
    _, after = fitted(kind(at=at), callback, accumulate_grad_batches=4)
    assert callback.oom_events == 2
    same_to_rounding(after["weights"], expected["weights"])


@pytest.mark.parametrize("at", [2, 3])
def test_a_backward_inside_an_accumulation_window_is_raised_with_the_reason(at: int) -> None:
    module = Pressed(at=at, where="backward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(module, accumulate_grad_batches=4)
    assert "accumulation window" in caught.value.__notes__[0]
    assert "continue from the last checkpoint" in caught.value.__notes__[0]
    assert "training_step" not in vars(module)


def test_an_error_in_a_hook_is_raised_with_the_reason() -> None:
    class Hooked(Pressed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(Hooked())
    assert len(caught.value.__notes__) == 1
    assert "as in a hook" in caught.value.__notes__[0]


class Copied(Pressed):
    """Is copied and saved after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen_losses.append(float(self.loss(batch)))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            vars(self)["early"] = (copy.deepcopy(self), saved := io.BytesIO())
            torch.save(self, saved)


def test_a_copy_of_the_module_made_within_a_fit_has_steps_of_its_own() -> None:
    fitted(module := Copied(), max_epochs=3)
    early, saved = vars(module).pop("early")
    saved.seek(0)
    losses = []
    for one in (early, torch.load(saved, weights_only=False), module):
        one.seen_losses = []
        trainer().validate(one, module.make_loader(), verbose=False)
        losses.append(one.seen_losses)
    assert losses[0] == losses[1] != losses[2]


def test_losses_that_are_sums_are_added() -> None:
    class Summed(Pressed):
        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")

    states = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        states.append(fitted(Summed(at=at), fixed_size(survive="sum"))[1])
    same_to_rounding(states[0]["weights"], states[1]["weights"])


def test_a_single_sample_that_does_not_fit_is_raised_with_the_reason() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(Pressed(at=3, above=0))
    assert "a sample alone" in caught.value.__notes__[0]


def test_an_error_in_the_optimizers_step_is_raised_with_the_reason() -> None:
    class Stepping(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss

    class Late(Pressed):
        def configure_optimizers(self) -> Any:
            return Stepping(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().optimizer.fails = batch_idx == 3

    module = Late()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(module)
    assert [note.startswith("brim: in the optimizer's step") for note in caught.value.__notes__] == [True]
    assert module.lengths == [8] * 4  # the batch is not run again


def test_other_errors_and_runs_without_survival_are_left_alone() -> None:
    module = Pressed(at=3)
    with pytest.raises(torch.OutOfMemoryError):
        fitted(module, fixed_size(survive=None))
    assert module.lengths[-1] == 8

    class Broken(Pressed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.pressed(batch, batch_idx):
                raise ValueError("column 7")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="column 7"):
        fitted(Broken(at=3))


def test_manual_optimization_is_not_redone_and_says_so() -> None:
    class ByHand(Pressed):
        def __init__(self) -> None:
            super().__init__(at=3)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(ByHand())
    assert "optimizes manually" in caught.value.__notes__[0]


# ------------------------------------------------------------------------------------------------ evaluations


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_in_pieces_logs_what_it_would_have_logged(stage: str) -> None:
    results = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        callback = fixed_size()
        results.append(getattr(trainer(callback), stage)(Pressed(at=at), verbose=False)[0])
    assert callback.oom_events == 2
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_predictions_in_pieces_are_those_of_the_whole() -> None:
    answers = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        answers.append(trainer(fixed_size()).predict(Pressed(at=at)))
    assert [len(one) for one in answers[1]] == [8] * (SAMPLES // 8)
    torch.testing.assert_close(answers[0], answers[1])


def test_validation_within_a_fit_is_redone_in_pieces() -> None:
    losses = []
    for at in (-1, 3):
        pl.seed_everything(5, verbose=False)
        ran = trainer(callback := fixed_size(), num_sanity_val_steps=0)
        ran.fit(Pressed(at=at, where="validation"))
        losses.append(ran.callback_metrics["val_loss"])
    assert callback.oom_events == 2
    torch.testing.assert_close(losses[0], losses[1])


def test_an_evaluation_redoes_only_the_samples_of_the_piece_that_failed() -> None:
    module, callback = PressedTwice(at=3), fixed_size()
    trainer(callback).validate(module, verbose=False)
    assert callback.oom_events == 2
    assert float(module.seen.mean_value) == SAMPLES


def test_a_validation_step_may_call_the_training_step() -> None:
    class Shared(Pressed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.evaluated(batch, batch_idx) if self.trainer.validating else self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx=batch_idx))

    ran = trainer(callback := fixed_size(), num_sanity_val_steps=0)
    ran.fit(Shared(at=3))
    assert callback.oom_events == 2


def test_answers_that_cannot_be_put_together_are_an_error() -> None:
    class Named(Pressed):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.evaluated(batch, batch_idx)
            return {"who"}

    with pytest.raises(RequestError, match="cannot be put together"):
        trainer(fixed_size()).predict(Named(at=3))


# ------------------------------------------------------------------------------------------------ pieces


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"a": torch.zeros(4), "texts": ["x"] * 4, "none": None}, 4),
        ((torch.zeros(4), {"a": torch.zeros(4, 1)}), 4),
        ((torch.zeros(4), torch.zeros(3)), None),
        ((torch.zeros(4), torch.tensor(1.0)), None),
        (([torch.zeros(3, 8, 8)] * 2, [torch.zeros(3)] * 2), None),  # pictures and boxes of two samples
        ({"texts": ["x"] * 4, "a": torch.zeros(3)}, None),
        (torch.tensor(1.0), None),
        (object(), None),
    ],
)
def test_only_what_is_plain_is_cut(batch: Any, samples: int | None) -> None:
    assert samples_in(batch) == samples
    if samples is not None:
        assert samples_in(cut(batch, 1, 3)) == 2


def test_what_pieces_return_is_what_the_batch_would() -> None:
    pieces = [torch.arange(2.0), torch.arange(2.0, 5.0)]
    assert joined(pieces, [2, 3]).tolist() == [0, 1, 2, 3, 4]
    assert float(joined([torch.tensor(1.0), torch.tensor(2.0)], [1, 3])) == 1.75
    assert joined([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
    both = joined([(torch.zeros(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))], [2, 2])
    assert [part.tolist() for part in both] == [[0, 0, 1, 1]] * 2
    assert joined([{"a": torch.ones(1), "n": None}] * 2, [1, 1])["a"].tolist() == [1, 1]
    assert joined([None, None], [1, 1]) is None
    with pytest.raises(RequestError):  # counts are not averaged
        joined([torch.tensor(3), torch.tensor(4)], [4, 4])


def test_classifiers_with_batch_normalisation_keep_running_in_pieces() -> None:
    class Normalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3 and len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)

    module, callback = Normalised(8), fixed_size()
    ran = trainer(callback, limit_val_batches=0)
    ran.fit(module)
    assert (callback.oom_events, ran.global_step) == (1, SAMPLES // 8)
    assert int(module.net[1].num_batches_tracked) == 3 + 2 * 5  # each piece moves the averages


def test_a_rank_whose_device_is_lost_keeps_its_own_error() -> None:
    """The hook that adds notes must not raise: what is wrapped would stay so."""
    lost = RuntimeError("CUDA error: device-side assert triggered")
    name_lost_rank(types.SimpleNamespace(global_rank=1, world_size=2), lost)
    assert not hasattr(lost, "__notes__")
