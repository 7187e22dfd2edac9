"""`brim train dpo`: energy heads on features of molecules, many seeds at once, beside the baselines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.training.preference.run import DpoResult

__all__ = ["dpo"]

SOME_FAILED = 1
_DATA, _LOSS, _TRAIN, _BATCH, _OUT = "Data", "Loss", "Training", "Batch size", "Output"
_Value = TypeVar("_Value")


def _flag(*names: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Sets = Annotated[
    list[str] | None,
    _flag("-d", "--data", text="A file of splits (DrugOOD's JSON); repeatable.", panel=_DATA, metavar="FILE"),
]
Inside = Annotated[
    str | None,
    _flag("--id", text="In-distribution: SMILES (.csv, .smi) or features (.safetensors).", panel=_DATA, metavar="FILE"),
]
Outside = Annotated[str | None, _flag("--ood", text="Out-of-distribution, likewise.", panel=_DATA, metavar="FILE")]
Most = Annotated[int | None, _flag("--limit", text="At most N of each split.", panel=_DATA, metavar="N", min=1)]
SplitSeed = Annotated[int, _flag("--split-seed", text="How files without splits are divided.", panel=_DATA)]
Columns = Annotated[
    list[str] | None,
    _flag("--map", text="smiles=COLUMN or label=COLUMN, where they are called otherwise.", panel=_DATA,
          metavar="FIELD=COLUMN"),
]  # fmt: skip
EncoderKnobs = Annotated[
    list[str] | None,
    _flag("--knob", text="A setting of the encoder, repeatable: --knob bits=1024.", panel=_DATA, metavar="NAME=VALUE"),
]
Encoders = Annotated[
    list[str] | None,
    _flag("--encoder", text="morgan (default), minimol, unimol; several by commas.", panel=_DATA, metavar="NAMES"),
]
Losses = Annotated[
    str,
    _flag("--loss", text="energy, reference, hinge, bce, mse; several by commas.", panel=_LOSS, metavar="NAMES"),
]
PairsFlag = Annotated[
    str | None,
    _flag("--pairs", text="all or matched; all, and for the reference loss matched.", panel=_LOSS, metavar="WHICH"),
]
Beta = Annotated[float, _flag("--beta", text="Steepness of the preference.", panel=_LOSS)]
Regulariser = Annotated[
    float | None, _flag("--regulariser", text="Weight of squared energies (0.01; reference: 0).", panel=_LOSS)
]
HingeMargin = Annotated[float, _flag("--hinge-margin", text="Of the hinge loss.", panel=_LOSS)]
Reference = Annotated[
    str | None,
    _flag("--reference", text="The frozen head; by default each run's own first weights.", panel=_LOSS, metavar="FILE"),
]
Hidden = Annotated[str, _flag("--hidden", text="Units of the hidden layers.", panel=_TRAIN, metavar="SIZES")]
Dropout = Annotated[float, _flag("--dropout", text="In the head, while training.", panel=_TRAIN)]
Seeds = Annotated[str, _flag("--seeds", text="How many, or which: 10, or 3,5,8.", panel=_TRAIN, metavar="N|LIST")]
Rates = Annotated[str, _flag("--lr", text="Learning rates; several by commas.", panel=_TRAIN, metavar="RATES")]
Epochs = Annotated[int, _flag("--epochs", text="At most so many.", panel=_TRAIN)]
Patience = Annotated[
    int, _flag("--patience", text="Validations without a better AUROC before a seed stops; 0: never.", panel=_TRAIN)
]
EvalEvery = Annotated[int, _flag("--eval-every", text="Epochs between validations.", panel=_TRAIN)]
OptimizerFlag = Annotated[str, _flag("--optimizer", text="Any of torch.optim, by name.", panel=_TRAIN, metavar="NAME")]
WeightDecay = Annotated[float | None, _flag("--weight-decay", text="By default the optimizer's own.", panel=_TRAIN)]
ClipNorm = Annotated[float | None, _flag("--clip-norm", text="Largest gradient norm of a seed.", panel=_TRAIN)]
Baselines = Annotated[
    str | None,
    _flag("--baselines", text="By commas, or all: msp, energy, odin, mahalanobis, knn, lof, mc_dropout, logistic.",
          panel=_TRAIN, metavar="NAMES"),
]  # fmt: skip
FastPath = Annotated[
    str,
    _flag("--fast-path", text="auto, off, resident (data on the device) or stacked (seeds as one).", panel=_TRAIN,
          metavar="PATH"),
]  # fmt: skip
OnePass = Annotated[
    str,
    _flag("-b", "--batch-size", text="Samples of each side in one pass: auto, or N as a ceiling.", panel=_BATCH,
          metavar="auto|N"),
]  # fmt: skip
NoFeatureCache = Annotated[bool, _flag("--no-cache", text="Neither use cached features nor keep any.", panel=_DATA)]
Effective = Annotated[
    str,
    _flag("--effective-batch", text="Samples of each side in a step: N; auto is -b, or 512.", panel=_BATCH,
          metavar="auto|N"),
]  # fmt: skip
EvalBatch = Annotated[
    str, _flag("--eval-batch-size", text="Rows in one pass of a validation.", panel=_BATCH, metavar="auto|N")
]
ResumeFlag = Annotated[
    bool, _flag("--resume", text="Go on with the run in -o: cells that are done are not done again.", panel=_OUT)
]


def dpo(
    data: Sets = None,
    inside: Inside = None,
    outside: Outside = None,
    field: Columns = None,
    limit: Most = None,
    split_seed: SplitSeed = 0,
    encoder: Encoders = None,
    knob: EncoderKnobs = None,
    loss: Losses = "energy",
    pairs: PairsFlag = None,
    beta: Beta = 0.1,
    regulariser: Regulariser = None,
    hinge_margin: HingeMargin = 1.0,
    reference: Reference = None,
    hidden: Hidden = "256,128",
    dropout: Dropout = 0.0,
    seeds: Seeds = "10",
    lr: Rates = "1e-3",
    epochs: Epochs = 50,
    patience: Patience = 10,
    eval_every: EvalEvery = 1,
    optimizer: OptimizerFlag = "adamw",
    weight_decay: WeightDecay = None,
    clip_norm: ClipNorm = None,
    baselines: Baselines = None,
    fast_path: FastPath = "auto",
    batch_size: OnePass = "auto",
    effective_batch: Effective = "auto",
    eval_batch_size: EvalBatch = "auto",
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = None,
    no_cache: NoFeatureCache = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    resume: ResumeFlag = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Train energy heads that tell out-of-distribution molecules from others; all seeds at once, one table.

    Example: brim train dpo --id in.csv --ood out.csv --encoder morgan --seeds 10 --baselines knn,mahalanobis
    """
    if resume and output is None:
        raise RequestError("--resume: say which run with -o DIR")
    from brim.training.preference.baselines.registry import BASELINES
    from brim.training.preference.request import DpoRequest

    request = DpoRequest(
        data=tuple(data or ()),
        id=inside,
        ood=outside,
        mapping=_mapping(field),
        limit=limit,
        split_seed=split_seed,
        encoders=tuple(name for text in encoder or ["morgan"] for name in _names(text)),
        knobs=options.collect_knobs(knob, None),
        losses=_names(loss),
        pairs=pairs,
        beta=beta,
        regulariser=regulariser,
        hinge_margin=hinge_margin,
        reference=reference,
        hidden=_numbers("--hidden", hidden, int),
        dropout=dropout,
        seeds=_seeds(seeds),
        lrs=_numbers("--lr", lr, float),
        epochs=epochs,
        patience=patience or None,
        validate_every=eval_every,
        optimizer=optimizer,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        baselines=BASELINES if baselines == "all" else _names(baselines or ""),
        fast_path=fast_path,
        batch_size=options.parse_batch_size(batch_size),
        effective_batch=options.parse_batch_size(effective_batch, flag="--effective-batch"),
        eval_batch_size=options.parse_batch_size(eval_batch_size, flag="--eval-batch-size"),
        memory_limit=memory_limit,
        margin=margin,
        use_cache=not no_cache,
        device=device,
        dtype=dtype,
        resume=resume,
    )
    result = _run(request, output, quiet=json_output)
    leave_report(result.folder)
    _show(result, json_output=json_output)
    if result.failed or result.summary["molecules_left_out"]:
        raise typer.Exit(SOME_FAILED)


