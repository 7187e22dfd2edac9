"""What `brim ood` and `brim encode` take: molecules, the heads that tell two kinds of them apart, and features."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from brim.errors import RequestError, nearest_names
from brim.settings import shared
from brim.settings.caller import given, named, written
from brim.settings.declare import Setting, check_fields
from brim.settings.setting_checks import (
    MOST_SEED,
    Check,
    WrongEntryError,
    choice,
    entries_of,
    names,
    number,
    numbers,
    optional,
    pairs,
    path_text,
    size_or_none,
    texts,
    whole,
)
from brim.settings.shared import BATCH, DATA, FAST_PATHS, LARGEST_SIZE, OUTPUT, read_seeds, seeds_from
from brim.settings.sizes import parse_bytes

__all__ = [
    "BASELINES", "DEFAULT_BATCH", "ENCODERS", "LOSSES", "EncodeRequest", "EncodeSettings", "LossName", "OodCommand",
    "OodRequest",
]  # fmt: skip

ENCODERS = ("morgan", "minimol", "unimol")
LossName = Literal["energy", "reference", "hinge", "bce", "mse"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
BASELINES = ("msp", "energy", "odin", "mahalanobis", "knn", "lof", "mc_dropout", "logistic")
FEWEST_CHECKPOINTED = 2  # hidden layers of a head with gradient checkpointing
DEFAULT_BATCH = 512  # samples of each side in a step, where nothing else is asked for
LOSS, TRAINING = "Loss", "Training"
_KNOBS = shared.setting_of(  # of an encoder, as those of a model
    shared.Knobs,
    help="A setting of the encoder, repeatable: --knob bits=1024.",
    check=pairs("NAME=VALUE, for example --knob bits=1024"),
    python_help="Settings of the encoder: {'bits': 1024}.",
)
_NO_CACHE = shared.setting_of(shared.NoCache, help="Neither use cached features nor keep any.", panel="")
# How it is computed and where: a resumed run may change that. The data's content is compared separately.
_NOT_THE_RESULT = (
    "resume", "device", "fast_path", "batch_size", "effective_batch", "eval_batch_size", "memory_limit", "margin",
    "use_cache", "data", "id", "ood", "plan", "gradient_checkpointing",
)  # fmt: skip
# What a resumed run may have more of: the cells of the table do not depend on each other.
_MAY_GROW = ("seeds", "losses", "baselines", "encoders")


def _some_of(known: tuple[str, ...]) -> Check:
    """Names, each known and there once; a list may have texts with commas."""
    words = names()

    def read(value: Any) -> tuple[str, ...]:
        found = known if value == "all" else tuple(name for text in entries_of(value) for name in words(text))
        for name in found:
            if name not in known:
                raise WrongEntryError(name, f"it must be some of {','.join(known)}{nearest_names(name, known)}")
        if len(set(found)) < len(found):
            raise ValueError("one is named twice")
        return found

    return Check("names", read)


def _read_seeds(value: Any) -> tuple[int, ...]:
    found = read_seeds(value)
    if isinstance(found, tuple) and len(set(found)) < len(found):
        raise ValueError("one is named twice")
    return seeds_from(found, first=0)


def _read_patience(value: Any) -> int | None:
    return whole(0)(value) or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OodRequest:
    """A training of energy heads; None means that brim chooses."""

    data: Annotated[  # DrugOOD-style files
        tuple[str, ...],
        Setting(
            help="A file of splits (DrugOOD's JSON); repeatable.", flags=("-d", "--data"), panel=DATA, metavar="FILE",
            check=texts(), many=True, python="str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None",
            python_help="A file of splits (DrugOOD's JSON), or several.",
        ),
    ] = ()  # fmt: skip
    id: Annotated[
        str | None,
        Setting(
            help="In-distribution: SMILES (.csv, .smi) or features (.safetensors).", panel=DATA, metavar="FILE",
            check=path_text(),
        ),
    ] = None  # fmt: skip
    ood: Annotated[
        str | None, Setting(help="Out-of-distribution, likewise.", panel=DATA, metavar="FILE", check=path_text())
    ] = None
    mapping: Annotated[
        Mapping[str, str],
        Setting(
            name="map", help="smiles=COLUMN or label=COLUMN, where they are called otherwise.", panel=DATA,
            metavar="FIELD=COLUMN", many=True, check=pairs("smiles=COLUMN or label=COLUMN", ("smiles", "label")),
            python_help="The columns, where they are called otherwise: {'smiles': 'structure', 'label': 'y'}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    limit: Annotated[  # of each part
        int | None, Setting(help="At most N of each split.", panel=DATA, metavar="N", check=whole(1))
    ] = None
    split_seed: Annotated[
        int, Setting(help="How files without splits are divided.", panel=DATA, metavar="N", check=whole(0, MOST_SEED))
    ] = 0
    encoders: Annotated[
        tuple[str, ...],
        Setting(
            name="encoder", help="morgan (default), minimol, unimol; separated by commas.", panel=DATA, metavar="NAMES",
            check=_some_of(ENCODERS), many=True, default=None, python="str | Sequence[str] | None",
            python_help="morgan (default), minimol, unimol, or several.",
        ),
    ] = ("morgan",)  # fmt: skip
    knobs: Annotated[Mapping[str, Any], dataclasses.replace(_KNOBS, panel=DATA)] = dataclasses.field(
        default_factory=dict
    )
    losses: Annotated[
        tuple[str, ...],
        Setting(
            name="loss", help="energy, reference, hinge, bce, mse; separated by commas.", panel=LOSS, metavar="NAMES",
            check=_some_of(LOSSES), default="energy", python="str | Sequence[str]",
            python_help="energy, reference, hinge, bce, mse, or several.",
        ),
    ] = ("energy",)  # fmt: skip
    pairs: Annotated[
        str | None,
        Setting(
            help="all or matched; by default all, and matched for the reference loss.", panel=LOSS, metavar="WHICH",
            check=choice("all", "matched"),
        ),
    ] = None  # fmt: skip
    beta: Annotated[
        float, Setting(help="Steepness of the preference.", panel=LOSS, metavar="NUMBER", check=number(above=0))
    ] = 0.1
    regulariser: Annotated[  # None: 0.01, and 0 for the reference loss
        float | None,
        Setting(
            help="Weight of squared energies (0.01; reference: 0).", panel=LOSS, metavar="NUMBER",
            check=number(least=0),
        ),
    ] = None  # fmt: skip
    hinge_margin: Annotated[
        float, Setting(help="Of the hinge loss.", panel=LOSS, metavar="NUMBER", check=number(above=0))
    ] = 1.0
    reference: Annotated[
        str | None,
        Setting(
            help="The frozen head; by default each run's own first weights.", panel=LOSS, metavar="FILE",
            check=path_text(),
        ),
    ] = None  # fmt: skip
    hidden: Annotated[
        tuple[int, ...],
        Setting(
            help="Units of the hidden layers.", panel=TRAINING, metavar="SIZES", check=numbers(int),
            python="str | int | Sequence[int]",
        ),
    ] = (256, 128)  # fmt: skip
    dropout: Annotated[
        float, Setting(help="In the head, while training.", panel=TRAINING, metavar="FRACTION", check=number())
    ] = 0.0
    seeds: Annotated[
        tuple[int, ...],
        Setting(
            help="How many, or which: 10, or 3,5,8.", panel=TRAINING, metavar="N|LIST",
            check=Check("seeds", _read_seeds), default="10", python="int | str | Sequence[int]", python_default=10,
            python_help="How many, or which: 10, or [3, 5, 8].",
        ),
    ] = tuple(range(10))  # fmt: skip
    lrs: Annotated[
        tuple[float, ...],
        Setting(
            name="lr", help="Learning rates, separated by commas.", panel=TRAINING, metavar="RATES",
            check=numbers(float), default="1e-3", python="float | str | Sequence[float]", python_default=1e-3,
            python_help="The learning rate, or several.",
        ),
    ] = (1e-3,)  # fmt: skip
    epochs: Annotated[int, Setting(help="At most so many.", panel=TRAINING, metavar="N", check=whole(1))] = 50
    patience: Annotated[
        int | None,
        Setting(
            help="Validations without a better AUROC before a seed stops; 0: never.", panel=TRAINING, metavar="N",
            check=Check("whole number", _read_patience),
        ),
    ] = 10  # fmt: skip
    validate_every: Annotated[
        int, Setting(name="eval_every", help="Epochs between validations.", panel=TRAINING, metavar="N", check=whole(1))
    ] = 1
    optimizer: Annotated[str, Setting(help="Any of torch.optim, by name.", panel=TRAINING, metavar="NAME")] = "adamw"
    weight_decay: Annotated[
        float | None,
        Setting(help="By default the optimizer's own.", panel=TRAINING, metavar="NUMBER", check=optional(number())),
    ] = None
    clip_norm: Annotated[
        float | None,
        Setting(help="Largest gradient norm of a seed.", panel=TRAINING, metavar="NUMBER", check=optional(number())),
    ] = None
    baselines: Annotated[
        tuple[str, ...],
        Setting(
            help=f"By commas, or all: {', '.join(BASELINES)}.", panel=TRAINING, metavar="NAMES",
            check=_some_of(BASELINES), python="str | Sequence[str] | None",
            python_help=f"Names, or 'all': {', '.join(BASELINES)}.",
        ),
    ] = ()  # fmt: skip
    fast_path: Annotated[
        str,
        Setting(
            help="auto, off, resident (data on the device) or stacked (all seeds in one model).", panel=TRAINING,
            metavar="PATH", check=choice("auto", *FAST_PATHS),
        ),
    ] = "auto"  # fmt: skip
    batch_size: Annotated[  # samples of each side in one pass; None: as many as fit
        int | None,
        shared.setting_of(shared.BatchSize, help="Samples of each side in one pass: auto, or N as a ceiling."),
    ] = None
    effective_batch: Annotated[  # of each side in a step
        int | None,
        Setting(
            help="Samples of each side in a step: N; auto is -b, or 512.", panel=BATCH, metavar="auto|N",
            check=size_or_none(LARGEST_SIZE), default="auto",
        ),
    ] = None  # fmt: skip
    eval_batch_size: Annotated[
        int | None,
        Setting(
            help="Rows in one pass of a validation.", panel=BATCH, metavar="auto|N", check=size_or_none(LARGEST_SIZE),
            default="auto",
        ),
    ] = None  # fmt: skip
    plan: Annotated[  # the folder of a run whose sizes are used again
        str | None,
        Setting(
            help="Use the sizes of an earlier run, or what a comparison recommends.", panel=BATCH, metavar="DIR",
            check=path_text(),
        ),
    ] = None  # fmt: skip
    memory_limit: shared.MemoryLimit = None
    margin: shared.Margin = None
    use_cache: Annotated[bool, dataclasses.replace(_NO_CACHE, panel=DATA)] = True
    device: shared.Device = "auto"
    dtype: shared.Dtype = "auto"
    gradient_checkpointing: Annotated[
        bool,
        shared.setting_of(
            shared.GradientCheckpointing, help="Recompute the head's activations in the backward pass; not stacked."
        ),
    ] = False
    resume: Annotated[bool, Setting(help="Continue the run in -o: finished cells are kept.", panel=OUTPUT)] = False

    def __post_init__(self) -> None:
        if (self.id is None) != (self.ood is None):
            raise RequestError(f"{named('id')} and {named('ood')} go together: give one file of each kind")
        if self.id is None and not self.data:
            raise RequestError(
                f"there is no data: give {written('id', 'IN')} and {written('ood', 'OUT')}, or "
                f"{written('data', 'FILE.json')}"
            )
        check_fields(self)
        for seed in self.seeds:
            if not 0 <= seed <= MOST_SEED:
                raise RequestError(f"{given('seeds', seed)}: a seed is a whole number from 0 to {MOST_SEED}")
        if not self.seeds or not self.lrs:
            raise RequestError(f"{named('seeds')} and {named('lr')}: there must be at least one of each")
        for lr in self.lrs:
            if not 0 < lr < float("inf"):
                raise RequestError(f"{given('lr', lr)}: it must be above 0")
        if self.gradient_checkpointing:
            self._check_checkpointing()
        if self.reference is not None and "reference" not in self.losses:
            raise RequestError(f"{given('reference', self.reference)}: it goes with {written('loss', 'reference')}")

    def _check_checkpointing(self) -> None:
        """Encoders are frozen, so only heads keep activations for a backward pass, and only some of them gain."""
        flag = named("gradient_checkpointing")
        if self.fast_path == "stacked":
            raise RequestError(
                f"{flag}: heads that are stacked share one backward pass, in which nothing is recomputed; leave "
                f"{given('fast_path', 'stacked')} or {flag} out"
            )
        if len(self.hidden) < FEWEST_CHECKPOINTED:
            raise RequestError(
                f"{flag}: {written('hidden', ','.join(map(str, self.hidden)))} is too few layers to recompute any, and "
                f"encoders have no backward pass; leave it out, or lower {named('batch_size')}: a step is split into "
                "passes that fit"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OodCommand:
    """A training of detectors of out-of-distribution molecules, and where its record goes."""

    request: OodRequest
    objective: Annotated[
        str,
        Setting(
            help="How the detectors learn: dpo, by preferring one molecule of a pair.", metavar="dpo",
            check=choice("dpo"),
        ),
    ] = "dpo"  # fmt: skip
    compare_batch: Annotated[
        tuple[int, ...],
        shared.setting_of(
            shared.CompareBatch, help="Short trials of these effective batches instead: 512,2048,8192."
        ),
    ] = ()  # fmt: skip
    output: shared.RunFolder = None
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        if self.compare_batch:
            shared.check_comparison("compare_batch", resume=self.request.resume)
        shared.check_resume(self.request.resume, self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeRequest:
    """A file of molecules, the encoder, and the file of features to write."""

    data: Annotated[
        str,
        Setting(
            help="SMILES: .csv or .tsv with a header, .smi or .txt.", flags=("-d", "--data"), metavar="FILE",
            check=path_text(), positional=True, missing="give the file of molecules, such as smiles.csv",
        ),
    ]  # fmt: skip
    output: Annotated[
        str,
        Setting(
            help="Where the features go: FILE.safetensors.", flags=("-o", "--output"), metavar="FILE",
            check=path_text(), positional=True, missing="give the file to write, FILE.safetensors",
        ),
    ]  # fmt: skip
    model: Annotated[str, Setting(help="morgan, minimol or unimol.", flags=("-m", "--model"), metavar="ENCODER")] = (
        "morgan"
    )
    mapping: Annotated[
        Mapping[str, str],
        Setting(
            name="map", help="The column of SMILES, where it is called otherwise.", metavar="smiles=COLUMN", many=True,
            check=pairs("smiles=COLUMN", ("smiles",)),
            python_help="The column of SMILES, where it is called otherwise: {'smiles': 'structure'}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    limit: Annotated[int | None, Setting(help="Only the first N molecules.", metavar="N", check=whole(1))] = None
    knobs: Annotated[Mapping[str, Any], _KNOBS] = dataclasses.field(default_factory=dict)
    batch_size: shared.BatchSize = None
    memory_limit: shared.MemoryLimit = None
    use_cache: Annotated[bool, _NO_CACHE] = True
    device: shared.Device = "auto"
    resume: Annotated[bool, Setting(help="Continue a stopped run of the same file.")] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.output.endswith(".safetensors"):
            raise RequestError(f"{given('output', self.output)}: features are written as FILE.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """An encoding, and how its figures are shown."""

    request: EncodeRequest
    json_output: shared.JsonOutput = False
