"""The Lightning callback with real trainers on the CPU: sizes are set, and nothing else is different."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from brim.errors import RequestError
from brim.forecasting.forecast import forecast_curve
from brim.forecasting.gpus import find_gpu
from brim.integrations import lightning as integration
from brim.integrations.lightning import BatchSize
from brim.integrations.lightning_stage import LightningStage
from brim.integrations.lightning_workload import quiet
from brim.memory.devices import memory_of
from tests.integrations.lightning_modules import (
    QUIET,
    SAMPLES,
    WIDTH,
    Classifier,
    CountingLogger,
    Plain,
    Remember,
    differences,
    samples,
    state_of,
    trainer,
)

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

STAGES = ["fit", "validate", "test", "predict"]


def run(stage: str, module: Any, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    ran = trainer(*callbacks, **settings)
    getattr(ran, stage)(module)
    return ran


@pytest.mark.parametrize("stage", STAGES)
def test_trials_leave_everything_as_it_was(stage: str) -> None:
    before, after, logger, profiler = Remember(), Remember(), CountingLogger(), SimpleProfiler()
    callback = BatchSize(max_batch_size=16, objective="largest", survive=None)
    module, settings = Classifier(), {"limit_train_batches": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    run(stage, module, before, callback, after, logger=logger, profiler=profiler, **settings)
    assert callback.plans[stage].probes
    assert list(differences(before.states[stage], after.states[stage])) == []
    assert after.batches == (1 if stage == "fit" else 0)
    assert logger.calls <= 2  # of the run itself
    assert len(profiler.recorded_durations["[LightningModule]Classifier.on_before_backward"]) == after.batches


class Averages:
    """Averaged weights, kept outside of any module."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net
        self.weights = [parameter.detach().clone() for parameter in net.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for mean, parameter in zip(self.weights, self.net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


def test_an_object_with_a_state_that_the_module_holds_is_put_back() -> None:
    class Averaging(Plain):
        def __init__(self) -> None:
            super().__init__(2)
            self.averages = Averages(self.net)

        def on_train_batch_end(self, *_: Any) -> None:
            self.averages.update()

    module = Averaging()
    before = [mean.clone() for mean in module.averages.weights]
    run("fit", module, BatchSize(max_batch_size=8), max_steps=0, limit_val_batches=0)
    assert module.averages.updates == 0
    assert all(torch.equal(one, other) for one, other in zip(before, module.averages.weights, strict=True))


def test_a_fit_is_the_one_that_was_started_at_the_size_found() -> None:
    pl.seed_everything(3, verbose=False)
    found = Classifier()
    callback = BatchSize(max_batch_size=16, objective="largest")
    ran = run("fit", found, callback, max_epochs=2)
    after = state_of(ran, found)

    pl.seed_everything(3, verbose=False)
    started = Classifier(callback.batch_size)
    control = run("fit", started, max_epochs=2)
    expected = state_of(control, started)
    after["objects"] = expected["objects"]
    assert callback.batch_size != 4
    assert list(differences(after, expected)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_runs_at_the_size_found(stage: str) -> None:
    module = Classifier(2)
    ran = run(stage, module, callback := BatchSize(max_batch_size=8), num_sanity_val_steps=0)
    assert callback.batch_size == module.batch_size
    name = {"fit": "train_dataloader", "validate": "val_dataloaders"}.get(stage, f"{stage}_dataloaders")
    assert getattr(ran, name).batch_sampler.batch_size == module.batch_size
    loop = ran.fit_loop.epoch_loop if stage == "fit" else getattr(ran, f"{stage}_loop")
    assert loop.batch_progress.current.completed == -(-SAMPLES // module.batch_size)


def test_the_largest_size_within_the_limit_is_found_and_one_more_does_not_fit() -> None:
    module = Plain(data=samples(4096))
    callback = BatchSize(objective="largest", memory_limit="256KiB", stages=["predict"])
    run("predict", module, callback)
    assert callback.plan is not None
    size = callback.batch_size

    def peak(length: int) -> int:
        memory = memory_of("cpu")
        with torch.no_grad(), memory.metered(module.parameters()) as reading:
            batch = torch.zeros(length, WIDTH), torch.zeros(length, dtype=torch.long)
            module.predict_step(batch, 0)
        return reading.peak_allocated_bytes

    assert size is not None
    assert peak(size) <= 256 * 1024 < peak(size + 1)


class Parts(pl.LightningDataModule):
    def __init__(self, batch_size: int = 2, *, in_hparams: bool = False) -> None:
        super().__init__()
        if in_hparams:
            self.save_hyperparameters()
        else:
            self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        size = self.hparams.batch_size if "batch_size" in self.hparams else self.batch_size
        return DataLoader(samples(), batch_size=size)

    val_dataloader = train_dataloader


class InHparams(Classifier):
    def __init__(self, rows: int = 2) -> None:
        super().__init__(None)
        self.save_hyperparameters()

    def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.hparams.rows, shuffle=shuffle)


@pytest.mark.parametrize("in_hparams", [False, True])
def test_the_size_is_set_in_the_data_module(in_hparams: bool) -> None:
    data, callback = Parts(in_hparams=in_hparams), BatchSize(max_batch_size=16, objective="largest")
    ran = trainer(callback, limit_val_batches=0)
    ran.fit(Classifier(None), datamodule=data)
    assert ran.train_dataloader.batch_size == callback.batch_size != 2
    assert (data.hparams.batch_size if in_hparams else data.batch_size) == callback.batch_size


def test_another_attribute_is_set_by_name_in_hparams() -> None:
    module, callback = InHparams(), BatchSize("rows", max_batch_size=16, objective="largest")
    ran = run("fit", module, callback)
    assert module.hparams.rows == ran.train_dataloader.batch_size == callback.batch_size != 2


def test_a_property_that_reads_hparams_is_left_to_read_them() -> None:
    class Reading(InHparams):
        @property
        def rows(self) -> int:
            return self.hparams.rows

    module = Reading()
    run("fit", module, BatchSize("rows", max_batch_size=16, objective="largest"))
    assert module.rows == 16


def test_without_an_attribute_the_error_says_where_to_put_one() -> None:
    with pytest.raises(RequestError, match=r"set self\.batch_size in __init__"):
        run("fit", Classifier(None), BatchSize())


def test_a_loader_that_ignores_the_attribute_is_an_error() -> None:
    class Fixed(Classifier):
        def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
            return DataLoader(self.data, batch_size=7)

    module = Fixed(4)
    with pytest.raises(RequestError, match=r"batch size 7 where batch_size is 8"):
        run("fit", module, BatchSize())
    assert module.batch_size == 4


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"survive": "often"}, "survive='often'"),
        ({"stages": ["train"]}, "stages='train'"),
        ({"effective_batch": 0}, "effective_batch=0"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"memory_limit": "lots"}, "memory_limit='lots'|lots"),
    ],
)
def test_a_wrong_setting_is_named_when_the_callback_is_made(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        BatchSize(**settings)


# ------------------------------------------------------------------------------------------------ loaders


def test_plain_loaders_that_are_passed_in_are_made_again() -> None:
    data = samples()
    loader = DataLoader(data, batch_size=2, shuffle=True, drop_last=True, collate_fn=torch.utils.data.default_collate)
    ran = trainer(callback := BatchSize(max_batch_size=16, objective="largest"), limit_val_batches=0)
    ran.fit(Classifier(None), loader)
    used = ran.train_dataloader
    assert used.batch_size == callback.batch_size != 2
    assert (used.sampler, used.dataset, used.drop_last) == (loader.sampler, data, True)
    assert loader.batch_size == 2
    assert ran.global_step == SAMPLES // used.batch_size


def test_a_passed_in_loader_with_a_batch_sampler_of_its_own_is_an_error() -> None:
    class Buckets(BatchSampler):
        pass

    data = samples()
    loader = DataLoader(data, batch_sampler=Buckets(SequentialSampler(data), 4, drop_last=False))
    with pytest.raises(RequestError, match="return it from train_dataloader"):
        trainer(BatchSize()).fit(Classifier(), loader)


def test_a_sampler_that_draws_a_part_of_the_data_bounds_the_size() -> None:
    """Otherwise a batch is larger than the epoch, and with drop_last there is none."""
    part = torch.utils.data.SubsetRandomSampler(range(24))
    loader = DataLoader(samples(), batch_size=4, sampler=part, drop_last=True)
    ran = trainer(callback := BatchSize(objective="largest"), limit_val_batches=0)
    ran.fit(Classifier(None), loader)
    assert (callback.batch_size, ran.global_step) == (24, 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(WIDTH), 1)] * SAMPLES)


