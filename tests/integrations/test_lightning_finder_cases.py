"""What Lightning's own tests demand of its batch-size finder, demanded of brim's callback.

The cases are those of Lightning's tests/tests_pytorch/tuner/test_scale_batch_size.py, as behaviours; the table in
docs/integrations/lightning.md says for each whether it holds, and the last test compares the two. A case that does not
apply has no test, and its reason stands in the table.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from brim.errors import RequestError
from brim.integrations.lightning import BatchSize
from tests.integrations.lightning_modules import (
    QUIET,
    SAMPLES,
    Classifier,
    CountingLogger,
    Plain,
    differences,
    samples,
    trainer,
)

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "lightning.md"
STAGES = ["fit", "validate", "test", "predict"]


class Parts(pl.LightningDataModule):
    def __init__(self, batch_size: int | None, *, in_hparams: bool = False) -> None:
        super().__init__()
        if in_hparams:
            self.save_hyperparameters()
        elif batch_size is not None:
            self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        size = self.hparams.batch_size if "batch_size" in self.hparams else getattr(self, "batch_size", None)
        module_size = getattr(self.trainer.lightning_module, "batch_size", 1)
        return DataLoader(samples(), batch_size=size or module_size)

    val_dataloader = train_dataloader


class InHparams(Plain):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(None)
        self.save_hyperparameters()

    def make_loader(self, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.hparams.batch_size)


@pytest.mark.parametrize(("of_module", "of_data"), [(2, -1), (2, 2), (2, None), (None, 2), (16, 16)])
def test_scale_batch_size_method_with_model_or_datamodule(of_module: int | None, of_data: int | None) -> None:
    """Module, data module or both have the size: all that have it are set, and the loader has it."""
    module = Plain(of_module)
    data = None if of_data == -1 else Parts(of_data)
    ran = trainer(callback := BatchSize(max_batch_size=32), limit_train_batches=1, limit_val_batches=0)
    ran.fit(module, datamodule=data)
    holders = [one for one in (module, data) if hasattr(one, "batch_size")]
    assert {one.batch_size for one in holders} == {callback.batch_size} == {ran.train_dataloader.batch_size}


@pytest.mark.parametrize("stage", STAGES)
def test_trainer_reset_correctly(stage: str, tmp_path: Path) -> None:
    """Trainer and weights are as before, and no temporary file is left."""
    module = Plain(2)
    ran = trainer(BatchSize(max_batch_size=8), folder=tmp_path, logger=CountingLogger(), max_steps=0)
    names = ("loggers", "callbacks", "global_step", "max_steps", *(f"limit_{x}_batches" for x in
             ("train", "val", "test", "predict")))  # fmt: skip
    expected = {name: getattr(ran, name) for name in names}
    weights, loop = copy.deepcopy(module.state_dict()), copy.deepcopy(ran.fit_loop.state_dict())
    getattr(ran, stage)(module)
    assert {name: getattr(ran, name) for name in names} == expected
    assert list(differences(weights, module.state_dict())) == []
    assert list(differences(loop, ran.fit_loop.state_dict())) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_hparams", [True, False])
def test_auto_scale_batch_size_set_model_attribute(in_hparams: bool) -> None:
    module: Any = InHparams(2) if in_hparams else Plain(2)
    ran = trainer(BatchSize(objective="largest"))
    ran.fit(module)
    after = module.hparams.batch_size if in_hparams else module.batch_size
    assert 2 != after <= len(ran.train_dataloader.dataset)


@pytest.mark.parametrize("in_hparams", [True, False])
def test_auto_scale_batch_size_set_datamodule_attribute(in_hparams: bool) -> None:
    data, module = Parts(2, in_hparams=in_hparams), Plain(2)
    ran = trainer(BatchSize(objective="largest"))
    ran.fit(module, datamodule=data)
    after = data.hparams.batch_size if in_hparams else data.batch_size
    assert ran.datamodule is data
    assert 2 < after <= len(ran.train_dataloader.dataset)


def test_auto_scale_batch_size_duplicate_attribute_warning() -> None:
    """Where the module and its hparams both have a size, both are set: there is nothing to warn about."""

    class Both(InHparams):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__(batch_size)
            self.batch_size = 3

    module = Both()
    trainer(callback := BatchSize(max_batch_size=16, objective="largest")).fit(module)
    assert module.batch_size == module.hparams.batch_size == callback.batch_size


@pytest.mark.parametrize("objective", ["fastest", "largest"])
def test_call_to_trainer_method(objective: Any) -> None:
    """A size found in one run serves the next."""
    module = Plain(2)
    ran = trainer(callback := BatchSize(objective=objective, stages=["fit"]))
    ran.fit(module)
    found = module.batch_size
    trainer().fit(module)
    assert callback.batch_size == found == module.batch_size


def test_error_on_dataloader_passed_to_fit() -> None:
    """More than Lightning's: a plain loader is made again. Where that is not possible, the error says what to do."""
    loader = DataLoader(samples(), batch_size=2)
    ran = trainer(callback := BatchSize(max_batch_size=16, objective="largest"), limit_val_batches=0)
    ran.fit(Plain(2), train_dataloaders=loader)
    assert ran.train_dataloader.batch_size == callback.batch_size != 2
    with pytest.raises(RequestError, match="pass a plain DataLoader"):
        trainer(BatchSize(), limit_val_batches=0).fit(Plain(2), train_dataloaders=[[torch.ones(2, 2)]])