def _run(request: Any, output: Path | None, *, quiet: bool) -> DpoResult:
    from brim.cli.train_dpo_progress import DpoProgress
    from brim.training.preference.run import train_dpo

    with DpoProgress(error_console(), lines=not quiet) as progress:
        return train_dpo(request, output=output, listener=progress)


def _show(result: DpoResult, *, json_output: bool) -> None:
    if json_output:
        document = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
        print_document(document)
        return
    from brim.cli.train_dpo_progress import print_result

    print_result(output_console(), result)


def _mapping(flags: list[str] | None) -> dict[str, str]:
    """`--map smiles=COLUMN`; the readers of other data know other fields, so these are read by themselves."""
    found = {}
    for flag in flags or []:
        name, equals, column = flag.partition("=")
        if name not in ("smiles", "label") or not equals or not column:
            raise RequestError(f"--map {flag}: write smiles=COLUMN or label=COLUMN")
        found[name] = column
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(flag: str, text: str, kind: Callable[[str], _Value]) -> tuple[_Value, ...]:
    try:
        return tuple(kind(part) for part in _names(text))
    except ValueError:
        raise RequestError(f"{flag} {text}: write numbers, several by commas") from None


def _seeds(text: str) -> tuple[int, ...]:
    from brim.training.seeds.variants import seeds_from

    numbers = _numbers("--seeds", text, int)
    if not numbers:
        raise RequestError(f"--seeds {text}: give how many, from 1, or which, by commas")
    if len(set(numbers)) < len(numbers):
        raise RequestError(f"--seeds {text}: one is named twice")
    return seeds_from(numbers if "," in text else numbers[0], first=0)
