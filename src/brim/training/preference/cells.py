"""Makes the cells of the table on one set of features: heads of every loss, seed and learning rate, and baselines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.metrics.detection import detection_metrics
from brim.models.placement import Precision
from brim.settings.caller import given, named
from brim.settings.ood_settings import DpoRequest
from brim.training.fast_path.task import RunSpec, Settings
from brim.training.preference.baselines.classifier import Classifier, ClassifierSettings, train_classifiers
from brim.training.preference.baselines.registry import baseline
from brim.training.preference.feature_files import read_arrays, write_arrays
from brim.training.preference.heads import HeadSettings, TrainedHeads, train_heads
from brim.training.preference.listener import DpoListener
from brim.training.preference.losses import loss_of
from brim.training.preference.parts import FeatureSet
from brim.training.preference.table import Cell

__all__ = ["CellKey", "CellMaker", "Keep", "head_method"]

CellKey = tuple[str, str, str, int | None]  # data set, encoder, method, seed
Keep = Callable[[list[Cell]], None]


def head_method(loss: str, lr: float, *, several_lrs: bool) -> str:
    """What the table calls the heads of a loss: `dpo`, `dpo-hinge`, `dpo lr=0.001`."""
    name = "dpo" if loss == "energy" else f"dpo-{loss}"
    return f"{name} lr={lr:g}" if several_lrs else name


class CellMaker:
    """Trains and tests what is asked for; `trainings` says how each stack of heads was trained."""

    def __init__(
        self,
        request: DpoRequest,
        device: torch.device,
        precision: Precision,
        folder: Path,
        listener: DpoListener,
        note: Callable[[str], None],
    ) -> None:
        self.request = request
        self.device = device
        self.precision = precision
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

    def make(self, features: FeatureSet, keys: Sequence[CellKey], keep: Keep) -> None:
        """Make these cells; each is handed to `keep` as soon as it is done."""
        missing = set(keys)
        for loss in self.request.losses:
            specs = [
                RunSpec(seed=seed, lr=lr)
                for lr in self.request.lrs
                for seed in self.request.seeds
                if (features.name, features.encoder, self._method(loss, lr), seed) in missing
            ]
            if specs:
                keep(self._heads(features, loss, specs))
        self._baselines(features, missing, keep)

    def _method(self, loss: str, lr: float) -> str:
        return head_method(loss, lr, several_lrs=len(self.request.lrs) > 1)

    def _heads(self, features: FeatureSet, loss: str, specs: Sequence[RunSpec]) -> list[Cell]:
        name = head_method(loss, 0.0, several_lrs=False)
        settings = self._head_settings(features, loss)
        self._say_if_partial(features, settings.training.batch_size)
        self.listener.training(data=features.name, encoder=features.encoder, method=name, runs=len(specs))
        heads = train_heads(features, specs, settings, device=self.device, listener=self.listener)
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
                Cell(
                    data=features.name, encoder=features.encoder, method=self._method(loss, outcome.spec.lr),
                    seed=outcome.spec.seed, lr=outcome.spec.lr, metrics=result.metrics, error=outcome.error,
                    details=details,
                )
            )  # fmt: skip
        self._save(features, name, heads)
        return cells

    def _head_settings(self, features: FeatureSet, loss: str) -> HeadSettings:
        request = self.request
        options = {} if request.weight_decay is None else {"weight_decay": request.weight_decay}
        step, one_pass = request.step_size, request.batch_size
        return HeadSettings(
            loss=loss_of(request, loss),
            hidden=request.hidden,
            dropout=request.dropout,
            training=Settings(
                epochs=request.epochs,
                batch_size=step,
                optimizer=request.optimizer,
                optimizer_options=options,
                clip_norm=request.clip_norm,
                autocast_dtype=self.precision.autocast,
                loss_scaling=self.precision.scaled,
                validate_every=request.validate_every,
                patience=request.patience,
            ),
            micro_batch_size=2 * one_pass if one_pass is not None and one_pass < step else None,
            eval_batch_size=request.eval_batch_size,
            path=request.fast_path,
            memory_limit_bytes=request.memory_limit_bytes,
            margin=request.margin,
            reference=self._reference(features) if loss == "reference" else None,
        )

    def _say_if_partial(self, features: FeatureSet, step: int) -> None:
        """A batch larger than the data is one partial batch: more is not to be had by asking for more."""
        longest = max(len(features.features["train_in"]), len(features.features["train_out"]))
        asked = self.request.effective_batch is not None or self.request.batch_size is not None
        if asked and step > longest:
            self._note(
                f"{features.name}: a batch of {step:,} is more than the {plural(longest, 'sample')} to train on; "
                f"every epoch "
                f"is one step of {longest:,}"
            )

    def _baselines(self, features: FeatureSet, missing: set[CellKey], keep: Keep) -> None:
        classifiers: dict[int, Classifier] = {}
        of_set = [key for key in missing if key[:2] == (features.name, features.encoder)]
        for name in self.request.baselines:
            seeds = sorted((key[3] for key in of_set if key[2] == name), key=lambda seed: -1 if seed is None else seed)
            if not seeds:
                continue
            if baseline(name).uses_classifier and not classifiers:
                classifiers = self._classifiers(features, of_set)
            keep([self._baseline_cell(features, name, seed, classifiers) for seed in seeds])

    def _classifiers(self, features: FeatureSet, keys: Sequence[CellKey]) -> dict[int, Classifier]:
        """A classifier for every seed that some baseline still needs."""
        seeds = sorted({key[3] for key in keys if key[3] is not None and key[2] in self.request.baselines})
        self.listener.training(
            data=features.name, encoder=features.encoder, method="classifier for baselines", runs=len(seeds)
        )
        settings = ClassifierSettings(hidden=self.request.hidden, path=self.request.fast_path)
        found = train_classifiers(features, seeds, settings, device=self.device, listener=self.listener)
        mean = sum(one.accuracy for one in found) / len(found)
        self._note(
            f"{features.name}: msp, energy, odin and mc_dropout ask a classifier of {found[0].classes} of "
            f"in-distribution samples (validation accuracy {mean:.2f})"
        )
        return {one.seed: one for one in found}

    def _baseline_cell(
        self, features: FeatureSet, name: str, seed: int | None, classifiers: dict[int, Classifier]
    ) -> Cell:
        detector = baseline(name)
        detector.fit(features, None if seed is None else classifiers[seed])
        inner, outer = (detector.scores(features.features[part]) for part in ("test_in", "test_out"))
        metrics = detection_metrics(inner, outer)
        return Cell(data=features.name, encoder=features.encoder, method=name, seed=seed, metrics=metrics)

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
        """The head of --reference; None where each run's own first weights are the reference."""
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
                "give a "
                f"head of the same features and {named('hidden')}"
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
