"""A callback for Lightning: the fastest batch size that fits, before fit, validate, test and predict.

    trainer = Trainer(callbacks=[BatchSize(memory_limit="24GiB")])
    trainer.fit(module)  # module.batch_size is set before its loaders are made

Works with `lightning.pytorch` and with `pytorch_lightning`. Which private names of Lightning are used stands in one
place, `lightning_stage.py`: there is no public one for where a stage's loaders come from.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from brim.errors import RequestError, plural
from brim.integrations.lightning_stage import STAGES, LightningStage
from brim.integrations.lightning_survival import Survival, name_lost_rank, note_unsurvived
from brim.integrations.lightning_workload import FitWorkload, StageWorkload, check_strategy, quiet
from brim.memory.snapshot import StateSnapshot
from brim.ranks.agreement import Agreement
from brim.records import Objective, Plan
from brim.searching.find import find_plan
from brim.settings.find_settings import DEFAULT_MAX_SIZE, SearchSettings
from brim.settings.sizes import parse_bytes

__all__ = ["BatchSize"]


def _lightning() -> Any:
    """The package that the user's script has loaded, or else the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda one: one not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise RequestError("brim.integrations.lightning needs Lightning: pip install 'brim[lightning]'")


_pl = _lightning()
_silent_logger = importlib.import_module(f"{_pl.__name__}.loggers.logger").DummyLogger


