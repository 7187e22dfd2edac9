"""Energy heads and the baselines' classifiers: small networks on features, all seeds and learning rates at once.

Epochs, early stopping, best weights, stacked seeds and sizes that fit come from `brim.training`, which is given a model
for each seed, rows, a criterion and a validation figure. This is the only file of molecules/ that imports from it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError
from brim.memory.devices import memory_of
from brim.metrics.ood_detection import detection_metrics
from brim.models.placement import resolve_precision
from brim.molecules.data_sets import FeatureSet
from brim.molecules.losses import PreferenceLoss
from brim.molecules.table import ResultCell
from brim.settings.caller import given, named, written
from brim.settings.molecule_settings import OodRequest
from brim.training.fast_path.row_feed import InPasses
from brim.training.fast_path.task import RowData, RunOutcome, RunsListener, RunSpec, RunsRequest, Settings, TrainingTask
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from brim.training.heads import MOST_WIDTH, refuse_too_wide
from brim.workloads.checkpointing import enable_gradient_checkpointing

__all__ = [
    "ClassLabels", "Classifier", "ClassifierSettings", "EnergyHead", "HeadResult", "OodListener", "TrainedHeads",
    "make_heads", "stacked_auroc", "train_classifiers", "train_heads",
]  # fmt: skip

Batch = Mapping[str, torch.Tensor]  # the rows of one step, by the name of their tensor
Outputs = Callable[[torch.Tensor], torch.Tensor]  # rows `[n, width]` → `[runs, n, …]`


class OodListener(RunsListener):
    """Receives the events of a run, beside those of every training; its methods do nothing unless overridden."""

    def opened(self, *, data: str, encoder: str, counts: dict[str, int], width: int) -> None:
        """The features of a data set are ready."""

    def planned(self, total: int, done: int) -> None:
        """The table has so many cells, some of them done by an earlier run."""

    def encoding(self, *, data: str, encoder: str, done: int, total: int) -> None:
        """So many molecules of a data set are encoded."""

    def training(self, *, data: str, encoder: str, method: str, runs: int) -> None:
        """So many runs begin to train."""

    def cells(self, cells: list[ResultCell]) -> None:
        """These cells are done."""


# ------------------------------------------------------------------------------------------------ networks


class EnergyHead(nn.Module):
    """Features `[…, width]` → energies `[…]`; high energies mean out-of-distribution."""

    def __init__(self, width: int, hidden: Sequence[int] = (256, 128), *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = _perceptron(width, hidden, 1, dropout=dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        energies: torch.Tensor = self.layers(features).squeeze(-1)
        return energies


def make_heads(
    width: int, hidden: Sequence[int], *, dropout: float = 0.0, checkpointing: bool = False
) -> Callable[[int], nn.Module]:
    """The energy head of every seed; with `checkpointing` it recomputes activations in the backward pass."""

    def build() -> nn.Module:
        head = EnergyHead(width, hidden, dropout=dropout)
        if checkpointing:
            enable_gradient_checkpointing(head)
        return head

    return _seeded(build)


def _perceptron(width: int, hidden: Sequence[int], outputs: int, *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU, and dropout after each, between `width` and `outputs`."""
    if any(not 1 <= size <= MOST_WIDTH for size in hidden):
        raise RequestError(f"{written('hidden', ','.join(map(str, hidden)))}: a layer has from 1 to {MOST_WIDTH} units")
    if not 0 <= dropout < 1:
        raise RequestError(f"{given('dropout', dropout)}: it must be a fraction from 0 to below 1")
    refuse_too_wide([width, *hidden, outputs], torch.get_default_dtype(), setting=named("hidden"))
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A function from a seed to its model, always with the same weights; torch's own generator is left as it was."""

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


# ------------------------------------------------------------------------------------------------ energy heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadResult:
    """One run: its metrics on the test parts, or None where it failed."""

    outcome: RunOutcome
    metrics: dict[str, float] | None
    validation: float | None  # AUROC of the best epoch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedHeads:
    """Every run's result, how they were trained, and the cost of testing them."""

    results: tuple[HeadResult, ...]
    trained: TrainedRuns
    eval_batch_size: int
    eval_seconds: float
    eval_peak_allocated_bytes: int | None
    eval_peak_reserved_bytes: int | None
    oom_events: int


