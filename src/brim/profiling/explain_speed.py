"""How much each optimisation of an evaluation brings: it is switched off alone, on a short sample.

Every row is a run of the same samples as the first one, which has everything on; the sizes are those that the first one
settled at, except where the size itself is the question.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.evaluation.run import run_setup
from brim.evaluation.setup import EvaluationSetup, open_setup
from brim.evaluation.worker import EvalListener
from brim.memory.devices import memory_of
from brim.models.load import KeptModel
from brim.ranks.world import current_world
from brim.settings.caller import named
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest

__all__ = ["SpeedRow", "explain_point", "explain_speed"]

EXPLAINED_SAMPLES = 256
USUAL_BATCH_SIZE = 32  # what people choose without measuring
USUAL_NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One run: what was switched off, and how fast it was without it."""

    name: str  # of what was switched off; "everything on" for the first row
    setting: str  # how it ran instead
    samples_per_second: float
    brings: float | None  # how many times faster it is with it; None for the first row
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Switch:
    name: str
    setting: str
    off: Callable[[EvalRequest], EvalRequest]
    where: Callable[[EvaluationSetup], bool] | None = None  # None: everywhere
    note: str = ""


def _with(**changes: Any) -> Callable[[EvalRequest], EvalRequest]:
    return lambda request: dataclasses.replace(request, **changes)


def _generates(setup: EvaluationSetup) -> bool:
    return setup.task.unit == "tokens"


def _on_cuda(setup: EvaluationSetup) -> bool:
    return setup.device.type == "cuda"


def _more_tokens(request: EvalRequest) -> EvalRequest:
    knobs = {name: value for name, value in request.knobs.items() if name != "max_new_tokens"}
    return dataclasses.replace(request, max_new_tokens=USUAL_NEW_TOKENS, knobs=knobs)


SWITCHES = (
    _Switch(name="the planned batch size", setting=f"batches of {USUAL_BATCH_SIZE}",
            off=_with(batch_size=USUAL_BATCH_SIZE, fixed=True, cost_cap=None)),
    _Switch(name="batching at all", setting="one sample at a time", off=_with(batch_size=1, fixed=True, cost_cap=None)),
    _Switch(name="loading processes", setting="--num-workers 0", off=_with(num_workers=0)),
    _Switch(name="pinned memory", setting="--no-pin-memory", off=_with(pin_memory=False), where=_on_cuda),
    _Switch(name="non-blocking copies", setting="copies that wait", off=_with(non_blocking=False), where=_on_cuda),
    _Switch(name="fewer new tokens", setting=f"up to {USUAL_NEW_TOKENS}", off=_more_tokens, where=_generates,
            note="answers that end by themselves gain little"),
    _Switch(name="generation set up once", setting="transformers' generate", off=_with(decode_loop=False),
            where=_generates),
    _Switch(name="CUDA graphs", setting="launched step by step", off=_with(graphs=False),
            where=lambda setup: _on_cuda(setup) and _generates(setup)),
    _Switch(name="scoring beside the device", setting="scored between batches", off=_with(overlap=False)),
)  # fmt: skip


def explain_point(request: ProfileRequest, *, listener: EvalListener | None = None) -> list[SpeedRow]:
    """The rows at the one point of a profile."""
    knobs = {name: values[0] for name, values in request.axes.items() if values is not None}
    return explain_speed(dataclasses.replace(request.base, knobs=knobs), listener=listener)


def explain_speed(request: EvalRequest, *, listener: EvalListener | None = None) -> list[SpeedRow]:
    """One row for everything on, then one for each thing switched off; the model is loaded once."""
    if current_world().size > 1:
        raise RequestError(f"{named('explain_speed')}: it is measured on one device; start it without torchrun")
    listener = listener or EvalListener()
    request = dataclasses.replace(request, limit=request.limit or EXPLAINED_SAMPLES, resume=False, use_cache=False)
    load = KeptModel()
    setup = open_setup(request, load=load)
    with tempfile.TemporaryDirectory() as folder:
        found = _run(request, setup, Path(folder), listener)  # finds the size, and warms up what others find warm
        settled = request
        if request.batch_size is None and request.cost_cap is None:
            settled = dataclasses.replace(request, cost_cap=max(found["cap"], 1))
        base = _run(settled, setup, Path(folder), listener)["rate"]
        rows = [SpeedRow(name="everything on", setting="", samples_per_second=base, brings=None)]
        for switch in SWITCHES:
            if switch.where is not None and not switch.where(setup):
                continue
            listener.note(f"without {switch.name}: {switch.setting}")
            without = switch.off(settled)
            opened = open_setup(without, data=setup.data, load=load)
            rate = _run(without, opened, Path(folder), listener)["rate"]
            rows.append(
                SpeedRow(
                    name=switch.name,
                    setting=switch.setting,
                    samples_per_second=rate,
                    brings=base / rate if rate else None,
                    note=switch.note,
                )
            )
    return rows


def _run(request: EvalRequest, setup: EvaluationSetup, folder: Path, listener: EvalListener) -> dict[str, Any]:
    summary = run_setup(request, setup, folder, listener)
    setup.task.release()
    memory_of(setup.device).release()
    rate = summary["samples_per_second"] or 0.0
    return {"rate": rate, "cap": round((summary["batch_size_used"] or 1) * max(setup.costs))}
