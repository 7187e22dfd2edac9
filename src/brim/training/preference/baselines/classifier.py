"""The classifier that confidence-based detectors ask: a perceptron over the in-distribution classes.

Its classes are the labels of the in-distribution molecules where the data has them. Where it has none, they are ten
clusters of the in-distribution training features (k-means), so that the detectors keep their meaning: a classifier of
in-distribution rows that is unsure about others. Out-of-distribution rows are never shown to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError
from brim.training.fast_path.task import Batch, Counts, Outputs, RowData, RunsListener, RunSpec, Settings, TrainingTask
from brim.training.fast_path.train_runs import train_runs
from brim.training.preference.baselines.scikit_learn import scikit_learn
from brim.training.preference.head import perceptron, seeded
from brim.training.preference.parts import FeatureSet

__all__ = ["Classifier", "ClassifierSettings", "train_classifiers"]

CLUSTERS = 10
ROWS_PER_CLASS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """A perceptron with dropout, since one of the detectors draws from it."""

    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.2
    epochs: int = 30
    patience: int = 5
    batch_size: int = 512
    lr: float = 1e-3
    path: str = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """A trained classifier of one seed."""

    module: nn.Module  # rows → logits
    device: torch.device
    seed: int
    accuracy: float  # on the in-distribution validation rows
    classes: str  # `labels`, or `10 clusters`


def train_classifiers(
    features: FeatureSet,
    seeds: Sequence[int],
    settings: ClassifierSettings,
    *,
    device: torch.device,
    listener: RunsListener | None = None,
) -> list[Classifier]:
    """A classifier for every seed, trained as one stack where that is faster."""
    train_labels, val_labels, classes = _classes(features)
    count = int(max(int(train_labels.max()), int(val_labels.max()))) + 1
    val_rows, val_targets = features.features["val_in"].to(device), val_labels.to(device)

    def criterion(logits: torch.Tensor, batch: Batch, counts: Counts) -> torch.Tensor:
        del counts
        return functional.cross_entropy(logits.float(), batch["labels"])

    def validate(outputs: Outputs) -> list[float]:
        # Not accuracy: it is whole after an epoch or two, long before the classifier is as sure as it can be.
        chances = outputs(val_rows).float().log_softmax(-1)  # [runs, rows, classes]
        likelihood = chances.gather(-1, val_targets.expand(len(chances), -1)[..., None]).mean((-2, -1))
        return [float(value) for value in likelihood]

    rows = features.features["train_in"]
    build = seeded(lambda: perceptron(features.width, settings.hidden, count, dropout=settings.dropout))
    trained = train_runs(
        TrainingTask(
            make_model=build,
            data=RowData(tensors={"features": rows, "labels": train_labels}, lengths=(len(rows),)),
            criterion=criterion,
            validate=validate,
        ),
        [RunSpec(seed=seed, lr=settings.lr) for seed in seeds],
        Settings(epochs=settings.epochs, batch_size=settings.batch_size, patience=settings.patience),
        device=device,
        path=settings.path,
        listener=listener,
    )
    found = []
    for outcome in trained.outcomes:
        seed = outcome.spec.seed
        module = build(seed)
        module.load_state_dict(outcome.weights)
        module = module.eval().to(device)
        with torch.no_grad():
            accuracy = float((module(val_rows).argmax(-1) == val_targets).float().mean())
        found.append(Classifier(module=module, device=device, seed=seed, accuracy=accuracy, classes=classes))
    return found


def _classes(features: FeatureSet) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Class numbers of the in-distribution training and validation rows, and where they come from."""
    rows = features.features["train_in"].numpy()
    if features.labels is not None:
        train, val = ([str(label) for label in features.labels[part]] for part in ("train_in", "val_in"))
        numbers = {name: number for number, name in enumerate(sorted({*train, *val}))}
        if 1 < len(numbers) <= max(2, len(rows) // ROWS_PER_CLASS):  # else they are measurements, not classes
            known = [torch.tensor([numbers[name] for name in names]) for names in (train, val)]
            return known[0], known[1], "labels"
    clusters = min(CLUSTERS, len(rows) // 2)
    if clusters < 2:
        raise RequestError(f"{features.name}: {len(rows)} in-distribution rows are too few for a classifier")
    model = scikit_learn("cluster").KMeans(n_clusters=clusters, n_init=3, random_state=0).fit(rows)
    val_labels = torch.from_numpy(model.predict(features.features["val_in"].numpy())).long()
    return torch.from_numpy(model.labels_).long(), val_labels, f"{clusters} clusters"