class StreamOfBatches(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SAMPLES // self.size):
            yield torch.ones(self.size, WIDTH), torch.zeros(self.size, dtype=torch.long)


def test_an_iterable_data_set_has_no_largest_size() -> None:
    module = Plain(2, data=Stream())
    ran = run("fit", module, callback := BatchSize(max_batch_size=32, objective="largest"), limit_val_batches=0)
    assert ran.train_dataloader.batch_size == callback.batch_size != 2
    assert ran.global_step == -(-SAMPLES // callback.batch_size)


def test_a_data_set_that_makes_its_own_batches_is_asked_for_them() -> None:
    class Batched(Plain):
        def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
            return DataLoader(StreamOfBatches(self.batch_size), batch_size=None)

    module = Batched(2)
    run("fit", module, callback := BatchSize(max_batch_size=16, objective="largest"), limit_val_batches=0)
    assert module.batch_size == callback.batch_size
    assert {probe.batch_size for probe in callback.plan.probes} >= {1, callback.batch_size}


def test_batches_repeat_the_costliest_sample() -> None:
    lengths = []

    class Text(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            lengths.append(batch.shape[1])
            return self.net(batch.mean(1, keepdim=True).expand(-1, WIDTH)).mean()

        def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
            return DataLoader([torch.ones(n) for n in (3, 9, 5)], batch_size=self.batch_size)

    class Look(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    module = Text(1)
    callback = BatchSize(max_batch_size=2)
    run("fit", module, callback, Look(), limit_train_batches=0, limit_val_batches=0)
    assert lengths == []  # nothing to run: nothing is tried
    run("fit", module, callback, max_steps=0, limit_val_batches=0)
    assert set(lengths) == {9}
    assert "the costliest of 3 samples" in callback.notes[0]


def test_hooks_of_the_data_module_prepare_the_batches_that_are_tried() -> None:
    class Lists(Parts):
        def train_dataloader(self) -> Any:
            rows = [(row.tolist(), int(label)) for row, label in samples()]
            return DataLoader(rows, batch_size=self.batch_size, collate_fn=list)

        val_dataloader = train_dataloader

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return torch.tensor([row for row, _ in batch]), torch.tensor([label for _, label in batch])

    data = Lists()
    trainer(BatchSize(max_batch_size=16, objective="largest")).fit(Plain(None), datamodule=data)
    assert data.batch_size == 16


def test_several_training_loaders_are_tried_together() -> None:
    class Two(Plain):
        def train_dataloader(self) -> Any:
            return {"a": self.make_loader(), "b": self.make_loader()}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    ran = run("fit", Two(2), callback := BatchSize(max_batch_size=8), limit_val_batches=0)
    assert {loader.batch_size for loader in ran.train_dataloader.values()} == {callback.batch_size}


def test_passed_in_loaders_are_combined_as_they_were() -> None:
    class Two(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch[0]) + self.loss(batch[1])

    long, short = DataLoader(samples(64), batch_size=2), DataLoader(samples(32), batch_size=2)
    combined = CombinedLoader([long, short], "min_size")
    ran = trainer(BatchSize(max_batch_size=8, objective="largest"), limit_val_batches=0)
    ran.fit(Two(None), combined)
    assert ran.global_step == 32 // 8  # the shorter one's
    assert combined.flattened == [long, short]


def test_an_evaluation_of_combined_loaders_is_tried_on_batches_of_all() -> None:
    class Both(Plain):
        def val_dataloader(self) -> Any:
            return CombinedLoader({"a": self.make_loader(), "b": self.make_loader()}, "max_size")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch["a"]) + self.loss(batch["b"]))

    run("validate", Both(2), callback := BatchSize(max_batch_size=8, objective="largest"))
    assert callback.batch_size == 8


def test_worst_case_batches_can_be_the_users_own() -> None:
    asked = []

    def make_batch(size: int) -> Any:
        asked.append(size)
        return torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)

    run("fit", Plain(2), callback := BatchSize(make_batch=make_batch, max_batch_size=8), limit_val_batches=0)
    assert set(asked) == {probe.batch_size for probe in callback.plan.probes}


# ------------------------------------------------------------------------------------------------ fit


def test_validation_within_a_fit_must_fit_as_well() -> None:
    class Wide(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.zeros(len(batch[0]), 4096)

    class Alone(Wide):
        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=1)

    settings: dict[str, Any] = {"objective": "largest", "memory_limit": "512KiB"}
    run("fit", Wide(2), bounded := BatchSize(**settings))
    run("fit", Alone(2), free := BatchSize(**settings))
    assert bounded.batch_size < 512 * 1024 // (4096 * 4)
    assert free.batch_size == SAMPLES


def test_a_schedule_is_made_for_the_number_of_steps_that_there_are() -> None:
    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    callback = BatchSize(max_batch_size=16, objective="largest")
    ran = run("fit", Scheduled(2), callback, max_epochs=3, limit_val_batches=0)
    assert callback.batch_size == 16
    assert ran.lr_scheduler_configs[0].scheduler.total_steps == ran.global_step == 3 * SAMPLES // 16


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_loader_that_lightning_made_during_a_trial_does_not_stay(hook: str) -> None:
    """Whoever asks for the number of steps makes Lightning read the loader, and keep it; here with a trial's size."""
    steps = []
    module = Plain(16)  # the size that is found
    setattr(module, hook, lambda: steps.append(int(module.trainer.estimated_stepping_batches)))
    ran = run("fit", module, BatchSize(max_batch_size=16, objective="largest"), limit_val_batches=0)
    assert ran.train_dataloader.batch_size == module.batch_size == 16
    assert ran.global_step == steps[-1] == SAMPLES // 16


def test_an_epoch_has_as_many_batches_as_the_validation_interval() -> None:
    module = Plain(2)
    run("fit", module, BatchSize(objective="largest"), val_check_interval=4)
    assert module.batch_size == SAMPLES // 4


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("fit", {"limit_train_batches": 0.1, "limit_val_batches": 0}),
        ("fit", {"limit_val_batches": 0.1}),
        ("test", {"limit_test_batches": 0.1}),
    ],
)
def test_a_part_of_an_epoch_has_a_batch(stage: str, settings: dict[str, Any]) -> None:
    """Lightning ends a run of which a tenth is less than one batch."""
    module = Plain(2)
    run(stage, module, BatchSize(objective="largest"), **settings)
    assert module.batch_size == SAMPLES // 10


