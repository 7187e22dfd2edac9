"""Several batch sizes on the same samples: what each costs and brings, before anyone settles on one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.evaluation.listener import EvalListener
from brim.evaluation.run import run_subject
from brim.evaluation.subject import open_subject
from brim.memory.devices import memory_of
from brim.ranks.world import current_world
from brim.settings.caller import named
from brim.settings.eval_settings import EvalRequest

__all__ = ["compare_batch_sizes"]

SAMPLES = 256  # enough for several batches of the largest size people compare, little enough to wait for
BATCHES = 4  # of the largest size, where that is more


def compare_batch_sizes(
    request: EvalRequest, sizes: Sequence[int], *, listener: EvalListener | None = None
) -> list[dict[str, Any]]:
    """One row per size, in the order given; the speed-up is over the first. The samples are the same for all."""
    if current_world().size > 1:
        raise RequestError(f"{named('compare_batch')}: sizes are compared on one device; start it without torchrun")
    limit = request.limit or max(SAMPLES, BATCHES * max(sizes))
    subject = open_subject(dataclasses.replace(request, limit=limit))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in [sizes[0], *sizes]:  # the first one twice: it warms up what every later one finds warm
            fixed = dataclasses.replace(request, batch_size=size, fixed=True, resume=False, fail_on_oom=False)
            place = Path(folder) / f"{len(rows)}-{size}"
            rows.append({"batch_size": size, **run_subject(fixed, subject, place, listener or EvalListener())})
            subject.task.release()
            memory_of(subject.device).release()
    del rows[0]
    for row in rows:
        row["speed_up"] = row["samples_per_second"] / rows[0]["samples_per_second"]
    return rows
