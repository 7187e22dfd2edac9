"""One run folder for all ranks: rank 0 chooses and locks it, every rank can write it, or all stop with one message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from brim.ranks.agreement import Agreement
from brim.storage.run_folder import check_folder
from brim.storage.run_lock import locked_folder

__all__ = ["shared_folder"]


@contextlib.contextmanager
def shared_folder(
    agreement: Agreement,
    output: Path | None,
    *,
    command: str,
    check: Callable[[Path], None],
    note: Callable[[str], None] | None = None,
) -> Iterator[Path]:
    """The folder of a run of all ranks, which may outlive the agreement; alone it is `locked_folder` with a check.

    `check` is for rank 0, with the lock held: it raises for a folder whose content does not go with the run.
    """
    with contextlib.ExitStack() as stack:
        with agreement.step(str) as step:
            step.value = ""
            if agreement.world.rank == 0:
                chosen = stack.enter_context(locked_folder(output, command=command, note=note))
                check(chosen)
                step.value = str(chosen)
        folder = Path(step.values[0])
        if agreement.world.size > 1:
            with agreement.step(str):
                check_folder(folder)
        yield folder
