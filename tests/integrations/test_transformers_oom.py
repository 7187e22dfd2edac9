"""A step that runs out of memory in the middle of a window: the run goes on as if nothing had happened."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from brim.errors import DoesNotFitError, LostError, RequestError
from brim.integrations.transformers import TrainerFit, fit_to_memory
from tests.integrations.trainers import (
    ARGUMENTS,
    Neighbour,
    Texts,
    losses,
    make_classifier,
    make_dpo,
    make_reward,
    make_seq2seq,
    make_sft,
    make_trainer,
    padded,
    weights,
)

LIMIT = 64 * 2**20
MAKERS: dict[str, Callable[..., Any]] = {"Trainer": make_trainer, "SFTTrainer": make_sft, "DPOTrainer": make_dpo}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, short_probes: None) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise


def fitted(trainer: Any, *, size: int, **options: Any) -> TrainerFit:
    """Fitted under a limit that training keeps to, with the per-device batch that a test is about."""
    fit = fit_to_memory(trainer, batch_size=size, memory_limit=LIMIT, **options)
    assert fit.per_device_train_batch_size == size
    return fit


def assert_same_run(trainer: Any, undisturbed: Any) -> None:
    assert losses(trainer) == pytest.approx(losses(undisturbed), rel=1e-5)
    for name, value in weights(undisturbed).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def assert_redone(
    make: Callable[[Path], Any], folder: Path, *, at_calls: tuple[int, ...] = (3,), backward: bool = False
) -> None:
    """A neighbour takes memory at these forwards: each is redone, and the run is that of an undisturbed trainer."""
    undisturbed = make(folder / "a")
    undisturbed.train()
    trainer = make(folder / "b")
    fit = fitted(trainer, size=4)
    with Neighbour(trainer, at_calls=at_calls, take_bytes=LIMIT, backward=backward):
        trainer.train()
    assert fit.oom_events == len(at_calls)
    assert_same_run(trainer, undisturbed)


@pytest.mark.parametrize("size", [8, 2])  # accumulation 1 and 4
@pytest.mark.parametrize("name", MAKERS)
def test_a_window_is_redone_with_the_same_losses_and_weights(name: str, size: int, tmp_path: Path) -> None:
    undisturbed = MAKERS[name](tmp_path / "a", per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
    undisturbed.train()
    trainer = MAKERS[name](tmp_path / "b")
    fit = fitted(trainer, size=size)
    # the last micro-batch of the second window: gradients of those before are there already
    with Neighbour(trainer, at_calls=(2 * 8 // size - 1,), take_bytes=LIMIT, backward=True):
        trainer.train()
    assert fit.oom_events == 1
    assert_same_run(trainer, undisturbed)
    # Figures beside the loss; DPO's means over tokens are weighted by pairs where a batch is split.
    same = [name for name in trainer.state.log_history[0] if name not in ("loss", "grad_norm", "epoch", "step")]
    for entry, plain in zip(trainer.state.log_history[:4], undisturbed.state.log_history[:4], strict=True):
        assert {name: entry[name] for name in same} == pytest.approx(
            {name: plain[name] for name in same}, rel=1e-2, abs=1e-2
        )


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({"label_smoothing_factor": 0.1}, 3),
        ({"gradient_checkpointing": True}, 3),
        ({"dataloader_num_workers": 1}, 3),
        # 16, 16 and 8 samples: the last window of the first epoch, in its last micro-batch
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}, 9),
    ],
)
def test_a_window_is_redone_whatever_the_trainer_does_beside(
    arguments: dict[str, Any], call: int, tmp_path: Path
) -> None:
    assert_redone(functools.partial(make_trainer, **arguments), tmp_path, at_calls=(call,), backward=True)


def test_a_window_with_a_scaled_loss_is_redone_at_the_same_scale(tmp_path: Path) -> None:
    """As of float16, which accelerate has on a card alone."""

    def make(folder: Path) -> Any:
        trainer = make_trainer(folder)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return trainer

    assert_redone(make, tmp_path, backward=True)


def test_a_classifier_is_redone_with_every_sample_counting_once(tmp_path: Path) -> None:
    def make(folder: Path) -> Any:
        trainer = make_classifier(folder)
        with pytest.raises(RequestError, match="model_accepts_loss_kwargs = False"):
            fit_to_memory(trainer, memory_limit=LIMIT)
        trainer.model_accepts_loss_kwargs = False
        return trainer

    assert_redone(make, tmp_path, backward=True)


def test_after_ctrl_c_the_limit_is_lifted_and_the_trainer_trains_again(tmp_path: Path) -> None:
    undisturbed = make_trainer(tmp_path / "a")
    undisturbed.train()
    trainer = make_trainer(tmp_path / "b")
    fitted(trainer, size=4)
    forwards = iter(range(100))

    def interrupt(*_: Any) -> None:
        if next(forwards) == 1:  # in the midst of the first window
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), trainer.model.register_forward_pre_hook(interrupt):
        trainer.train()
    torch.zeros(2 * LIMIT, dtype=torch.uint8)
    trainer.train()
    assert_same_run(trainer, undisturbed)


def test_gradients_of_a_window_that_a_callback_has_ended_count_as_they_would(tmp_path: Path) -> None:
    import transformers

    class EndOfEpoch(transformers.TrainerCallback):  # type: ignore[misc]
        substeps = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.substeps += 1
            control.should_epoch_stop = self.substeps == 2

    runs = []
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, max_steps=-1, num_train_epochs=2)
        trainer.add_callback(EndOfEpoch())
        if name == "b":
            fit = fitted(trainer, size=4)
        # 0 and 1 are the first step, 2 is the last of its epoch, and to its gradients those of 3 and 4 are added
        with Neighbour(trainer, at_calls=(3,) if name == "b" else (), take_bytes=LIMIT, backward=True):
            trainer.train()
        runs.append(trainer)
    assert fit.oom_events == 1
    assert_same_run(runs[1], runs[0])


def test_figures_of_a_window_count_once_where_a_callback_evaluates_within_it(tmp_path: Path) -> None:
    import transformers

    class Evaluating(transformers.TrainerCallback):  # type: ignore[misc]
        trainer: Any = None

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.trainer.evaluate()

    seen = []
    for name in ("a", "b"):
        trainer = make_sft(tmp_path / name, eval_count=4)
        trainer.add_callback(callback := Evaluating())
        callback.trainer = trainer
        fitted(trainer, size=4, evaluation=False)
        with Neighbour(trainer, at_calls=(3,) if name == "b" else (), take_bytes=LIMIT):
            trainer.train()
        seen.append([entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry])
    assert seen[0] == seen[1]


def test_lora_is_redone_too(tmp_path: Path) -> None:
    assert_redone(functools.partial(make_trainer, lora=True), tmp_path, at_calls=(1, 6))


def test_pairs_of_a_reward_model_are_redone_too(tmp_path: Path) -> None:
    assert_redone(make_reward, tmp_path)


def test_a_loss_that_is_a_mean_over_the_batch_is_weighted_by_labels(tmp_path: Path) -> None:
    import transformers

    class MeanLoss(transformers.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)  # the mean over the labels of this batch
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    assert_redone(functools.partial(make_trainer, kind=MeanLoss), tmp_path)


def test_a_loss_that_is_divided_by_the_micro_batches_itself_is_redone(tmp_path: Path) -> None:
    """As TRL does with the auxiliary loss of routers."""
    import transformers

    class Divided(transformers.Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs).loss / self.current_gradient_accumulation_steps

    assert_redone(functools.partial(make_trainer, kind=Divided), tmp_path)


def test_a_part_without_labels_adds_nothing(tmp_path: Path) -> None:
    class Unlabelled(Texts):
        def __getitem__(self, place: int) -> dict[str, list[int]]:
            sample = super().__getitem__(place)
            return {**sample, "labels": [-100] * len(sample["labels"])} if place % 2 else sample

    runs = []
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, per_device_train_batch_size=8, gradient_accumulation_steps=1)
        trainer.train_dataset = Unlabelled()
        if name == "b":
            fit = fitted(trainer, size=8)
            fit.guard.train_sizes.live.size = 1  # type: ignore[union-attr]
        trainer.train()
        runs.append(trainer)
    assert_same_run(runs[1], runs[0])


def test_a_step_that_takes_entries_out_of_its_batch_is_redone(tmp_path: Path) -> None:
    import transformers

    class Popping(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")
            return super().training_step(model, {**inputs, "labels": labels}, num_items_in_batch)

    assert_redone(functools.partial(make_trainer, kind=Popping), tmp_path)


def test_random_numbers_of_a_redone_window_are_those_of_its_start(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    fitted(trainer, size=4)
    seen: list[torch.Tensor] = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_rng_state()))
    with Neighbour(trainer, at_calls=(1,), take_bytes=LIMIT):
        trainer.train()
    first, failed, redone = seen[0], seen[1], seen[2]
    assert torch.equal(first, redone)
    assert failed.shape == first.shape


def test_parts_grow_back_after_quiet_windows(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=40, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    fit = fitted(trainer, size=8)
    with Neighbour(trainer, at_calls=(0,), take_bytes=LIMIT):
        trainer.train()
    sizes = fit.guard.train_sizes
    assert fit.oom_events == 1
    assert sizes is not None
    assert set(sizes.lengths) == {4}  # of 8, in equal parts
    assert sizes.next_size() > 4


def test_one_sample_that_does_not_fit_ends_the_run_with_remedies(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    fit = fitted(trainer, size=4)
    fit.guard.limit_bytes = 2**17  # less than the weights
    with pytest.raises(DoesNotFitError, match="not even a micro-batch of 1 fits"):
        trainer.train()


def test_an_error_that_is_not_about_memory_is_the_users_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    fitted(trainer, size=4)

    def broken(*_: Any) -> None:
        raise ValueError("column 7 is missing")

    trainer.model.register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="column 7 is missing"):
        trainer.train()


def test_a_batch_without_padding_says_that_it_cannot_be_split(tmp_path: Path) -> None:
    trainer = make_sft(tmp_path, padding_free=True, max_length=None)
    fit = fitted(trainer, size=4)
    assert any("cannot be split" in note for note in fit.notes)
    with (
        Neighbour(trainer, at_calls=(2,), take_bytes=LIMIT),
        pytest.raises(DoesNotFitError, match="cannot be split: its sequences lie behind each other"),
    ):
        trainer.train()


def test_sequences_of_one_row_are_known_by_their_positions(tmp_path: Path) -> None:
    import transformers

    trainer = make_trainer(tmp_path)
    trainer.data_collator = transformers.DataCollatorWithFlattening()
    fit = fitted(trainer, size=4)
    assert any("cannot be split" in note for note in fit.notes)
    with (
        Neighbour(trainer, at_calls=(2,), take_bytes=LIMIT),
        pytest.raises(DoesNotFitError, match="in one row \\(position_ids\\)"),
    ):
        trainer.train()


@pytest.mark.parametrize("name", MAKERS)
def test_an_evaluation_is_split_with_the_same_result(name: str, tmp_path: Path) -> None:
    plain = MAKERS[name](tmp_path / "a", eval_count=8)
    expected = plain.evaluate()
    trainer = MAKERS[name](tmp_path / "b", eval_count=8)
    fit = fitted(trainer, size=4, evaluation=False)
    forwards: list[int] = []

    def take(*_: Any) -> None:
        forwards.append(len(forwards))
        if len(forwards) == 2:  # the second batch
            torch.zeros(LIMIT, dtype=torch.uint8)

    trainer.model.register_forward_pre_hook(take)
    found = trainer.evaluate()
    assert fit.oom_events == 1
    shared = [name for name in expected if name.startswith("eval_") and "runtime" not in name and "second" not in name]
    shared = [name for name in shared if "preparation" not in name]
    assert "eval_loss" in shared
    assert {name: found[name] for name in shared} == pytest.approx(
        {name: expected[name] for name in shared}, rel=1e-2, abs=2e-3
    )
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_among_ranks_an_evaluation_that_runs_out_of_memory_names_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of TRL's gathers figures of all ranks: one that does it again in parts would leave the others waiting."""
    trainer = make_trainer(tmp_path, eval_count=8)
    fit = fitted(trainer, size=4, evaluation=False)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    trainer.model.register_forward_pre_hook(lambda *_: torch.zeros(LIMIT, dtype=torch.uint8))
    with pytest.raises(LostError, match="rank 0 ran out of memory in an evaluation"):
        trainer.evaluate()
    assert fit.oom_events == 0