def train_heads(
    features: FeatureSet,
    loss: PreferenceLoss,
    runs: Sequence[tuple[int, float]],
    request: OodRequest,
    *,
    device: torch.device,
    reference: dict[str, torch.Tensor] | None = None,
    listener: RunsListener | None = None,
) -> TrainedHeads:
    """Train a head for every seed and learning rate, stop it by the validation parts, test it at its best epoch.

    `reference` are the weights of the frozen head of the reference loss; None: each run's own first weights.
    """
    make_head = make_heads(
        features.width, request.hidden, dropout=request.dropout, checkpointing=request.gradient_checkpointing
    )
    memory = memory_of(device)
    passes = InPasses(memory, batch_size=request.eval_batch_size, dim=1)
    home = torch.device("cpu") if request.fast_path == "off" else device
    validation = [features.features[part].to(home) for part in ("val_in", "val_out")]
    one_pass = request.batch_size  # of each side

    def validate(outputs: Outputs) -> list[float]:
        inner, outer = (passes(outputs, rows) for rows in validation)
        return stacked_auroc(inner, outer)

    asked = RunsRequest(
        task=TrainingTask(
            make_model=make_head,
            data=_training_rows(features, loss, runs, request, reference, device),
            criterion=_criterion(_in_small_blocks(loss, request.memory_limit_bytes)),
            validate=validate,
        ),
        specs=[RunSpec(seed=seed, lr=lr) for seed, lr in runs],
        settings=_training_settings(request, loss),
        device=device,
        path=request.fast_path,
        micro_batch_size=2 * one_pass if one_pass is not None and one_pass < request.step_size else None,
        memory_limit_bytes=request.memory_limit_bytes,
        margin=request.margin,
        not_stacked="gradient checkpointing is on" if request.gradient_checkpointing else "",
    )
    trained = train_runs(asked, listener=listener)
    memory.release(thorough=False)
    started = time.perf_counter()
    tester = InPasses(memory, batch_size=request.eval_batch_size)
    with memory.metered() as reading:
        results = tuple(_tested(outcome, make_head, features, tester, device) for outcome in trained.outcomes)
    return TrainedHeads(
        results=results,
        trained=trained,
        eval_batch_size=max(tester.largest, passes.largest),
        eval_seconds=time.perf_counter() - started,
        eval_peak_allocated_bytes=reading.peak_allocated_bytes or None,
        eval_peak_reserved_bytes=reading.peak_reserved_bytes or None,
        oom_events=trained.oom_events + passes.oom_events + tester.oom_events,
    )


def _training_settings(request: OodRequest, loss: PreferenceLoss) -> Settings:
    precision = resolve_precision(request.dtype, "train")
    return Settings(
        epochs=request.epochs,
        batch_size=request.step_size,
        optimizer=request.optimizer,
        optimizer_options={} if request.weight_decay is None else {"weight_decay": request.weight_decay},
        clip_norm=request.clip_norm,
        autocast_dtype=precision.autocast,
        loss_scaling=precision.scaled,
        validate_every=request.validate_every,
        patience=request.patience,
        matched=loss.matched,
    )


