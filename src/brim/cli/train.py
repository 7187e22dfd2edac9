"""`brim train`: the user's effective batch, in micro-batches that fit. `brim train dpo` is in `train_dpo.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.cli.pasted import SuggestingCommand
from brim.cli.run_report import leave_report
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.training.request import TrainRequest
    from brim.training.run import TrainResult

__all__ = ["app", "train"]

_FILE_COMMAND = "config"
_Value = TypeVar("_Value")


class FileOrCommand(TyperGroup):
    """A group whose first word, if it is no command, is the file of the command that trains from one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name before anything that is not another command's."""
        if not args or args[0] not in self.commands:
            args = [_FILE_COMMAND, *(args or ["--help"])]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The usage line shows what people type: `brim train CONFIG`, without the command's own name."""
        name, command, rest = super().resolve_command(ctx, args)
        return (None if name == _FILE_COMMAND else name), command, rest


app = typer.Typer(
    cls=FileOrCommand,
    help="Train a model as a file says: your effective batch, in micro-batches that fit the card.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file; docs/training.md lists its keys.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings of the file, changed: hp.epochs=3.", show_default=False),
]
_SEEDS, SOME_FAILED = "Seeds", 1
Seeds = Annotated[
    str | None,
    typer.Option("--seeds", help="The same for several: how many from hp.seed on, or which (3,5,8).",
                 rich_help_panel=_SEEDS, metavar="N|LIST"),
]  # fmt: skip
LearningRates = Annotated[
    str | None,
    typer.Option("--learning-rates", help="Every seed at each of these: 1e-3,3e-4.", rich_help_panel=_SEEDS,
                 metavar="RATES"),
]  # fmt: skip
FastPath = Annotated[
    str,
    typer.Option("--fast-path", help="auto, off (one by one), resident (data on the device) or stacked (seeds as one).",
                 rich_help_panel=_SEEDS, metavar="PATH"),
]  # fmt: skip


@app.command(_FILE_COMMAND, cls=SuggestingCommand, epilog="Also: brim train dpo --help")
def train(
    config: Config,
    overrides: Overrides = None,
    batch_size: options.MicroBatchSize = None,
    effective_batch: options.EffectiveBatch = None,
    lr_scale: options.LrScale = None,
    scale_betas: options.ScaleBetas = False,
    eval_batch_size: options.EvalBatchSize = None,
    no_auto_batch_size: options.NoAutoBatchSize = False,
    fail_on_oom: options.FailOnOom = False,
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = None,
    per_rank: options.PerRank = False,
    plan: options.EarlierPlan = None,
    compare_batch: options.CompareTrainingBatch = None,
    seeds: Seeds = None,
    learning_rates: LearningRates = None,
    fast_path: FastPath = "auto",
    no_cache: options.NoCache = False,
    device: options.TrainingDevice = None,
    dtype: options.TrainingDtype = None,
    optimizer: options.TrainingOptimizer = None,
    gradient_checkpointing: options.GradientCheckpointing = False,
    num_workers: options.NumWorkers = None,
    resume: options.ResumeTraining = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Train a model as a file says: your effective batch, in micro-batches that fit the card.

    Example: brim train config.yaml hp.epochs=3 --effective-batch 1024 --lr-scale sqrt -o runs/first
    """
    from brim.settings.train_settings import train_settings
    from brim.settings.training_file import read_training_file
    from brim.training.request import TrainRequest

    if resume and output is None:
        raise RequestError("--resume: say which run with -o DIR")
    flags = {
        "hp.batch_size": batch_size,
        "hp.effective_batch": effective_batch,
        "training.lr_scale": lr_scale,
        "training.scale_betas": scale_betas or None,
        "training.eval_batch_size": eval_batch_size,
        "training.memory_limit": memory_limit,
        "training.margin": margin,
        "training.device": device,
        "training.dtype": dtype,
        "optimizer.name": optimizer,
        "training.gradient_checkpointing": gradient_checkpointing or None,
        "data.num_workers": num_workers,
    }
    changes = _merged(overrides or [], {key: value for key, value in flags.items() if value is not None})
    nested, problems = read_training_file(config, overrides=changes)
    settings = train_settings(nested)
    request = TrainRequest(
        settings=settings,
        fixed=no_auto_batch_size,
        fail_on_oom=fail_on_oom,
        per_rank=per_rank,
        use_cache=not no_cache,
        resume=resume,
        plan=plan,
        file=config,
        seeds=() if seeds is None else _seeds(seeds, first=settings.hp.seed),
        learning_rates=() if learning_rates is None else _numbers("--learning-rates", learning_rates, float),
        fast_path=fast_path,
    )
    if compare_batch is not None:
        _compare(request, compare_batch, json_output=json_output)
        return
    told = [str(problem) for problem in problems]
    result = _run(request, output, told, quiet=json_output)
    _show(result, json_output=json_output)
    if result.failed:
        raise typer.Exit(SOME_FAILED)


def _seeds(text: str, *, first: int) -> tuple[int, ...]:
    from brim.training.seeds.variants import seeds_from

    numbers = _numbers("--seeds", text, int)
    return seeds_from(numbers if "," in text or len(numbers) != 1 else numbers[0], first=first)


def _numbers(flag: str, text: str, kind: Callable[[str], _Value]) -> tuple[_Value, ...]:
    try:
        numbers = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise RequestError(f"{flag} {text}: write numbers, several by commas")
    return numbers


def _merged(overrides: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Settings given as KEY=VALUE and as flags; one given both ways is a `RequestError`."""
    from brim.settings.overrides import parse_overrides

    changes = parse_overrides(overrides)
    for key in flags:
        if key in changes:
            raise RequestError(f"{key}={changes[key]}: a flag says it as well; keep one")
    return {**changes, **flags}


def _run(request: TrainRequest, output: Any, told: list[str], *, quiet: bool) -> TrainResult:
    from brim.cli.train_progress import TrainProgress
    from brim.ranks.world import current_world
    from brim.training.run import run_training
    from brim.training.seeds.run import run_seeds

    train = run_seeds if request.several else run_training
    with TrainProgress(error_console(), quiet=current_world().rank > 0, lines=not quiet) as progress:
        for line in told:
            progress.note(line)
        return train(request, output=output, listener=progress)


def _compare(request: TrainRequest, sizes: str, *, json_output: bool) -> None:
    from brim.cli.train_progress import TrainProgress, print_comparison
    from brim.ranks.world import current_world
    from brim.training.compare import compare_effective_batches, parse_sizes

    if current_world().size > 1:
        raise RequestError("--compare-batch: sizes are compared on one device; start it without torchrun")
    if request.several:
        raise RequestError("--compare-batch: sizes are compared for one seed; leave --seeds and --learning-rates out")
    chosen = parse_sizes(sizes)
    with TrainProgress(error_console(), lines=not json_output) as progress:
        rows = compare_effective_batches(request, chosen, listener=progress)
    if json_output:
        print_document({"schema": "brim.compare/1", "kind": "train", "rows": rows})
        return
    print_comparison(output_console(), rows)


def _show(result: TrainResult, *, json_output: bool) -> None:
    from brim.cli.train_progress import print_result
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if json_output:
        document = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
        print_document(document)
        return
    print_result(output_console(), result)
