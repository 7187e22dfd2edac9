"""Makes the cells of the table on one set of features: heads of every loss, seed and learning rate, and baselines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.metrics.ood_detection import detection_metrics
from brim.molecules.baselines import baseline, class_labels
from brim.molecules.data_sets import FeatureSet
from brim.molecules.files import read_arrays, write_arrays
from brim.molecules.heads import (
    Classifier,
    ClassifierSettings,
    OodListener,
    TrainedHeads,
    train_classifiers,
    train_heads,
)
from brim.molecules.losses import loss_of
from brim.molecules.table import CellKey, ResultCell, head_method
from brim.settings.caller import given, named
from brim.settings.molecule_settings import OodRequest

__all__ = ["CellMaker"]


class CellMaker:
    """Trains and tests the methods of a request; `trainings` records how each stack of heads was trained."""

    def __init__(
        self,
        request: OodRequest,
        device: torch.device,
        folder: Path,
        listener: OodListener,
        note: Callable[[str], None],
    ) -> None:
        self.request = request
        self.device = device
        self.folder = folder
        self.listener = listener
        self.trainings: list[dict[str, Any]] = []
        self._note = note

    def wanted(self, data: str, encoder: str) -> list[CellKey]:
        """Every cell of one data set under one encoder, in the order of the table."""
        request = self.request
        keys: list[CellKey] = [
            (data, encoder, self._method(loss, lr), seed)
            for loss in request.losses
            for lr in request.lrs
            for seed in request.seeds
        ]
        for name in request.baselines:
            seeds: Sequence[int | None] = request.seeds if baseline(name).uses_classifier else (None,)
            keys += [(data, encoder, name, seed) for seed in seeds]
        return keys

    def make(self, features: FeatureSet, keys: Sequence[CellKey]) -> Iterator[list[ResultCell]]:
        """These cells, as they are done: the heads of a loss together, then the baselines one by one."""
        missing = set(keys)
        for loss in self.request.losses:
            runs = [
                (seed, lr)
                for lr in self.request.lrs
                for seed in self.request.seeds
                if (features.name, features.encoder, self._method(loss, lr), seed) in missing
            ]
            if runs:
                yield self._heads(features, loss, runs)
        classifiers: dict[int, Classifier] = {}
        for name in self.request.baselines:
            seeds = [seed for _, _, method, seed in keys if method == name]
            if not seeds:
                continue
            if baseline(name).uses_classifier and not classifiers:
                classifiers = self._classifiers(features, keys)
            yield [self._baseline(features, name, seed, classifiers) for seed in seeds]

    def _method(self, loss: str, lr: float) -> str:
        return head_method(loss, lr, several_lrs=len(self.request.lrs) > 1)

    def _heads(self, features: FeatureSet, loss: str, runs: Sequence[tuple[int, float]]) -> list[ResultCell]:
        name = head_method(loss, 0.0, several_lrs=False)
        self._note_if_partial(features)
        self.listener.training(data=features.name, encoder=features.encoder, method=name, runs=len(runs))
        heads = train_heads(
            features, loss_of(self.request, loss), runs, self.request, device=self.device,
            reference=self._reference(features) if loss == "reference" else None, listener=self.listener,
        )  # fmt: skip
        self.trainings.append(_training_record(features, name, heads))
        cells = []
        for result in heads.results:
            outcome = result.outcome
            details = {
                "epochs": outcome.epochs,
                "best_epoch": outcome.best_epoch,
                "validation_auroc": result.validation,
                "last_loss": outcome.losses[-1] if outcome.losses else None,
                "losses": list(outcome.losses),  # the mean of each epoch
                "skipped_steps": outcome.skipped_steps,
            }
            cells.append(
                ResultCell(
                    data=features.name, encoder=features.encoder, method=self._method(loss, outcome.spec.lr),
                    seed=outcome.spec.seed, lr=outcome.spec.lr, metrics=result.metrics, error=outcome.error,
                    details=details,
                )
            )  # fmt: skip
        self._save(features, name, heads)
        return cells

    def _note_if_partial(self, features: FeatureSet) -> None:
        """Note a batch that is larger than the data: every epoch is one smaller step."""
        step = self.request.step_size
        longest = max(len(features.features["train_in"]), len(features.features["train_out"]))
        asked = self.request.effective_batch is not None or self.request.batch_size is not None
        if asked and step > longest:
            self._note(
                f"{features.name}: a batch of {step:,} is more than the {plural(longest, 'sample')} to train on; "
                f"every epoch is one step of {longest:,}"
            )

    def _classifiers(self, features: FeatureSet, keys: Sequence[CellKey]) -> dict[int, Classifier]:
        """A classifier for every seed that some baseline still needs."""
        seeds = sorted({key[3] for key in keys if key[3] is not None and key[2] in self.request.baselines})
        self.listener.training(
            data=features.name, encoder=features.encoder, method="classifier for baselines", runs=len(seeds)
        )
        labels = class_labels(features)
        settings = ClassifierSettings(hidden=self.request.hidden, path=self.request.fast_path)
        found = train_classifiers(features, labels, seeds, settings, device=self.device, listener=self.listener)
        mean = sum(one.accuracy for one in found) / len(found)
        self._note(
            f"{features.name}: msp, energy, odin and mc_dropout use a classifier of {labels.origin} of "
            f"in-distribution samples (validation accuracy {mean:.2f})"
        )
        return {one.seed: one for one in found}

    def _baseline(
        self, features: FeatureSet, name: str, seed: int | None, classifiers: dict[int, Classifier]
    ) -> ResultCell:
        detector = baseline(name)
        detector.fit(features, None if seed is None else classifiers[seed])
        inner, outer = (detector.scores(features.features[part]) for part in ("test_in", "test_out"))
        metrics = detection_metrics(inner, outer)
        return ResultCell(data=features.name, encoder=features.encoder, method=name, seed=seed, metrics=metrics)

    def _save(self, features: FeatureSet, method: str, heads: TrainedHeads) -> None:
        """The best weights of every run, all seeds of one method in one file; those of earlier starts stay in it."""
        path = self.folder / "heads" / f"{_file_name(f'{features.name}-{features.encoder}-{method}')}.safetensors"
        arrays: dict[str, Any] = dict(read_arrays(path)) if path.exists() else {}
        for result in heads.results:
            spec = result.outcome.spec
            prefix = f"seed-{spec.seed}" if len(self.request.lrs) == 1 else f"seed-{spec.seed}/lr-{spec.lr:g}"
            arrays |= {f"{prefix}/{name}": part.numpy() for name, part in result.outcome.weights.items()}
        if arrays:
            hidden = list(self.request.hidden)
            write_arrays(path, arrays, {"schema": "brim.heads/1", "width": features.width, "hidden": hidden})

    def _reference(self, features: FeatureSet) -> dict[str, torch.Tensor] | None:
        """The weights of the reference head that was given; None: each run's own first weights are the reference."""
        if self.request.reference is None:
            return None
        path = Path(self.request.reference)
        arrays = read_arrays(path)
        prefix = min((name.rpartition("/")[0] for name in arrays), default="")
        found = {
            name.rpartition("/")[2]: torch.from_numpy(part)
            for name, part in arrays.items()
            if name.rpartition("/")[0] == prefix
        }
        if prefix:
            self._note(f"{path.name}: the reference is {prefix}")
        sizes = (features.width, *self.request.hidden, 1)
        shapes = [tuple(part.shape) for name, part in sorted(found.items()) if name.endswith("weight")]
        wanted = [(after, before) for before, after in itertools.pairwise(sizes)]
        if sorted(shapes) != sorted(wanted):
            raise RequestError(
                f"{given('reference', path)} is another model: its layers are {shapes}, those of this head {wanted}; "
                f"give a head of the same features and {named('hidden')}"
            )
        return found


