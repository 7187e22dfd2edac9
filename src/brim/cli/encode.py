"""`brim encode`: molecules to features, each once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.training.preference.encode_file import EncodedFile

__all__ = ["encode"]

SOME_FAILED = 1
SHOWN = 5

EncoderName = Annotated[
    str, typer.Option("-m", "--model", help="morgan, minimol or unimol.", metavar="ENCODER", show_default=True)
]
SmilesFile = Annotated[
    str, typer.Option("-d", "--data", help="SMILES: .csv or .tsv with a header, .smi or .txt.", metavar="FILE")
]
FeatureFile = Annotated[
    Path, typer.Option("-o", "--output", help="Where the features go: FILE.safetensors.", metavar="FILE")
]
ResumeFlag = Annotated[bool, typer.Option("--resume", help="Go on where a run of the same file stopped.")]
Most = Annotated[int | None, typer.Option("--limit", help="Only the first N molecules.", metavar="N", min=1)]
Column = Annotated[
    list[str] | None,
    typer.Option("--map", help="The column of SMILES, where it is called otherwise.", metavar="smiles=COLUMN"),
]

EncoderKnobs = Annotated[
    list[str] | None,
    typer.Option("--knob", help="A setting of the encoder, repeatable: --knob bits=1024.", metavar="NAME=VALUE"),
]
NoFeatureCache = Annotated[bool, typer.Option("--no-cache", help="Neither use cached features nor keep any.")]


def encode(
    data: SmilesFile,
    output: FeatureFile,
    model: EncoderName = "morgan",
    column: Column = None,
    limit: Most = None,
    knob: EncoderKnobs = None,
    batch_size: options.BatchSize = "auto",
    memory_limit: options.MemoryLimit = None,
    no_cache: NoFeatureCache = False,
    device: options.Device = "auto",
    resume: ResumeFlag = False,
    json_output: options.JsonOutput = False,
) -> None:
    """Encode a file of SMILES: one row of features for every molecule that can be read.

    Example: brim encode -m morgan -d smiles.csv -o features.safetensors --knob bits=1024
    """
    from brim.training.preference.encode_file import EncodeRequest

    mapping = {}
    for flag in column or []:
        name, equals, value = flag.partition("=")
        if name != "smiles" or not equals or not value:
            raise RequestError(f"--map {flag}: write smiles=COLUMN")
        mapping[name] = value
    request = EncodeRequest(
        model=model,
        data=data,
        output=str(output),
        mapping=mapping,
        knobs=options.collect_knobs(knob, None),
        limit=limit,
        batch_size=options.parse_batch_size(batch_size),
        memory_limit=memory_limit,
        device=device,
        use_cache=not no_cache,
        resume=resume,
    )
    result = _run(request)
    _show(result, json_output=json_output)
    if result.failures:
        raise typer.Exit(SOME_FAILED)


def _run(request: Any) -> EncodedFile:
    from rich.progress import Progress

    from brim.training.preference.encode_file import encode_file

    console = error_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(request.model)
        try:
            return encode_file(
                request,
                on_start=lambda total: progress.update(task, total=total),
                on_batch=lambda done: progress.update(task, completed=done),
                on_note=lambda line: console.print(line, markup=False, highlight=False),
            )
        except KeyboardInterrupt:
            if Path(f"{request.output}.partial.jsonl").exists():
                console.print("what is finished is kept: go on with --resume", highlight=False)
            raise


def _show(result: EncodedFile, *, json_output: bool) -> None:
    figures = result.figures
    if json_output:
        document = {
            "schema": "brim.encode/1",
            "output": str(result.path),
            "width": result.width,
            "failures": result.failures,
            **figures.to_json(),
        }
        print_document(document)
        return
    console = output_console()
    rows = figures.molecules - figures.failed
    rate = figures.to_json()["samples_per_second"]
    how = "from the cache" if figures.cached else f"{rate:,.0f} molecules/s" if rate else "all from an earlier run"
    size = figures.to_json()["batch_size_used"]
    batch = f", batch {size}" if size else ""
    console.print(f"{rows:,} molecules × {result.width} features, {how}{batch}", highlight=False)
    for place, why in list(result.failures.items())[:SHOWN]:
        console.print(f"left out: {place}: {why}", markup=False, highlight=False)
    if len(result.failures) > SHOWN:
        console.print(f"… and {len(result.failures) - SHOWN:,} more: --json lists them", highlight=False)
    console.print(f"in {result.path}", markup=False, highlight=False)
