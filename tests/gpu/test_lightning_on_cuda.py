"""The Lightning callback where memory is real: a forecast before the search, a gradient scaler, the GPU's generator."""

from __future__ import annotations

from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from brim.integrations.lightning import BatchSize  # noqa: E402
from tests.integrations.lightning_modules import QUIET, differences  # noqa: E402

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(text) for text in QUIET)]
MIB = 2**20
WIDTH = 1 << 18  # a sample's activations are some MiB


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: int) -> Any:
        return torch.full((64,), float(place % 7)), place % 4


class Wide(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_size = 2
        self.net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def make_loader(self) -> Any:
        return DataLoader(Rows(), batch_size=self.batch_size)

    train_dataloader = predict_dataloader = make_loader


class State(pl.Callback):  # type: ignore[misc]
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.state = {
            "weights": {name: value.clone() for name, value in pl_module.state_dict().items()},
            "optimizer": len(trainer.optimizers[0].state),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": (torch.get_rng_state(), torch.cuda.get_rng_state()),
        }


def trainer(*callbacks: Any, **settings: Any) -> Any:
    usual = {
        "accelerator": "gpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **{**usual, **settings})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_search_on_the_card_starts_from_a_forecast_and_leaves_no_trace(precision: str) -> None:
    before, after = State(), State()
    callback = BatchSize(memory_limit="2GiB")
    trainer(before, callback, after, precision=precision, limit_train_batches=2).fit(Wide(dropout=0.1))
    assert list(differences(before.state, after.state)) == []
    assert callback.plan is not None
    assert not [note for note in callback.plan.notes if "without a forecast" in note]
    assert callback.plan.oom_events == 0
    assert len(callback.plan.probes) <= 8


def test_the_run_stays_within_the_limit_that_it_was_planned_for() -> None:
    callback = BatchSize(memory_limit="2GiB", objective="largest")
    torch.cuda.empty_cache()
    module = Wide()
    ran = trainer(callback, limit_train_batches=4)
    ran.fit(module)
    torch.cuda.reset_peak_memory_stats()
    again = trainer(limit_train_batches=4)
    again.fit(module)
    assert torch.cuda.max_memory_allocated() <= 2048 * MIB


def test_a_neighbour_on_the_card_does_not_end_a_fit() -> None:
    class Neighbour(pl.Callback):  # type: ignore[misc]
        """Leaves less than a whole batch needs, during one batch."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(0).total_memory
                kept = torch.cuda.memory_allocated() + 192 * MIB
                torch.cuda.set_per_process_memory_fraction(kept / total)

        def on_train_batch_end(self, *_: Any) -> None:
            torch.cuda.set_per_process_memory_fraction(1.0)

    class Descending(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    weights = []
    for others in ([], [Neighbour()]):
        pl.seed_everything(3, verbose=False)
        module = Descending()
        callback = BatchSize(max_batch_size=128, multiple_of=128)
        trainer(callback, *others).fit(module)
        weights.append({name: value.cpu() for name, value in module.state_dict().items()})
    assert callback.oom_events >= 1
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-2, atol=1e-4)


def test_predictions_are_planned_without_gradients() -> None:
    module = Wide()
    fit, predict = (BatchSize(memory_limit="2GiB", objective="largest") for _ in range(2))
    trainer(fit, limit_train_batches=1).fit(module)
    answers = trainer(predict).predict(module)
    assert predict.batch_size >= fit.batch_size
    assert sum(map(len, answers)) == 512