class BatchSize(_pl.Callback):  # type: ignore[misc, name-defined]  # which package it is from is known at run time
    """Sets the fastest batch size that fits, before each fit, validate, test and predict.

    Sizes are tried with the module's own steps, optimizer and precision on batches of the costliest samples of its own
    loaders, as `brim.find` does. Weights, optimizer and scheduler state, metrics, the loops' progress and all random
    generators are as before afterwards; callbacks and loggers do not see the trials. Under `ddp` every rank tries, and
    all use the smallest size found.

    The size is set where the module reads it: the attribute `batch_size` of the module, of the data module, and in
    their `hparams`. Plain `DataLoader`s that were passed to the trainer are replaced by ones with the size.

    Args:
        attribute: The attribute, or entry of `hparams`, that loaders are made with.
        memory_limit: Use at most this much, such as `"24GiB"`; by default what is free, less a margin.
        margin: The fraction of the memory that is kept free: 0.05, or 0 with a `memory_limit`.
        objective: `fastest` or `largest`.
        tolerance: How close to the best rate is fast enough.
        max_batch_size: The largest size that is tried.
        multiple_of: Only multiples of this.
        power_of_two: Only powers of two.
        max_probes: Stop after so many probes, with the best size seen.
        effective_batch: Samples of all ranks per optimizer step in `fit`; `"keep"`: as many as it would have been.
            `accumulate_grad_batches` is set so that the product is exact.
        make_batch: Takes n and returns the worst-case batch of n samples, as a loader would give it, in `fit`.
        survive: An out-of-memory error in the middle of a run is survived by doing the batch again in pieces. Whether
            the loss of a batch is the `mean` over its samples or their `sum`; None: it is raised.
        keep_on_resume: A run that continues from a checkpoint keeps the size it was saved with, tried with one probe.
        key: Keep plans on disk under this name; without one they are not kept.
        stages: Which of `fit`, `validate`, `test` and `predict` to plan for.

    Attributes:
        plans: The plan of each stage that was planned for: its size, the reason, the probes it rests on.
        notes: What else there is to know, such as batches that were redone after an out-of-memory error.
        oom_events: How many batches were redone.

    Examples:
        >>> from brim.integrations.lightning import BatchSize
        >>> trainer = Trainer(max_epochs=1, callbacks=[BatchSize(max_batch_size=64)])
        >>> trainer.fit(module)
        >>> module.batch_size <= 64
        True
    """

    def __init__(
        self,
        attribute: str = "batch_size",
        *,
        memory_limit: int | str | None = None,
        margin: float | None = None,
        objective: Objective = "fastest",
        tolerance: float = 0.02,
        max_batch_size: int = DEFAULT_MAX_SIZE,
        multiple_of: int = 1,
        power_of_two: bool = False,
        max_probes: int | None = None,
        effective_batch: int | Literal["keep"] | None = None,
        make_batch: Callable[[int], Any] | None = None,
        survive: Literal["mean", "sum"] | None = "mean",
        keep_on_resume: bool = True,
        key: str | None = None,
        stages: Iterable[str] = STAGES,
    ) -> None:
        self.attribute = attribute
        self.settings = SearchSettings(
            memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
            margin=margin, objective=objective, tolerance=tolerance, max_size=max_batch_size, multiple_of=multiple_of,
            power_of_two=power_of_two, max_probes=max_probes,
        )  # fmt: skip
        self.effective_batch = _checked_effective_batch(effective_batch)
        self.make_batch = make_batch
        self.survive = _one_of("survive", survive, ("mean", "sum", None))
        self.keep_on_resume = keep_on_resume
        self.key = key
        self.stages = tuple(_one_of("stages", stage, STAGES) for stage in stages)
        self.plans: dict[str, Plan] = {}
        self.notes: list[str] = []
        self.oom_events = 0
        self._sizes: dict[str, int] = {}  # what a checkpoint keeps of a fit: batch size, accumulated batches
        self._kept: dict[str, int] = {}  # the same, of the checkpoint that the next fit continues from
        self._within_epoch = False  # whether that checkpoint was written within an epoch
        self._survival: Survival | None = None

    @property
    def batch_size(self) -> int | None:
        """The size that was set last, in samples of one rank; None before any stage."""
        return self._last.size if self._last is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan that was made last."""
        return self._last

    _last: Plan | None = None

    # ------------------------------------------------------------------------------------------ Lightning's hooks

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._prepare(LightningStage("fit", trainer, pl_module, self.attribute))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._prepare(LightningStage("validate", trainer, pl_module, self.attribute))

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._prepare(LightningStage("test", trainer, pl_module, self.attribute))

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._prepare(LightningStage("predict", trainer, pl_module, self.attribute))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del trainer, pl_module, stage
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        del pl_module
        if self.survive is not None and trainer.world_size > 1:
            name_lost_rank(trainer, exception)
        elif self._survival is not None:
            note_unsurvived(exception)
        self._let_go()

    @property
    def state_key(self) -> str:
        """The callback's name in checkpoints: one plans the fit, and beside it there may be others for other stages."""
        return type(self).__qualname__ if "fit" in self.stages else self._generate_state_key(stages=self.stages)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sizes)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._kept = {name: int(value) for name, value in state_dict.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        del trainer, pl_module
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        started = progress.get("current", {}).get("ready", 0)
        self._within_epoch = bool(started) and not progress.get("is_last_batch", False)

    # ------------------------------------------------------------------------------------------ planning

    def _prepare(self, stage: LightningStage) -> None:
        """Plan the stage, set its size, and watch over it."""
        if stage.name not in self.stages or stage.has_nothing_to_run():
            return
        if stage.trainer.fast_dev_run:
            self._note("no batch size was searched for, since fast_dev_run runs a few batches only")
            return
        check_strategy(stage.trainer, stage.module)
        rng = StateSnapshot.take()  # of nothing but the random generators
        try:
            plan, accumulate = self._planned(stage)
            stage.apply(plan.size, accumulate)
        finally:
            rng.restore()
        self._last = self.plans[stage.name] = plan
        if stage.name == "fit":
            self._sizes = {"batch_size": plan.size, "accumulate_grad_batches": accumulate}
        for sentence in plan.notes:
            self._note(sentence, shown=False)
        together = f", {plural(accumulate, 'batch', 'batches')} for each optimizer step" if accumulate > 1 else ""
        self._say(f"{stage.name} at batch size {plan.size}{together} ({plan.reason})")
        if self.survive is not None and stage.trainer.world_size == 1:
            self._survival = Survival(
                stage.trainer, stage.module, stage.name, loss_of=self.survive, note=self._redone
            )  # fmt: skip

    def _planned(self, stage: LightningStage) -> tuple[Plan, int]:
        """The plan with the size that all ranks use, and how many batches to accumulate."""
        accumulate = stage.trainer.accumulate_grad_batches
        share = self._share(stage)
        resumed = self._of_checkpoint(stage)
        if resumed is None:
            plan = self._found(stage, _at_most(self.settings, share))
            return (plan, accumulate) if share is None else self._divided(plan, share)
        size, accumulate = resumed
        plan = self._found(stage, dataclasses.replace(self.settings, batch_size=size, fixed=True))
        why = "does not fit here"
        if plan.size == size:
            plan = dataclasses.replace(plan, reason="the size of the checkpoint, and it fits")
            why = "does not divide the effective batch"
        if share is not None:
            plan, accumulate = self._divided(plan, size * accumulate if self.effective_batch == "keep" else share)
        if plan.size != size:
            self._note(
                f"the checkpoint was written at batch size {size}, which {why}: it is {plan.size} from here on, and "
                "the position within the epoch, which Lightning counts in batches, is not the same"
            )
        return plan, accumulate

    def _divided(self, plan: Plan, share: int) -> tuple[Plan, int]:
        """The largest size up to the plan's that divides what an optimizer step takes, and how many of them do."""
        size = max(part for part in range(1, plan.size + 1) if share % part == 0)
        if 2 * size <= plan.size:
            self._note(
                f"the batch size is {size} and not {plan.size}, the fastest, since only a divisor of {share} keeps the "
                "effective batch; another effective_batch= is faster"
            )
        return dataclasses.replace(plan, size=size), share // size

    def _share(self, stage: LightningStage) -> int | None:
        """The samples of an optimizer step on each rank, where they are to be kept."""
        wanted, ranks = self.effective_batch, stage.trainer.world_size
        if stage.name != "fit" or wanted is None:
            return None
        if not stage.module.automatic_optimization:
            raise RequestError(
                "effective_batch=: the module optimizes manually, and accumulates in its own training_step; "
                "leave effective_batch= out"
            )
        if any(type(one).__name__ == "GradientAccumulationScheduler" for one in stage.trainer.callbacks):
            raise RequestError(
                "effective_batch=: GradientAccumulationScheduler sets accumulate_grad_batches as well; leave one of "
                "them out"
            )
        if wanted == "keep":
            before = stage.current_size()
            if before is None:
                raise RequestError(
                    f"effective_batch='keep': {self.attribute} is not a whole number yet; give the number of samples"
                )
            return int(before * stage.trainer.accumulate_grad_batches)
        if wanted % ranks:
            raise RequestError(f"effective_batch={wanted}: {ranks} ranks cannot share it evenly; give a multiple")
        return int(wanted // ranks)

    def _of_checkpoint(self, stage: LightningStage) -> tuple[int, int] | None:
        """Size and accumulated batches that a continued fit keeps, so that its position within an epoch is the same."""
        if stage.name != "fit":
            return None
        if not self.keep_on_resume:
            return None
        accumulate = stage.trainer.accumulate_grad_batches
        if self.effective_batch is not None:  # otherwise it is the trainer's setting
            accumulate = self._kept.get("accumulate_grad_batches", accumulate)
        size = self._kept.get("batch_size")
        if size is None and self._within_epoch:
            size = stage.current_size()  # written without this callback: what the module has is what it had
        return None if size is None else (size, accumulate)

    def _found(self, stage: LightningStage, settings: SearchSettings) -> Plan:
        """The plan of a search with the stage's own steps, the same size on all ranks; where one fails, all do."""
        trainer, module = stage.trainer, stage.module
        with stage.sizes_put_back(), quiet(trainer, module, _silent_logger, _pl.profilers.PassThroughProfiler):
            with Agreement(purpose="a search for a batch size") as agreement, agreement.step(int) as step:
                workload = self._workload(stage)
                step.value = workload.largest_size() or DEFAULT_MAX_SIZE
            workload.most = min(step.values)
            plan = find_plan(workload, settings)
        return dataclasses.replace(plan, size=min(plan.batch_sizes_per_rank or (plan.size,)))

    def _workload(self, stage: LightningStage) -> StageWorkload:
        loaders = stage.loaders(self.make_batch if stage.name == "fit" else None)
        bounds = [stage.largest_useful(loaders.smallest_length)]
        workload = StageWorkload(stage.trainer, stage.module, stage.name, loaders, key=self.key)
        if stage.name == "fit":
            validation = stage.validation_loaders()
            checked = None
            if validation is not None:
                validation.look()
                checked = StageWorkload(stage.trainer, stage.module, "validate", validation)
            workload = FitWorkload(stage.trainer, stage.module, loaders, validation=checked, key=self.key)
            bounds.append(stage.largest_validated(validation))
        loaders.look()
        workload.most = min((bound for bound in bounds if bound is not None), default=None)
        return workload

    # ------------------------------------------------------------------------------------------ reporting

    def _redone(self, sentence: str) -> None:
        self.oom_events += 1
        self._note(sentence)

    def _note(self, sentence: str, *, shown: bool = True) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
        if shown:
            self._say(sentence)

    def _say(self, line: str) -> None:
        _pl.utilities.rank_zero_info(f"brim: {line}")

    def _let_go(self) -> None:
        self._kept, self._within_epoch = {}, False  # an evaluation of a checkpoint reads it as well
        if self._survival is not None:
            self._survival.close()
            self._survival = None


def _at_most(settings: SearchSettings, size: int | None) -> SearchSettings:
    return settings if size is None else dataclasses.replace(settings, max_size=min(settings.max_size, size))


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise RequestError(f"{name}={value!r}: it must be one of {', '.join(map(repr, allowed))}")
    return value


def _checked_effective_batch(value: Any) -> Any:
    if value is None or value == "keep" or (type(value) is int and value >= 1):
        return value
    raise RequestError(f"effective_batch={value!r}: it must be 'keep' or a whole number from 1")
