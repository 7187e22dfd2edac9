"""A loss that is no number: which samples gave it, and where to go back to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from brim.errors import BrimError
from brim.ranks.agreement import Agreement, Vote
from brim.training.items import Items
from brim.training.micro_batches import WindowDone
from brim.training.run_files import RunFiles

__all__ = ["refuse_loss"]

MOST_SHOWN = 8  # samples in the message; the file has all


def refuse_loss(
    loss: float, record: Mapping[str, Any], done: WindowDone, items: Items, agreement: Agreement, files: RunFiles
) -> NoReturn:
    """End the run with the samples of the guilty micro-batches of all ranks, and the last good checkpoint.

    Every rank comes here at the same step, since the sums are the same on all.
    """
    guilty = [items.ids[item] for part in done.parts if not math.isfinite(float(part.total)) for item in part.items]
    ids = [name for rank in agreement.gather(Vote(value=guilty)) for name in rank]
    step = record["step"]
    files.write_bad_batch(step=step, epoch=record["epoch"], loss=loss, ids=ids)
    last = files.last_checkpoint()
    kept = f"the last good checkpoint is {last}" if last is not None else "there is no checkpoint yet"
    shown = ", ".join(ids[:MOST_SHOWN]) + (f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else "")
    raise BrimError(
        f"step {step}: the loss is {loss}. The samples with it: {shown} (all in bad_batch.json); {kept}. A smaller "
        "hp.learning_rate, training.gradient_clip or other data may help"
    )
