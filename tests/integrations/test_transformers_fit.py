"""Sizes for a trainer before `train()`: the effective batch stays, everything else too, and training is as usual."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")
pytest.importorskip("peft")

import transformers

from brim.errors import DoesNotFitError, RequestError
from brim.integrations.transformers import _divisor, fit_to_memory, forecast
from brim.records import MemoryFigures, Plan
from tests.integrations.trainers import (
    ARGUMENTS,
    Texts,
    losses,
    make_dpo,
    make_model,
    make_seq2seq,
    make_sft,
    make_trainer,
    padded,
    weights,
)

KIB = 2**10


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, short_probes: None) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise


def test_the_size_reaches_the_loader_and_the_effective_batch_stays(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    fit = fit_to_memory(trainer, memory_limit=900 * KIB, objective="largest")
    assert fit.plan is not None
    assert any(probe.verdict == "oom" for probe in fit.plan.probes)
    assert 1 < fit.per_device_train_batch_size < 16  # type: ignore[operator]
    assert fit.per_device_train_batch_size * fit.gradient_accumulation_steps == 16  # type: ignore[operator]
    assert fit.effective_batch == 16
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == fit.per_device_train_batch_size
    assert trainer.args.gradient_accumulation_steps == fit.gradient_accumulation_steps
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == fit.per_device_train_batch_size
    trainer.train()
    assert fit.oom_events == 0
    assert trainer.state.train_batch_size == fit.per_device_train_batch_size


def test_everything_but_the_sizes_is_as_it_was(tmp_path: Path) -> None:
    trainer = make_sft(tmp_path, eval_count=8, gradient_checkpointing=True)
    before, arguments = weights(trainer), trainer.args.to_dict()
    attributes, flags = dict(vars(trainer)), [(module, dict(vars(module))) for module in trainer.model.modules()]
    hooks = [dict(module._forward_hooks) for module, _ in flags]
    random.seed(3)
    states = random.getstate(), torch.get_rng_state()
    fit = fit_to_memory(trainer, memory_limit="64MiB")
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    for module, held in flags:
        assert vars(module).keys() == held.keys()
        assert all(vars(module)[name] is value for name, value in held.items())
    assert [dict(module._forward_hooks) for module, _ in flags] == hooks
    changed = {name for name, value in trainer.args.to_dict().items() if arguments[name] != value}
    assert changed <= {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    }
    fit.remove()
    own = {name for name, value in attributes.items() if vars(trainer)[name] is not value}
    assert own <= {"_train_batch_size"}
    assert vars(trainer).keys() == attributes.keys()
    assert trainer.accelerator._models == trainer.accelerator._optimizers == []


def test_training_goes_as_usual_with_logging_evaluation_and_checkpoints(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "a", per_device_train_batch_size=8, gradient_accumulation_steps=1)
    plain.train()
    trainer = make_trainer(
        tmp_path / "b", eval_count=8, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        per_device_train_batch_size=8, gradient_accumulation_steps=1,
    )  # fmt: skip
    fit = fit_to_memory(trainer, memory_limit=700 * KIB, objective="largest")
    assert fit.gradient_accumulation_steps > 1
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("again", [True, False])
def test_a_checkpoint_is_resumed_with_or_without_fitting_again(again: bool, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    plain = make_trainer(tmp_path / "a", **arguments)
    plain.train()
    first = make_trainer(tmp_path / "b", **arguments)
    fit = fit_to_memory(first, memory_limit=600 * KIB, objective="largest")
    assert fit.per_device_train_batch_size != 4
    first.train()
    later = make_trainer(tmp_path / "b", **arguments)
    if again:
        fit_to_memory(later, memory_limit=600 * KIB, objective="largest")
    later.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert losses(later)[-2:] == pytest.approx(losses(plain)[-2:], rel=1e-5)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(later)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_fitting_twice_wraps_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    own = trainer.training_step
    fit_to_memory(trainer, memory_limit="64MiB", max_probes=1)
    second = fit_to_memory(trainer, memory_limit="64MiB", max_probes=1)
    assert second.effective_batch == 8
    assert trainer.training_step.__wrapped__ == own
    second.remove()
    assert trainer.training_step == own


def test_the_evaluation_batch_is_found_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_count=16)
    fit = fit_to_memory(trainer, memory_limit="64MiB", objective="largest")
    assert fit.eval_plan is not None
    assert fit.per_device_eval_batch_size == trainer.args.per_device_eval_batch_size == 16
    batch = next(iter(trainer.get_eval_dataloader()))
    assert len(batch["input_ids"]) == 16
    kept = make_trainer(tmp_path, eval_count=16)
    assert fit_to_memory(kept, memory_limit="64MiB", evaluation=False).per_device_eval_batch_size == 4


def test_sizes_are_tried_on_the_longest_samples(tmp_path: Path) -> None:
    seen: set[tuple[int, ...]] = set()

    class Watched(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            seen.add(tuple(inputs["input_ids"].shape))
            return super().training_step(model, inputs, *args)

    fit_to_memory(make_trainer(tmp_path, kind=Watched), memory_limit="64MiB")
    assert {length for _, length in seen} == {16}


def test_samples_of_the_caller_stand_in_for_a_stream(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Texts())

    trainer = make_trainer(tmp_path)
    trainer.train_dataset = Stream()
    with pytest.raises(RequestError, match="pass samples="):
        fit_to_memory(trainer, memory_limit="64MiB")
    assert fit_to_memory(trainer, memory_limit="64MiB", samples=[Texts()[4]]).effective_batch == 8


def test_a_stream_that_knows_its_length_has_no_samples_by_number(tmp_path: Path) -> None:
    class Counted(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Texts())

        def __len__(self) -> int:
            return len(Texts())

    trainer = make_trainer(tmp_path)
    trainer.train_dataset = Counted()
    with pytest.raises(RequestError, match="pass samples="):
        fit_to_memory(trainer, memory_limit="64MiB")


def test_the_longest_samples_do_not_bound_the_evaluation_batch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_count=16)
    fit = fit_to_memory(trainer, memory_limit="64MiB", batch_size=4, objective="largest", eval_samples=[Texts()[4]])
    assert fit.per_device_eval_batch_size == 16


def test_another_number_of_steps_is_noted(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, dataloader_drop_last=True, per_device_train_batch_size=16, gradient_accumulation_steps=1
    )
    assert not fit_to_memory(trainer, memory_limit="64MiB", batch_size=16).notes
    notes = fit_to_memory(trainer, memory_limit="64MiB", batch_size=4).notes
    assert any("dataloader_drop_last leaves out what is left of 4 samples" in note for note in notes)


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def test_a_loss_that_would_grow_with_the_accumulation_is_refused(tmp_path: Path) -> None:
    """The trainer does not divide it by the micro-batches, since it takes it to be divided by the window's items."""

    class Mean(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer = make_trainer(tmp_path, kind=Mean)
    with pytest.raises(RequestError, match="model_accepts_loss_kwargs = False"):
        fit_to_memory(trainer, memory_limit="64MiB")
    assert "training_step" not in vars(trainer)
    trainer.model_accepts_loss_kwargs = False
    fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
    function = make_trainer(tmp_path)
    function.compute_loss_func = mean_loss
    with pytest.raises(RequestError, match="in compute_loss_func"):
        fit_to_memory(function, memory_limit="64MiB")


def test_a_loss_that_would_shrink_with_the_accumulation_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.loss_is_scaled_for_ga = False
    with pytest.raises(RequestError, match="leave loss_is_scaled_for_ga out"):
        fit_to_memory(trainer, memory_limit="64MiB")


def test_a_loss_function_that_is_given_no_number_of_items_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without labels there is none, and the trainer does not divide the loss by the micro-batches either."""
    trainer = make_trainer(tmp_path)
    trainer.data_collator = lambda samples: {"input_ids": padded(samples)["input_ids"]}
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
    with pytest.raises(RequestError, match="here there is none; if it is a mean over the batch, set"):
        fit_to_memory(trainer, memory_limit="64MiB")
    trainer.loss_is_scaled_for_ga = False
    fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")  # as in 5.17, which does not divide
    with pytest.raises(RequestError, match="here there is none; override compute_loss"):
        fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)


def test_a_loss_that_compares_the_samples_of_a_batch_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.data_collator = lambda samples: {"input_ids": padded(samples)["input_ids"], "return_loss": True}
    with pytest.raises(RequestError, match="return_loss, a loss that compares all pairs of a batch"):
        fit_to_memory(trainer, memory_limit="64MiB")
    assert trainer.args.per_device_train_batch_size == 4


def test_a_part_of_the_loss_that_counts_in_every_micro_batch_is_noted(tmp_path: Path) -> None:
    notes = {}
    for auxiliary in (0.0, 0.1):

        class Routed(transformers.Trainer):
            def compute_loss(self, *args: Any, added: float = auxiliary, **named: Any) -> Any:
                return super().compute_loss(*args, **named) + added

        trainer = make_trainer(tmp_path, kind=Routed)
        notes[auxiliary] = fit_to_memory(trainer, memory_limit="64MiB", batch_size=4).notes
    assert notes[0.0] == []
    assert any("of the loss are not divided by num_items_in_batch" in note for note in notes[0.1])


def test_a_release_that_does_not_know_how_a_loss_is_scaled_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mean(transformers.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer = make_trainer(tmp_path, kind=Mean)
    fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")  # as in 5.17, which does not divide
    with pytest.raises(RequestError, match="model_accepts_loss_kwargs = False"):
        fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)


def test_a_loader_with_another_size_than_fitted_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
    trainer._train_batch_size = 2  # as an early release of transformers 5 leaves it after a resume
    with pytest.raises(RequestError, match="batches of 2, not of 4"):
        trainer.train()


def test_pairs_are_counted_as_one_sample(tmp_path: Path) -> None:
    trainer = make_dpo(tmp_path)
    fit = fit_to_memory(trainer, memory_limit="64MiB")
    assert fit.per_device_train_batch_size == 8
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == 16


def test_lora_and_half_precision_are_fitted_as_they_will_run(tmp_path: Path) -> None:
    plain, half = (
        fit_to_memory(make_trainer(tmp_path, lora=True, bf16=bf16), memory_limit="64MiB", max_probes=1).plan
        for bf16 in (False, True)
    )
    peaks = [probe.peak_allocated_bytes for plan in (plain, half) for probe in plan.probes]  # type: ignore[union-attr]
    assert peaks[0] != peaks[1]


def test_the_optimizers_state_is_counted_though_a_scaler_skips_its_first_steps(tmp_path: Path) -> None:
    peaks = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.99)):
        trainer = make_trainer(tmp_path, optim="adamw_torch")  # a fused one makes its state in a skipped step too
        trainer.accelerator.scaler = scaler
        plan = fit_to_memory(trainer, memory_limit="64MiB", batch_size=4).plan
        peaks.append(plan.probes[0].peak_allocated_bytes)  # type: ignore[union-attr]
    assert peaks[1] >= peaks[0] > 0


def test_nothing_fits_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = weights(trainer)
    with pytest.raises(DoesNotFitError):
        fit_to_memory(trainer, memory_limit=128 * KIB)
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == 4
    assert "training_step" not in vars(trainer)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def plan_of(size: int, largest: int) -> Plan:
    return Plan(
        unit="samples", size=size, batch_size_max=largest, batch_size_max_estimate=None, objective="fastest", reason="",
        cached=False, device="cpu", memory=MemoryFigures(limit_bytes=1, headroom_bytes=0, used_by_others_bytes=0),
        probes=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "largest", "effective", "expected"),
    [(40, 40, 64, 32), (48, 64, 64, 64), (12, 12, 12, 12), (16, 16, 17, 1), (16, 17, 17, 17), (5, 5, 12, 4)],
)
def test_the_effective_batch_is_a_multiple_of_the_size(size: int, largest: int, effective: int, expected: int) -> None:
    assert _divisor(plan_of(size, largest), effective) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "four"}, "batch_size='four'"),
        ({"batch_size": 3}, "batch_size=3: the effective batch is 8"),
        ({"samples": []}, "samples=: give a list"),
        ({"samples": Texts()[0]}, "samples=: give a list"),
        ({"eval_samples": "text"}, "eval_samples=: give a list"),
        ({"memory_limit": "lots"}, "memory_limit='lots'"),
    ],
)
def test_wrong_parameters_say_what_to_give(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        fit_to_memory(make_trainer(tmp_path), **{"memory_limit": "64MiB", "max_probes": 1} | options)


def test_a_size_may_be_auto_or_text_as_everywhere(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert fit_to_memory(trainer, memory_limit="64MiB", batch_size="4").per_device_train_batch_size == 4  # type: ignore[arg-type]
    assert forecast(trainer, gpu="rtx 4090", batch_size="4").forecasts[0].batch_size == 4  # type: ignore[arg-type]


def test_a_collator_with_a_generator_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    class Hiding:
        generator: torch.Generator | None = None

        def __call__(self, samples: Any) -> Any:
            self.generator = self.generator or torch.Generator().manual_seed(3)  # as transformers' do with a seed
            batch = padded(samples)
            hidden = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
            return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1)}

    runs = []
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, max_steps=2)
        trainer.data_collator = Hiding()
        for _ in range(2):  # before there is a generator, and when it has been drawn from
            if name == "b":
                forecast(trainer, gpu="rtx 4090", batch_size=4)
                fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
            trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


def test_batches_that_are_no_mappings_are_passed_on_as_they_are(tmp_path: Path) -> None:
    class OfTuples(transformers.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**dict(zip(("input_ids", "labels", "attention_mask"), inputs, strict=True)))
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer = make_trainer(tmp_path, kind=OfTuples, max_steps=1)
    trainer.data_collator = lambda samples: tuple(padded(samples).values())
    fit = fit_to_memory(trainer, memory_limit="64MiB", batch_size=4)
    assert any("it is a tuple, not a mapping" in note for note in fit.notes)
    trainer.train()
    assert trainer.state.global_step == 1


def test_how_a_model_generates_is_as_it_was(tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "predict_with_generate": True}
    trainer = transformers.Seq2SeqTrainer(
        model=make_seq2seq(), args=transformers.Seq2SeqTrainingArguments(str(tmp_path), **arguments),
        eval_dataset=Texts(8), data_collator=padded, compute_metrics=lambda _: {},
    )  # fmt: skip
    trainer.model.generation_config.max_new_tokens = 2
    before = dict(vars(trainer.model.generation_config))
    fit_to_memory(trainer, memory_limit="64MiB", max_probes=1)
    assert vars(trainer.model.generation_config) == before


def test_what_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no Trainer"):
        fit_to_memory(torch.nn.Linear(1, 1))
    with pytest.raises(RequestError, match="auto_find_batch_size"):
        fit_to_memory(make_trainer(tmp_path, auto_find_batch_size=True))
    with pytest.raises(RequestError, match="sorts all pairs"):
        fit_to_memory(make_dpo(tmp_path, loss_type="aot"))
    trainer = make_trainer(tmp_path)
    trainer.is_in_train = True  # as an interrupted train() leaves it
    with pytest.raises(RequestError, match=r"ended by an error or Ctrl-C: call it before train\(\)"):
        fit_to_memory(trainer)
    trainer = make_trainer(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(RequestError, match="shards its model"):
        forecast(trainer)
    trainer = make_trainer(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(RequestError, match="nothing to fit"):
        fit_to_memory(trainer)


def test_other_trainers_of_trl_are_refused(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    with pytest.raises(RequestError, match="GRPOTrainer ties its batches"):
        fit_to_memory(trainer)


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(RequestError, match="pip install"):
        fit_to_memory(trainer)


def test_a_trainer_that_makes_its_own_model_is_guarded(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        model_init=lambda: make_model(), args=make_trainer(tmp_path).args, train_dataset=Texts(), data_collator=padded
    )
    fit = fit_to_memory(trainer, memory_limit="64MiB", max_probes=1)
    trainer.train()
    assert fit.oom_events == 0
    assert len(losses(trainer)) == 4
