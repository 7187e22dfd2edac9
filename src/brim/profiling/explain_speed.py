"""How much each optimisation of an evaluation brings: it is switched off alone, on a short sample.

Every row is measured on the same samples as the first one, which has everything on, and in turns with it; the sizes are
those that a first run settled at, except where the size itself is the question.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from brim.comparing.record import Comparison, kept_comparison
from brim.comparing.rounds import MeasuredRounds, RoundRules
from brim.comparing.sizes import interval_fields, too_short
from brim.errors import RequestError
from brim.evaluation.compare import FEWEST_BATCHES, NotesOnce, measured_setup
from brim.evaluation.setup import EvaluationSetup, open_setup
from brim.evaluation.worker import EvalListener
from brim.models.load import KeptModel
from brim.ranks.world import current_world
from brim.settings.caller import named
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest

__all__ = ["SWITCHES", "explain_point", "explain_speed"]

EXPLAINED_SAMPLES = 256  # at least; more where the size found makes few batches of them
MOST_EXPLAINED_SAMPLES = 4096
USUAL_BATCH_SIZE = 32  # what people choose without measuring
USUAL_NEW_TOKENS = 32
EVERYTHING = "everything on"


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
    _Switch(name="a pool on CUDA", setting="whole batches", off=_with(pool=False),
            where=lambda setup: _on_cuda(setup) and _generates(setup)),
    _Switch(name="CUDA graphs", setting="launched step by step", off=_with(graphs=False),
            where=lambda setup: _on_cuda(setup) and _generates(setup)),
    _Switch(name="scoring beside the device", setting="scored between batches", off=_with(overlap=False)),
)  # fmt: skip


def explain_point(
    request: ProfileRequest, *, output: Path | None = None, listener: EvalListener | None = None
) -> Comparison:
    """The rows at the one point of a profile."""
    knobs = {name: values[0] for name, values in request.axes.items() if values is not None}
    return explain_speed(dataclasses.replace(request.base, knobs=knobs), output=output, listener=listener)


def explain_speed(
    request: EvalRequest,
    *,
    output: Path | None = None,
    listener: EvalListener | None = None,
    rules: RoundRules | None = None,
) -> Comparison:
    """One row for everything on, then one for each thing switched off, and a folder; the model is loaded once."""
    if current_world().size > 1:
        raise RequestError(f"{named('explain_speed')}: it is measured on one device; start it without torchrun")
    watcher = listener or EvalListener()
    quiet = NotesOnce(watcher)
    asked = {**request.to_json(), "explain_speed": True}
    with kept_comparison(output, command="profile --explain-speed", request=asked, note=watcher.note) as draft:
        load = KeptModel()
        settled, setup, short = _settle(request, load, quiet)
        draft.environment = dict(setup.facts().environment)
        switches = [one for one in SWITCHES if one.where is None or one.where(setup)]
        table = _ComparedSwitches(switches, short, rules)
        draft.table, draft.notes = table, quiet.notes
        requests = [settled, *(switch.off(settled) for switch in switches)]
        for turn in table.rounds:
            opened = open_setup(requests[turn.place], data=setup.data, load=load) if turn.place else setup
            rate = measured_setup(requests[turn.place], opened, quiet).summary["samples_per_second"]
            which = f"round {turn.number}" if turn.counts else "warm-up"
            watcher.note(f"{which}, {table.name(turn.place)}: {rate or 0:,.1f} samples/s")
            if rate:
                table.rounds.record(turn, rate)
            else:
                table.rounds.fail(turn)
    return draft.comparison()


def _settle(
    request: EvalRequest, load: KeptModel, listener: EvalListener
) -> tuple[EvalRequest, EvaluationSetup, str | None]:
    """The request at the size that a first run finds, its samples, and why they are too few for a steady rate."""
    may_grow = request.limit is None
    request = dataclasses.replace(request, limit=request.limit or EXPLAINED_SAMPLES, resume=False, use_cache=False)
    setup = open_setup(request, load=load)
    done = measured_setup(request, setup, listener)
    size = done.summary["batch_size_used"] or 1
    settled = request
    pooled = done.plan is not None and done.plan.of_pool
    if not pooled and request.batch_size is None and request.cost_cap is None:
        settled = dataclasses.replace(request, cost_cap=max(round(size * max(setup.costs)), 1))
    wanted = min(FEWEST_BATCHES * math.ceil(size), MOST_EXPLAINED_SAMPLES)
    if may_grow and wanted > len(setup.costs) >= EXPLAINED_SAMPLES:
        settled = dataclasses.replace(settled, limit=wanted)
        setup = open_setup(settled, load=load)
    return settled, setup, too_short(len(setup.costs), math.ceil(size), batches=FEWEST_BATCHES)


class _ComparedSwitches:
    """The table: everything on, and what each optimisation brings."""

    def __init__(self, switches: Sequence[_Switch], short: str | None, rules: RoundRules | None) -> None:
        self.rounds = MeasuredRounds(1 + len(switches), rules=rules)
        self._switches, self._short = switches, short

    def name(self, place: int) -> str:
        """What a place of the table is called while it is measured."""
        return f"without {self._switches[place - 1].name}" if place else EVERYTHING

    def rows(self) -> list[dict[str, Any]]:
        """One row for each; `brings` is how many times as fast it is with the optimisation."""
        return [self._row(place) for place in range(self.rounds.count)]

    def _row(self, place: int) -> dict[str, Any]:
        gain = self.rounds.speed_up(0, over=place) if place else None
        switch = self._switches[place - 1] if place else None
        fields = interval_fields(self.rounds.rate(place), gain, self.rounds.rates(place), because=self._short)
        renamed = {name.replace("speed_up", "brings"): value for name, value in fields.items()}
        failed = "no sample was answered" if place in self.rounds.failed else None
        return {
            "name": EVERYTHING if switch is None else switch.name,
            "setting": "" if switch is None else switch.setting,
            **renamed,
            "note": "" if switch is None else switch.note,
            **({"failed": failed} if failed else {}),
        }

    def recommendation(self) -> dict[str, Any]:
        """What pays for sure, what is slower for sure, and what is not clear."""
        rows = self.rows()[1:]
        clear = [row for row in rows if row["clear"]]
        pays = sorted((row for row in clear if row["brings"] > 1), key=lambda row: -row["brings"])
        costs = [row for row in clear if row["brings"] < 1]
        open_ones = [row["name"] for row in rows if not row["clear"]]
        said = []
        if pays:
            said.append("keep on: " + ", ".join(f"{row['name']} ({row['brings']:.2f}×)" for row in pays))
        said += [f"faster without {row['name']}: {row['setting']} ({1 / row['brings']:.2f}×)" for row in costs]
        if open_ones:
            because = f" ({self._short})" if self._short else ""
            help_ = f"more samples ({named('limit')}) would help"
            said.append(f"not clear{because}: {', '.join(open_ones)}; {help_}")
        return {
            "clear": bool(clear), "text": "; ".join(said), "keep": [row["name"] for row in pays],
            "switch_off": [row["name"] for row in costs], "not_clear": open_ones,
        }  # fmt: skip
