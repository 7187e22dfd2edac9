"""`brim demo`: the whole of `brim profile` on a small real model and data that ship with the package."""

from __future__ import annotations

from typing import Annotated

import typer

from brim.cli import options
from brim.cli.console import error_console
from brim.cli.profile import run_profile

__all__ = ["demo"]

CROPS = ("1", "2", "4", "6", "9", "12")
CEILING = 64
MEMORY_LIMIT = "80MiB"  # the dearest values do not fit 64 boards into it, as on a card that is too small
QUESTIONS = 200
SEED = 1


def demo(
    questions: Annotated[
        int, typer.Option("--questions", help="How many questions about how many boards.", metavar="N", min=8)
    ] = QUESTIONS,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="The memory of a card to pretend.", metavar="SIZE")
    ] = MEMORY_LIMIT,
    resume: options.Resume = False,
    output: options.RunFolder = None,
    json_output: options.JsonOutput = False,
) -> None:
    """Profile the shipped vision-language model over max_crops, on this machine's CPU, under a small memory limit.

    The model reads boards of handwritten digits: small ones only if it is given enough crops. Nothing is downloaded.

    Example: brim demo -o runs/demo
    """
    from brim.demo.digitboard import write_digitboard
    from brim.demo.model import weights_folder
    from brim.errors import RequestError
    from brim.evaluation.request import EvalRequest
    from brim.profiling.request import ProfileRequest
    from brim.ranks.world import current_world
    from brim.settings.sizes import parse_bytes
    from brim.storage.run_lock import locked_folder

    if current_world().size > 1:
        raise RequestError("brim demo runs in one process; for ranks use torchrun -m brim profile")
    if resume and output is None:
        raise RequestError("--resume: say which run with -o DIR")
    parse_bytes(memory_limit)  # refused before the boards are drawn
    with locked_folder(output, command="demo", note=error_console().print) as folder:
        boards = write_digitboard(folder / "boards", questions=questions, seed=SEED)
        console = error_console()
        for line in (
            f"{questions} questions about boards of handwritten digits, in {boards}",
            f"at most {CEILING} in a batch, {memory_limit} of memory; the same as",
            f"  brim profile -m {weights_folder()} -d {boards} --device cpu \\",
            f"    --knob max_crops={','.join(CROPS)} -b {CEILING} --memory-limit {memory_limit}",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        base = EvalRequest(
            model=str(weights_folder()),
            data=str(boards),
            device="cpu",
            batch_size=CEILING,
            memory_limit=memory_limit,
            use_cache=False,
        )
        request = ProfileRequest(base=base, axes={"max_crops": CROPS}, resume=resume)
        run_profile(request, folder, json_output=json_output)
