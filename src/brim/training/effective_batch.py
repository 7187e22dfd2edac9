"""The effective batch of a training run, that an optimizer step learns from; and the plan that the run leaves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from brim.errors import RequestError, plural
from brim.records import Plan, Unit
from brim.settings.caller import given
from brim.settings.train_settings import TrainSettings
from brim.sizing.micro_batches import MicroBatchSizer
from brim.sizing.plans import PlanFile
from brim.storage.files import read_json

__all__ = ["DEFAULT_EFFECTIVE_BATCH", "EarlierSizes", "Effective", "choose_effective_batch", "training_plan"]

DEFAULT_EFFECTIVE_BATCH = 128  # where neither batch_size nor effective_batch says anything
FEWEST_STEPS = 8  # an epoch, for that default: a batch that is most of the data learns little from it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effective:
    """The effective batch a run starts with, the batch its learning rate belongs to, and what to say about them."""

    batch: int
    base: int
    grows: bool
    rule: str = "none"  # how the learning rate follows a batch that is not the base
    notes: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share; the base counts where the learning rate follows from it."""
        return {"batch": self.batch, "grows": self.grows, "base": None if self.rule == "none" else self.base}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierSizes:
    """The sizes of an earlier run: what `--plan` goes back to."""

    effective_batch: int
    micro_cap: int
    unit: Unit
    eval_batch: int | None
    learning_rate: float | None = None

    @classmethod
    def read(cls, folder: str) -> EarlierSizes:
        """From a training run's run.json."""
        record: Any = read_json(Path(folder) / "run.json")
        if not isinstance(record, dict) or record.get("kind") != "train" or not record.get("plan"):
            raise RequestError(f"{given('plan', folder)}: its run.json is not that of a training run with a plan")
        summary, plan = record["summary"], record["plan"]
        if summary.get("effective_batch_size") is None:
            raise RequestError(f"{given('plan', folder)}: that run recorded no effective batch; choose another run")
        return cls(
            effective_batch=int(summary["effective_batch_size"]),
            micro_cap=int(plan["size"]),
            unit=plan["unit"],
            eval_batch=summary.get("eval_batch_size"),
        )


def choose_effective_batch(
    settings: TrainSettings, *, samples: int, ranks: int, earlier: EarlierSizes | None = None
) -> Effective:
    """How many samples an optimizer step has; never more than there are."""
    asked, micro = settings.hp.effective_batch, settings.hp.batch_size
    notes: list[str] = []
    if isinstance(asked, int):
        batch = asked
    elif earlier is not None:
        batch = earlier.effective_batch
    elif isinstance(micro, int):
        batch = micro * ranks
    else:
        batch = min(DEFAULT_EFFECTIVE_BATCH, max(samples // FEWEST_STEPS, 1))
        if asked is None:
            notes.append(f"no batch was named: the effective batch is {batch} (hp.effective_batch)")
    if batch > samples:
        notes.append(
            f"an effective batch of {batch} is more than the {plural(samples, 'training sample')}: it is {samples}"
        )
        batch = samples
    base = settings.hp.base_batch
    if base is None:
        base = micro * ranks if isinstance(micro, int) else batch
    grows = asked == "auto"
    rule = settings.training.lr_scale or ("auto" if grows else "none")
    return Effective(batch=batch, base=max(base, 1), grows=grows, rule=rule, notes=tuple(notes))


def training_plan(
    file: PlanFile, sizes: MicroBatchSizer, *, peak_bytes: int | None, cached: bool, confirmed: bool, share: int
) -> Plan:
    """What a run settled at, and the evidence."""
    if cached:
        reason = "a plan of an earlier run"
    elif sizes.request.ceiling is not None:
        reason = "the size asked for"
    else:
        reason = "grown on the run's own micro-batches while that paid"
    if confirmed:
        reason += "; confirmed after the second optimizer step"
    used = sizes.sizes_used()
    largest = max((probe.batch_size for probe in sizes.probes if probe.fits), default=1)
    size = min(sizes.live.kept, sizes.agreed, math.inf if sizes.request.unit == "tokens" else share)
    return file.plan(
        sizes.live,
        unit="samples" if sizes.by_count else sizes.request.unit,
        size=int(size),
        largest=max(largest, used.largest if used else 1),
        reason=reason,
        cached=cached,
        peak_bytes=peak_bytes,
        probes=sizes.probes,
    )