def test_the_effective_batch_is_kept_by_accumulation() -> None:
    module = Plain(32)
    ran = run("fit", module, BatchSize(effective_batch="keep", max_batch_size=8), limit_val_batches=0)
    assert module.batch_size * ran.accumulate_grad_batches == 32
    assert ran.global_step == SAMPLES // 32


def test_an_effective_batch_is_a_product_of_whole_numbers() -> None:
    module = Plain(2)
    callback = BatchSize(effective_batch=21, max_batch_size=9, objective="largest")
    ran = run("fit", module, callback, limit_val_batches=0)
    assert (module.batch_size, ran.accumulate_grad_batches) == (7, 3)


@pytest.mark.parametrize("problem", ["manual", "scheduler"])
def test_an_effective_batch_that_cannot_be_kept_is_an_error(problem: str) -> None:
    module, others = Plain(2), []
    if problem == "manual":
        module.automatic_optimization = False
    else:
        others = [pl.callbacks.GradientAccumulationScheduler({0: 2})]
    with pytest.raises(RequestError, match="effective_batch="):
        run("fit", module, BatchSize(effective_batch=32), *others)


class Manual(Classifier):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__(2)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net[0].parameters())
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


def test_manual_optimization_is_tried_as_it_is_and_put_back() -> None:
    before, after = Remember(), Remember()
    module = Manual()
    ran = run("fit", module, before, callback := BatchSize(max_batch_size=16, objective="largest", survive=None), after)
    assert list(differences(before.states["fit"], after.states["fit"])) == []
    assert ran.train_dataloader.batch_size == callback.batch_size
    assert ran.global_step == 2 * -(-SAMPLES // callback.batch_size)


def test_hooks_that_a_step_relies_on_have_run() -> None:
    class Hooked(Plain):
        def on_train_start(self) -> None:
            self.weight = 2.0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.factor = self.weight

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * self.factor

    module = Hooked(2)
    run("fit", module, callback := BatchSize(max_batch_size=8), limit_val_batches=0)
    assert callback.plan.probes


def test_an_error_of_the_step_is_raised_as_it_is() -> None:
    class Broken(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            raise KeyError("column 7")

    module = Broken(4)
    with pytest.raises(KeyError, match="column 7") as caught:
        run("fit", module, BatchSize(), num_sanity_val_steps=0)
    assert caught.value.__notes__ == ["brim: raised while sizes were tried, by the step at batch size 1"]
    assert module.batch_size == 4


def test_nothing_is_tried_in_a_fast_dev_run_or_in_a_stage_that_is_left_out() -> None:
    module = Plain(4)
    run("fit", module, callback := BatchSize(), fast_dev_run=True)
    run("test", module, other := BatchSize(stages=["fit"]))
    assert (callback.plan, other.plan, module.batch_size) == (None, None, 4)
    assert "fast_dev_run" in callback.notes[0]


def test_stages_may_have_callbacks_of_their_own() -> None:
    """Lightning refuses two callbacks that are one in a checkpoint."""
    fits = BatchSize(max_batch_size=8, objective="largest", stages=["fit"])
    predicts = BatchSize(max_batch_size=32, objective="largest", stages=["predict"])
    module, ran = Plain(2), trainer(fits, predicts, limit_val_batches=0)
    ran.fit(module)
    assert module.batch_size == 8
    ran.predict(module)
    assert module.batch_size == 32
    assert (fits.plans.keys(), predicts.plans.keys()) == ({"fit"}, {"predict"})


# ------------------------------------------------------------------------------------------------ resumed runs


class Seen(Plain):
    """Remembers which samples each batch had."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows += batch[0][:, 0].tolist()


class SaveAt(pl.Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("saved_with", ["callback", "nothing"])
def test_a_resumed_run_keeps_the_size_of_its_checkpoint(tmp_path: Path, saved_with: str) -> None:
    path = tmp_path / "middle.ckpt"
    first = Seen(8)
    callbacks = [BatchSize(max_batch_size=8, objective="largest")] if saved_with == "callback" else []
    run("fit", first, *callbacks, SaveAt(path, 2), limit_val_batches=0, max_steps=3)

    second = Seen(2 if saved_with == "callback" else 8)
    resumed = BatchSize(max_batch_size=32)
    ran = trainer(resumed, limit_val_batches=0)
    ran.fit(second, ckpt_path=path)
    assert second.batch_size == resumed.batch_size == 8
    assert len(resumed.plan.probes) == 1
    assert ran.global_step == SAMPLES // 8
    assert len(first.rows) + len(second.rows) == SAMPLES


def test_a_checkpoint_size_that_no_longer_fits_is_made_smaller_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    run("fit", Seen(2), BatchSize(max_batch_size=64, objective="largest"), SaveAt(path, 0), limit_val_batches=0)
    resumed = BatchSize(memory_limit="70KiB", max_batch_size=64)
    trainer(resumed, limit_val_batches=0).fit(Seen(2), ckpt_path=path)
    assert resumed.batch_size < 64
    assert any("written at batch size 64" in note for note in resumed.notes)


def test_a_resumed_run_accumulates_to_the_effective_batch_that_is_asked_for(tmp_path: Path) -> None:
    """As with another number of ranks: what accumulated to it before is another product now."""
    path = tmp_path / "middle.ckpt"
    options: dict[str, Any] = {"max_batch_size": 4, "objective": "largest"}
    run("fit", Seen(2), BatchSize(effective_batch=16, **options), SaveAt(path, 3), limit_val_batches=0)
    for effective_batch, expected in ((8, (4, 2)), ("keep", (4, 4)), (6, (3, 2))):
        resumed = BatchSize(effective_batch=effective_batch, **options)
        ran = trainer(resumed, limit_val_batches=0)
        ran.fit(Seen(2), ckpt_path=path)
        assert (resumed.batch_size, ran.accumulate_grad_batches) == expected
    assert any("does not divide the effective batch" in note for note in resumed.notes)


def test_a_checkpoint_that_was_only_evaluated_does_not_decide_the_next_fit(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    run("fit", Seen(2), BatchSize(max_batch_size=4, objective="largest"), SaveAt(path, 0), limit_val_batches=0)
    ran = trainer(callback := BatchSize(max_batch_size=16, objective="largest"), limit_val_batches=0)
    ran.test(module := Seen(2), ckpt_path=path, verbose=False)
    ran.fit(module)
    assert callback.plans["fit"].size == 16


def test_a_new_size_can_be_asked_for_when_a_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    run("fit", Seen(2), BatchSize(max_batch_size=8), SaveAt(path, 0), limit_val_batches=0)
    resumed = BatchSize(max_batch_size=16, keep_on_resume=False, objective="largest")
    trainer(resumed, limit_val_batches=0, max_epochs=2).fit(Seen(2), ckpt_path=path)
    assert resumed.batch_size == 16


# ------------------------------------------------------------------------------------------------ forecast, library


def test_a_training_step_of_a_module_can_be_forecast() -> None:
    found: list[Any] = []

    class Forecast(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            stage = LightningStage("fit", trainer, pl_module, "batch_size")
            before = state_of(trainer, pl_module)
            with stage.sizes_put_back(), quiet(trainer, pl_module, CountingLogger, PassThroughProfiler):
                found.extend(forecast_curve(BatchSize()._workload(stage), gpu=find_gpu("rtx 4090")))
            after = state_of(trainer, pl_module)
            for state in (before, after):
                state.pop("random")
            found.extend(differences(before, after))

    run("fit", Plain(4), Forecast(), max_steps=0, limit_val_batches=0)
    curve, notes, *changed = found
    assert (notes, changed) == ((), [])
    assert curve.allocated_at(64) > curve.allocated_at(8) > 0


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RequestError, match=r"pip install 'brim\[lightning\]'"):
        integration._lightning()


@pytest.mark.slow  # a process that imports torch and both packages of Lightning
def test_the_callback_serves_both_packages_of_lightning() -> None:
    """In a process of its own: made with one package, used in a trainer of the other."""
    program = """
import warnings; warnings.simplefilter("ignore")
from brim.integrations.lightning import BatchSize
import pytorch_lightning as pl, torch
from torch.utils.data import DataLoader
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.layer = 2, torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader([torch.ones(4)] * 32, batch_size=self.batch_size)
module, callback = Module(), BatchSize(max_batch_size=8, objective="largest")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet)
trainer.fit(module)
print(module.batch_size, trainer.global_step, isinstance(callback, pl.Callback))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["8", "4", "False"]
