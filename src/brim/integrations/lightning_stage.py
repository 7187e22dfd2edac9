"""One stage of a Lightning trainer: where its loaders come from, where its batch size is kept, and how to change it.

The only file that uses private names of Lightning: there is no public one for where a stage's loaders come from
(`_data_source`), for whether they were made already (`_combined_loader`), nor for how several are combined (`_mode`).
Imports no Lightning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from brim.errors import RequestError
from brim.integrations.lightning_loaders import StageLoaders, loaders_in, rebuilt

__all__ = ["STAGES", "LightningStage"]

STAGES = ("fit", "validate", "test", "predict")
_LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}  # train_dataloader, …


class LightningStage:
    """A stage that is about to run; `attribute` is what its loaders are made with."""

    def __init__(self, name: str, trainer: Any, module: Any, attribute: str) -> None:
        self.name = name
        self.trainer = trainer
        self.module = module
        self.attribute = attribute
        self._loop = getattr(trainer, f"{name}_loop")
        self._hook = f"{_LOADERS[name]}_dataloader"

    @property
    def passed_in(self) -> bool:
        """Whether loaders were given to the trainer, and are not made by the module or data module."""
        return self._is_passed_in(self._loop)

    def _is_passed_in(self, loop: Any) -> bool:
        source = loop._data_source.instance
        return source is not self.module and source is not self.trainer.datamodule

    def has_nothing_to_run(self) -> bool:
        """Whether the trainer's settings leave the stage without a batch."""
        return getattr(self.trainer, f"limit_{_LOADERS[self.name]}_batches") == 0  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------ sizes

    def _holders(self) -> list[Any]:
        """Everything that has the attribute: the module, the data module, and the `hparams` of each."""
        found: list[Any] = []
        for owner in (self.module, self.trainer.datamodule):
            if owner is None:
                continue
            hparams = getattr(owner, "hparams", None)
            found += [owner] if hasattr(owner, self.attribute) and not self._is_derived(owner) else []
            found += [hparams] if hparams is not None and self.attribute in hparams else []
        return found

    def _is_derived(self, owner: Any) -> bool:
        """Whether the attribute is a property that only reads what is set elsewhere, as in `hparams`."""
        declared = getattr(type(owner), self.attribute, None)
        return isinstance(declared, property) and declared.fset is None

    def current_size(self) -> int | None:
        """The batch size as it is set now; None where there is no whole number."""
        if self.passed_in:
            sizes = [getattr(loader, "batch_size", None) for loader in loaders_in(self._loop._data_source.instance)]
        else:
            sizes = [_value(holder, self.attribute) for holder in reversed(self._holders())]
        return next((size for size in sizes if isinstance(size, int)), None)

    def set_size(self, size: int) -> None:
        """Set the attribute wherever it is."""
        for holder in self._holders():
            if isinstance(holder, dict):
                holder[self.attribute] = size
            else:
                setattr(holder, self.attribute, size)

    @contextlib.contextmanager
    def sizes_put_back(self) -> Iterator[None]:
        """While inside, the attribute may be set as often as needed.

        Loaders that a hook has Lightning make meanwhile, by asking for the number of steps, are forgotten.
        """
        before = [(holder, _value(holder, self.attribute)) for holder in self._holders()]
        loader = self._loop._combined_loader
        try:
            yield
        finally:
            self._loop._combined_loader = loader
            for holder, value in before:
                if isinstance(holder, dict):
                    holder[self.attribute] = value
                else:
                    setattr(holder, self.attribute, value)

    def largest_useful(self, length: int | None) -> int | None:
        """The largest batch that the data of a rank fills, with as many batches as an epoch must have."""
        interval, every = self.trainer.val_check_interval, self.trainer.check_val_every_n_epoch
        counts = self.name == "fit" and type(interval) is int and every is not None and self.trainer.enable_validation
        return self._largest_filled(length, _LOADERS[self.name], interval if counts else 1)

    def largest_validated(self, validation: StageLoaders | None) -> int | None:
        """The largest batch at which a validation within the fit has a batch; None where any size has one."""
        if validation is None:
            return None
        whole = not any(getattr(loader, "drop_last", False) for loader in validation.each)
        if whole and not _is_part(self.trainer.limit_val_batches):
            return None
        return self._largest_filled(validation.smallest_length, "val", 1)

    def _largest_filled(self, length: int | None, loaders: str, batches: int) -> int | None:
        """The largest batch of which so many remain under `limit_…_batches`; None without a length."""
        if length is None:
            return None
        limit = getattr(self.trainer, f"limit_{loaders}_batches")
        if _is_part(limit):
            wanted, batches = batches, math.ceil(batches / limit)
            batches += int(batches * limit) < wanted  # the division was rounded down
        return max(int(length // (self.trainer.world_size * batches)), 1)

    # ------------------------------------------------------------------------------------------ loaders

    def loaders(self, make_batch: Callable[[int], Any] | None = None) -> StageLoaders:
        """What worst-case batches are made of; it is checked that a size that is set has an effect."""
        source = self._loop._data_source.instance
        if self.passed_in:
            rebuilt(source, 2)  # raises where that is not possible
            return self._combined(StageLoaders(lambda: source, None, make_batch))
        if not self._holders():
            raise RequestError(
                f"neither the module nor its data module has {self.attribute}, in itself or in hparams, so that brim "
                f"cannot change the batch size; set self.{self.attribute} in __init__ and make loaders with it, or "
                "name the attribute that they are made with: BatchSize('…')"
            )
        tried = self._doubled()
        loaders = StageLoaders(getattr(source, self._hook), self.set_size, make_batch)
        ignoring = [size for size in _sizes(loaders) if size not in (None, tried)]
        if ignoring:
            raise RequestError(
                f"{self._hook}() makes a loader of batch size {ignoring[0]} where {self.attribute} is {tried}: make "
                f"each with batch_size=self.{self.attribute}, or name the attribute that they are made with: "
                "BatchSize('…')"
            )
        return self._combined(loaders)

    def validation_loaders(self) -> StageLoaders | None:
        """The loaders of the validation within a fit, if they are made with the same size."""
        loop = self.trainer.fit_loop.epoch_loop.val_loop
        if not self.trainer.enable_validation or self._is_passed_in(loop) or not self._holders():
            return None
        tried = self._doubled()
        loaders = StageLoaders(loop._data_source.instance.val_dataloader, self.set_size)
        return self._combined(loaders, "validate") if all(size == tried for size in _sizes(loaders)) else None

    def _combined(self, loaders: StageLoaders, name: str | None = None) -> StageLoaders:
        """The same, knowing whether a step takes a batch of one loader or of all: what Lightning does by default."""
        default = "max_size_cycle" if (name or self.name) == "fit" else "sequential"
        loaders.in_turn = getattr(loaders.structure, "_mode", default) == "sequential"
        return loaders

    def _doubled(self) -> int:
        """Twice the size, set: what a loader that follows the attribute then has."""
        size = 2 * (self.current_size() or 1)
        self.set_size(size)
        return size

    # ------------------------------------------------------------------------------------------ the run

    def apply(self, size: int, accumulate: int) -> None:
        """Have the stage run at the size: loaders that were made already are made again."""
        trainer, loop = self.trainer, self._loop
        changed = (self.current_size(), trainer.accumulate_grad_batches) != (size, accumulate)
        self.set_size(size)
        trainer.accumulate_grad_batches = accumulate
        if not changed:
            return
        if self.passed_in:
            loop._data_source.instance = rebuilt(loop._data_source.instance, size)
        if self.name != "fit":
            loop.setup_data()
            loop.reset()
        elif loop._combined_loader is not None:
            # configure_optimizers() has asked for the number of steps, which is another one now.
            loop._combined_loader = None
            trainer.strategy.setup_optimizers(trainer)


def _value(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _is_part(limit: int | float) -> bool:
    """Whether a `limit_…_batches` is a part of an epoch."""
    return isinstance(limit, float) and 0.0 < limit < 1.0


def _sizes(loaders: StageLoaders) -> list[int | None]:
    return [getattr(loader, "batch_size", None) for loader in loaders.each]