def _training_record(features: FeatureSet, method: str, heads: TrainedHeads) -> dict[str, Any]:
    trained = heads.trained
    seconds = trained.train_seconds
    share = trained.effective_batch_size / trained.rows_per_step  # rows of all streams → samples of each side
    return {
        "data": features.name,
        "encoder": features.encoder,
        "method": method,
        "runs": len(trained.outcomes),
        "rows": features.counts(),
        "width": features.width,
        "fast_path": trained.path,
        "fast_path_choice": trained.path_to_json(),
        "effective_batch_size": trained.effective_batch_size,
        "micro_batch_size": max(1, round(trained.micro_batch_size * share)),
        "accumulation_steps": trained.accumulation_steps,
        "steps_per_epoch": trained.steps_per_epoch,
        "eval_batch_size": heads.eval_batch_size,
        "samples": trained.rows,
        "pairs": trained.pairs,
        "train_seconds": seconds,
        "validation_seconds": trained.validation_seconds,
        "eval_seconds": heads.eval_seconds,
        "samples_per_second": trained.rows / seconds if seconds else None,
        "pairs_per_second": trained.pairs / seconds if seconds else None,
        "oom_events": heads.oom_events,
        "peak_allocated_bytes": trained.peak_allocated_bytes,
        "peak_reserved_bytes": trained.peak_reserved_bytes,
        "eval_peak_allocated_bytes": heads.eval_peak_allocated_bytes,
        "eval_peak_reserved_bytes": heads.eval_peak_reserved_bytes,
        "notes": list(trained.notes),
    }


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
