"""`brim demo`: the whole of `brim profile` on a small real model and data that ship with the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli.console import error_console
from brim.cli.profile import run_profile
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.settings.profile_settings import DemoSettings

__all__ = ["demo"]


def demo(settings: DemoSettings) -> bool:
    """Write the model and the boards, print the command that does the same, and profile."""
    from brim.demo.model import CEILING, CROPS, profile_settings, write_boards, write_model
    from brim.profiling.run import check_contents
    from brim.ranks.world import current_world
    from brim.storage.run_lock import locked_folder

    if current_world().size > 1:
        raise RequestError("brim demo runs in one process; for ranks use torchrun -m brim profile")
    console = error_console()
    with locked_folder(settings.output, command="demo", note=console.print) as folder:
        check_contents(folder, resume=settings.resume)  # before the boards of a finished profile are replaced
        boards = write_boards(folder, questions=settings.questions)
        model = write_model(folder)
        text = f"{settings.questions} questions about boards of handwritten digits, in {boards}; the model, in {model}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if settings.only_files:
            return False
        asked = profile_settings(settings, model, boards, folder)
        for line in (
            f"at most {CEILING} in a batch, {settings.memory_limit} of memory; the same as",
            f"  brim profile -m {model} -d {boards} --device cpu \\",
            f"    --knob max_crops={','.join(CROPS)} -b {CEILING} --memory-limit {settings.memory_limit}",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return run_profile(asked)
