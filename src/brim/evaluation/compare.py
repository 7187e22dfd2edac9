"""`brim eval --compare-batch`: the same samples at several batch sizes, in turns, with the model loaded once."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.comparing.record import Comparison, kept_comparison
from brim.comparing.rounds import RoundRules
from brim.comparing.sizes import ComparedSizes, measure_sizes, too_short
from brim.errors import RequestError
from brim.evaluation.run import SetupRun, run_setup
from brim.evaluation.setup import EvaluationSetup, open_setup
from brim.evaluation.worker import EvalListener
from brim.memory.devices import memory_of
from brim.ranks.world import current_world
from brim.settings.caller import named
from brim.settings.eval_settings import EvalRequest

__all__ = ["FEWEST_BATCHES", "NotesOnce", "compare_batch_sizes", "measured_setup"]

COMPARED_SAMPLES = 256  # of a comparison: several batches of the largest size, but not long to wait for
FEWEST_BATCHES = 4  # of a size, for a steady rate; also of the largest one, where that is more samples


def compare_batch_sizes(
    request: EvalRequest,
    sizes: Sequence[int],
    *,
    output: Path | None = None,
    listener: EvalListener | None = None,
    rules: RoundRules | None = None,
) -> Comparison:
    """One row per size, in the order given, and the run's folder; the speed-up is over the first that ran."""
    if current_world().size > 1:
        raise RequestError(f"{named('compare_batch')}: sizes are compared on one device; start it without torchrun")
    watcher = listener or EvalListener()
    quiet = NotesOnce(watcher)
    asked = {**request.to_json(), "compare_batch": list(sizes)}
    with kept_comparison(output, command="eval --compare-batch", request=asked, note=watcher.note) as draft:
        limit = request.limit or max(COMPARED_SAMPLES, FEWEST_BATCHES * max(sizes))
        setup = open_setup(dataclasses.replace(request, limit=limit))
        draft.environment = dict(setup.facts().environment)
        table = ComparedSizes(sizes, rules=rules, more_samples=f"more samples ({named('limit')})")
        draft.table, draft.notes = table, quiet.notes

        def measure(size: int, first: bool) -> dict[str, Any]:
            del first
            fixed = dataclasses.replace(request, batch_size=size, fixed=True, resume=False, fail_on_oom=False)
            summary = measured_setup(fixed, setup, quiet).summary
            return {**summary, "failed": _failure(summary, size), "too_short": _too_short(summary, size)}

        measure_sizes(table, measure, watcher.note)
    return draft.comparison()


def measured_setup(request: EvalRequest, setup: EvaluationSetup, listener: EvalListener) -> SetupRun:
    """One run of a loaded setup, whose memory is given back afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_setup(request, setup, Path(folder), listener)
    setup.task.release()
    memory_of(setup.device).release()
    return done


def _failure(summary: dict[str, Any], size: int) -> str | None:
    """Why these figures are not those of the size: it was split to fit, or no sample was answered."""
    if summary["num_failed"] == summary["num_samples"]:
        return "no sample was answered"
    if summary["oom_events"]:
        largest = (summary["batch_sizes"] or {}).get("largest")
        return f"does not fit: out of memory at {size}, batches of at most {largest} ran"
    return None


def _too_short(summary: dict[str, Any], size: int) -> str | None:
    return too_short(summary["num_samples"], size, batches=FEWEST_BATCHES)


class NotesOnce(EvalListener):
    """Forwards each note once, but no progress: a comparison runs the same samples again and again."""

    def __init__(self, other: EvalListener) -> None:
        self.notes: list[str] = []  # of the runs
        self._other = other

    def note(self, line: str) -> None:
        """Forward a note that is new."""
        if line not in self.notes:
            self.notes.append(line)
            self._other.note(line)