def _in_small_blocks(loss: PreferenceLoss, limit_bytes: int | None) -> PreferenceLoss:
    """The loss with blocks of pairs that are small against the memory limit."""
    if limit_bytes is None:
        return loss
    return dataclasses.replace(loss, block_bytes=min(max(limit_bytes // 64, 2**16), 2**25))


def _criterion(loss: PreferenceLoss) -> Callable[[torch.Tensor, Batch, tuple[int, ...]], torch.Tensor]:
    def criterion(energies: torch.Tensor, batch: Batch, counts: tuple[int, ...]) -> torch.Tensor:
        first = counts[0]
        reference = (batch["reference"][:first], batch["reference"][first:]) if loss.needs_reference else None
        return loss(energies[:first], energies[first:], reference=reference)

    return criterion


def _training_rows(
    features: FeatureSet,
    loss: PreferenceLoss,
    runs: Sequence[tuple[int, float]],
    request: OodRequest,
    reference: dict[str, torch.Tensor] | None,
    device: torch.device,
) -> RowData:
    """The training rows, in before out; with the reference head's energies, which never change, computed once."""
    parts = [features.features[part] for part in ("train_in", "train_out")]
    rows = torch.cat(parts)
    per_run = {}
    if loss.needs_reference:
        make_head = make_heads(features.width, request.hidden, dropout=request.dropout)
        passes = InPasses(memory_of(device), batch_size=request.eval_batch_size)
        energies = []
        for seed, _ in runs:
            head = make_head(seed)
            if reference is not None:
                head.load_state_dict(reference)
            energies.append(_energies(head, rows, passes, device))
        per_run["reference"] = torch.stack(energies)
    return RowData(
        tensors={"features": rows},
        lengths=(len(parts[0]), len(parts[1])),
        per_run=per_run,
        ids=[*features.ids["train_in"], *features.ids["train_out"]],
    )


def _tested(
    outcome: RunOutcome,
    make_head: Callable[[int], nn.Module],
    features: FeatureSet,
    passes: InPasses,
    device: torch.device,
) -> HeadResult:
    best = max((figure for figure in outcome.validations if math.isfinite(figure)), default=None)
    if outcome.error is not None or not outcome.weights:
        return HeadResult(outcome=outcome, metrics=None, validation=best)
    head = make_head(outcome.spec.seed)
    head.load_state_dict(outcome.weights)
    inner, outer = (_energies(head, features.features[part], passes, device) for part in ("test_in", "test_out"))
    return HeadResult(outcome=outcome, metrics=detection_metrics(inner.numpy(), outer.numpy()), validation=best)


def _energies(head: nn.Module, rows: torch.Tensor, passes: InPasses, device: torch.device) -> torch.Tensor:
    """The energies of rows, on the CPU."""
    head = head.eval().to(device)
    with torch.no_grad():
        return passes(lambda part: head(part.to(device)).cpu(), rows)


def stacked_auroc(inner: torch.Tensor, outer: torch.Tensor) -> list[float]:
    """The AUROC of each run from energies `[runs, n]` and `[runs, m]`, on their device.

    Ties count one half, counted in whole numbers. A run with an energy that is not a number has nan.
    """
    inner, outer = inner.float() if inner.dtype.itemsize < 4 else inner, outer.to(inner.dtype)
    ordered = inner.sort(-1).values.contiguous()
    outer = outer.to(ordered.dtype).contiguous()
    below = torch.searchsorted(ordered, outer).sum(-1)
    not_above = torch.searchsorted(ordered, outer, right=True).sum(-1)
    known = ~(inner.isnan().any(-1) | outer.isnan().any(-1))
    twice = 2 * inner.shape[-1] * outer.shape[-1]
    wins = zip((below + not_above).tolist(), known.tolist(), strict=True)
    return [won / twice if good else float("nan") for won, good in wins]


# ------------------------------------------------------------------------------------------------ classifiers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassLabels:
    """Class numbers of the in-distribution training and validation rows."""

    train: torch.Tensor
    validation: torch.Tensor
    origin: str  # `labels`, or `10 clusters`

    @property
    def count(self) -> int:
        """How many classes there are."""
        return int(max(int(self.train.max()), int(self.validation.max()))) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """How the classifier is trained; it has dropout because mc_dropout needs it."""

    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.2
    epochs: int = 30
    patience: int = 5
    batch_size: int = 512
    lr: float = 1e-3
    path: str = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """A trained classifier of one seed; it never sees out-of-distribution rows in training."""

    module: nn.Module  # rows → logits
    device: torch.device
    seed: int
    accuracy: float  # on the in-distribution validation rows


def train_classifiers(
    features: FeatureSet,
    labels: ClassLabels,
    seeds: Sequence[int],
    settings: ClassifierSettings,
    *,
    device: torch.device,
    listener: RunsListener | None = None,
) -> list[Classifier]:
    """A classifier of in-distribution rows for every seed, trained as one stack where that is faster."""
    val_rows, val_targets = features.features["val_in"].to(device), labels.validation.to(device)

    def criterion(logits: torch.Tensor, batch: Batch, counts: tuple[int, ...]) -> torch.Tensor:
        del counts
        return functional.cross_entropy(logits.float(), batch["labels"])

    def validate(outputs: Outputs) -> list[float]:
        # Not accuracy: it is whole after an epoch or two, long before the classifier is as sure as it can be.
        chances = outputs(val_rows).float().log_softmax(-1)  # [runs, rows, classes]
        likelihood = chances.gather(-1, val_targets.expand(len(chances), -1)[..., None]).mean((-2, -1))
        return [float(value) for value in likelihood]

    rows = features.features["train_in"]
    make_model = _seeded(lambda: _perceptron(features.width, settings.hidden, labels.count, dropout=settings.dropout))
    asked = RunsRequest(
        task=TrainingTask(
            make_model=make_model,
            data=RowData(tensors={"features": rows, "labels": labels.train}, lengths=(len(rows),)),
            criterion=criterion,
            validate=validate,
        ),
        specs=[RunSpec(seed=seed, lr=settings.lr) for seed in seeds],
        settings=Settings(epochs=settings.epochs, batch_size=settings.batch_size, patience=settings.patience),
        device=device,
        path=settings.path,
    )
    trained = train_runs(asked, listener=listener)
    found = []
    for outcome in trained.outcomes:
        seed = outcome.spec.seed
        module = make_model(seed)
        module.load_state_dict(outcome.weights)
        module = module.eval().to(device)
        with torch.no_grad():
            accuracy = float((module(val_rows).argmax(-1) == val_targets).float().mean())
        found.append(Classifier(module=module, device=device, seed=seed, accuracy=accuracy))
    return found