def test_auto_scale_batch_size_with_amp() -> None:
    """Mixed precision on the CPU; on a card with a gradient scaler, tests/gpu."""
    module = Plain(2)
    trainer(BatchSize(max_batch_size=16, objective="largest"), precision="bf16-mixed").fit(module)
    assert module.batch_size != 2


def test_scale_batch_size_no_trials() -> None:
    """No trial is possible to ask for: at least one size has run before it is used."""
    with pytest.raises(RequestError, match="max_probes=0"):
        BatchSize(max_probes=0)
    trainer(callback := BatchSize(max_probes=1)).fit(Plain(2))
    assert callback.batch_size == callback.plan.probes[0].batch_size


def test_scale_batch_size_fails_with_unavailable_mode() -> None:
    with pytest.raises(RequestError, match="objective='ThisModeDoesNotExist'"):
        BatchSize(objective="ThisModeDoesNotExist")  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["fastest", "largest"])
@pytest.mark.parametrize("before", [8, 17, 64])
def test_dataloader_reset_with_scale_batch_size(objective: Any, before: int) -> None:
    """Loaders have the size found, those of training and of validation, never more than the data."""
    ran = trainer(callback := BatchSize(objective=objective))
    ran.fit(Plain(before))
    assert ran.train_dataloader.batch_size == ran.val_dataloaders.batch_size == callback.batch_size <= SAMPLES


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_tuner_with_evaluation_methods(stage: str) -> None:
    """Progress counts the batches of the run, and none of the trials."""
    module = Plain(2)
    ran = trainer(BatchSize(objective="largest", max_batch_size=32), max_epochs=100)
    getattr(ran, stage)(module)
    assert (ran.global_step, ran.current_epoch, module.batch_size) == (0, 0, 32)
    assert getattr(ran, f"{stage}_loop").batch_progress.total.completed == SAMPLES // 32


@pytest.mark.parametrize("stage", STAGES)
def test_batch_size_finder_callback(stage: str, tmp_path: Path) -> None:
    module = Plain(2)
    ran = trainer(BatchSize(objective="largest", max_batch_size=32), max_epochs=2, folder=tmp_path)
    getattr(ran, stage)(module)
    steps = SAMPLES // module.batch_size
    if stage == "fit":
        assert (ran.global_step, ran.current_epoch) == (steps * 2, 2)
        assert ran.fit_loop.epoch_loop.batch_progress.total.completed == steps * 2
    else:
        assert (ran.global_step, ran.current_epoch) == (0, 0)
        assert getattr(ran, f"{stage}_loop").batch_progress.current.completed == steps
    assert list(tmp_path.iterdir()) == []


def test_batch_size_finder_with_multiple_eval_dataloaders() -> None:
    """More than Lightning's: each loader's batch is tried, and all have the size."""

    class Two(Classifier):
        def val_dataloader(self) -> Any:
            return [self.make_loader(), self.make_loader()]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.indices.add(dataloader_idx)

    module = Two(2)
    module.indices = set()
    ran = trainer(callback := BatchSize(max_batch_size=16, objective="largest"))
    ran.validate(module)
    assert module.indices == {0, 1}
    assert [loader.batch_size for loader in ran.val_dataloaders] == [callback.batch_size] * 2


@pytest.mark.parametrize("objective", ["fastest", "largest"])
def test_dataloader_batch_size_updated_on_failure(objective: Any) -> None:
    """Sizes above 100 run out of memory: the size is at most that, also if it was larger before."""

    class Limited(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch[0]) > 100:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)

    module = Limited(500, data=samples(1000))
    ran = trainer(callback := BatchSize(objective=objective), limit_val_batches=0)
    ran.fit(module)
    assert module.batch_size == callback.batch_size == ran.train_dataloader.batch_size <= 100
    if objective == "largest":
        assert module.batch_size == 100


def test_batch_size_finder_callback_val_batches() -> None:
    ran = trainer(BatchSize(max_batch_size=8, objective="largest"), num_sanity_val_steps=0)
    ran.fit(Plain(2))
    assert ran.num_val_batches == [len(ran.val_dataloaders)] == [SAMPLES // 8]


def test_the_table_names_every_case_and_no_other() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| Lightning's test | ")[2].partition("\n\n")[0]
    named = dict(re.findall(r"^\| `(test_\w+)` \| (\w+)", table, re.M))
    here = {name for name in globals() if name.startswith("test_") and "the_table" not in name}
    elsewhere = {"test_batch_size_finder_with_distributed_strategies"}  # two processes: test_lightning_ranks.py
    assert {name for name, holds in named.items() if holds != "no"} == here | elsewhere
    assert {name for name, holds in named.items() if holds == "no"} == {
        "test_auto_scale_batch_size_trainer_arg",
        "test_invalid_method_in_tuner",
        "test_error_if_train_or_val_dataloaders_passed_with_eval_method",
        "test_error_if_dataloaders_passed_with_fit_method",
    }