def test_predictions_of_a_split_batch_are_in_order(tmp_path: Path) -> None:
    expected = make_trainer(tmp_path / "a", eval_count=8).predict(Texts(8))
    trainer = make_trainer(tmp_path / "b", eval_count=8)
    fit = fitted(trainer, size=4, evaluation=False)
    fit.guard.eval_sizes.live.size = 1
    found = trainer.predict(Texts(8))
    assert found.predictions.shape == expected.predictions.shape
    torch.testing.assert_close(
        torch.tensor(found.predictions), torch.tensor(expected.predictions), rtol=1e-4, atol=1e-5
    )
    assert (found.label_ids == expected.label_ids).all()


def test_generated_answers_of_a_split_batch_may_differ_in_length(tmp_path: Path) -> None:
    import transformers

    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), **{**ARGUMENTS, "predict_with_generate": True})
    trainer = transformers.Seq2SeqTrainer(model=make_seq2seq(), args=args, data_collator=padded, train_dataset=Texts())
    trainer.model_accepts_loss_kwargs = False
    generate, lengths = trainer.model.generate, iter([3, 2, 2, 2])
    trainer.model.generate = lambda **options: generate(**{**options, "max_new_tokens": next(lengths)})
    fit = fitted(trainer, size=4)
    fit.guard.eval_sizes.live.size = 1
    trainer.model.generation_config.max_length = 1  # to which shorter answers would be filled
    found = trainer.predict(Texts(4))
    assert found.predictions.shape == (4, 4)
    assert (found.predictions == -100).sum() == 3
