"""A preference training as it was asked for, in plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.models.molecules import ENCODERS, encoder_knobs
from brim.settings.setting_checks import MOST_SEED
from brim.settings.sizes import parse_bytes
from brim.training.fast_path.choose import PATHS
from brim.training.preference.baselines.registry import BASELINES
from brim.training.preference.losses import LOSSES, PreferenceLoss
from brim.workloads.optimizers import optimizer_class

__all__ = ["DEFAULT_BATCH", "DpoRequest"]

DEFAULT_BATCH = 512  # samples of each side in a step, where nothing else is asked for
# How it is computed and on what, which a resumed run may change; the data's content is compared by itself.
_NOT_THE_RESULT = (
    "resume", "device", "fast_path", "batch_size", "effective_batch", "eval_batch_size", "memory_limit", "margin",
    "use_cache", "data", "id", "ood",
)  # fmt: skip
# What may be more the next time: each cell of the table stands for itself.
_MAY_GROW = ("seeds", "losses", "baselines", "encoders")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoRequest:
    """What `brim train dpo` takes; None means that brim chooses."""

    data: tuple[str, ...] = ()  # DrugOOD-style files
    id: str | None = None
    ood: str | None = None
    mapping: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit: int | None = None  # of each part
    split_seed: int = 0
    encoders: tuple[str, ...] = ("morgan",)
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    losses: tuple[str, ...] = ("energy",)
    pairs: str | None = None
    beta: float = 0.1
    regulariser: float | None = None  # None: 0.01, and 0 for the reference loss
    hinge_margin: float = 1.0
    reference: str | None = None
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    seeds: tuple[int, ...] = tuple(range(10))
    lrs: tuple[float, ...] = (1e-3,)
    epochs: int = 50
    patience: int | None = 10
    validate_every: int = 1
    optimizer: str = "adamw"
    weight_decay: float | None = None
    clip_norm: float | None = None
    batch_size: int | None = None  # samples of each side in one pass; None: as many as fit
    effective_batch: int | None = None  # of each side in a step
    eval_batch_size: int | None = None
    baselines: tuple[str, ...] = ()
    fast_path: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    memory_limit: int | str | None = None
    margin: float | None = None
    use_cache: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        self._check_data()
        _check_names("--encoder", self.encoders, ENCODERS)
        _check_names("--loss", self.losses, LOSSES)
        _check_names("--baselines", self.baselines, BASELINES)
        known = {knob.name for name in self.encoders for knob in encoder_knobs(name)}
        for knob in self.knobs:
            if knob not in known:
                has = f"they have {', '.join(sorted(known))}" if known else "they have none"
                raise RequestError(f"--knob {knob}: the encoders asked for have no such knob ({has})")
        optimizer_class(self.optimizer)
        if self.fast_path not in ("auto", *PATHS):
            raise RequestError(f"--fast-path {self.fast_path}: it must be auto, {', '.join(PATHS)}")
        for flag, seeds in (("--seeds", self.seeds), ("--split-seed", (self.split_seed,))):
            if any(not 0 <= seed <= MOST_SEED for seed in seeds):
                raise RequestError(
                    f"{flag} {','.join(map(str, seeds))}: a seed is a whole number from 0 to {MOST_SEED}"
                )
        if not self.seeds or not self.lrs:
            raise RequestError("--seeds and --lr: there must be at least one of each")
        for lr in self.lrs:
            if not 0 < lr < float("inf"):
                raise RequestError(f"--lr {lr:g}: it must be above 0")
        for flag, value in (("--epochs", self.epochs), ("--limit", self.limit), ("--eval-every", self.validate_every),
                            ("--batch-size", self.batch_size), ("--effective-batch", self.effective_batch),
                            ("--eval-batch-size", self.eval_batch_size), ("--patience", self.patience)):  # fmt: skip
            if value is not None and value < 1:
                raise RequestError(f"{flag} {value}: it must be at least 1")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise RequestError(f"--margin {self.margin:g}: give a fraction from 0 to below 1")
        if self.reference is not None and "reference" not in self.losses:
            raise RequestError(f"--reference {self.reference}: it goes with --loss reference")
        for name in self.losses:
            self.loss(name)  # checks beta, margin and the rest

    def _check_data(self) -> None:
        if (self.id is None) != (self.ood is None):
            raise RequestError("--id and --ood go together: give one file of each kind")
        if self.id is None and not self.data:
            raise RequestError("there is no data: give --id IN --ood OUT, or --data FILE.json")

    def loss(self, name: str) -> PreferenceLoss:
        """The loss of that name with the settings asked for."""
        usual = 0.0 if name == "reference" else 0.01
        return PreferenceLoss(
            name=name,  # type: ignore[arg-type]
            pairs=self.pairs,  # type: ignore[arg-type]
            beta=self.beta,
            regulariser=usual if self.regulariser is None else self.regulariser,
            margin=self.hinge_margin,
        )

    @property
    def step_size(self) -> int:
        """Rows of each side in a step: what was asked for, or -b where only that was, or 512."""
        return self.effective_batch or self.batch_size or DEFAULT_BATCH

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**dataclasses.asdict(self), "mapping": dict(self.mapping), "knobs": dict(self.knobs)}

    def settings_that_matter(self) -> dict[str, Any]:
        """What the results depend on; seeds, losses, encoders and baselines may be added when a run is resumed."""
        facts = {**self.to_json(), "step_size": self.step_size}
        for name in (*_NOT_THE_RESULT, *_MAY_GROW):
            del facts[name]
        return facts


def _check_names(flag: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise RequestError(f"{flag} {name}: it must be some of {','.join(known)}{nearest_names(name, known)}")
    if len(set(names)) < len(names):
        raise RequestError(f"{flag} {','.join(names)}: one is named twice")
