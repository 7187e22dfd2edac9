"""What `brim advise` and `brim.advise` take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named
from brim.settings.declare import Setting, check_fields
from brim.settings.eval_settings import EvalRequest
from brim.settings.setting_checks import names, path, whole

__all__ = ["AdviseSettings"]

BEFORE, TRYING, ROUNDS = "Before a run", "Trying", "Rounds"


def _before(row: object, **changes: object) -> Setting:
    return shared.setting_of(row, panel=BEFORE, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdviseSettings:
    """A run, or the model and data of one that is to come, and what is done with the advice."""

    run: Annotated[
        Path | None,
        Setting(
            help="The folder of a run of eval or train.", argument=True, metavar="RUN", check=path(),
            python="str | os.PathLike[str] | None",
        ),
    ] = None  # fmt: skip
    model: Annotated[
        str | None,
        Setting(
            help="Without RUN: the model that is to be evaluated.",
            flags=("-m", "--model"),
            panel=BEFORE,
            metavar="MODEL",
        ),
    ] = None
    data: Annotated[str | None, _before(shared.Data, positional=False, help="Without RUN: its data.")] = None
    split: Annotated[str | None, _before(shared.Split)] = None
    task: Annotated[str | None, _before(shared.Task)] = None
    max_new_tokens: Annotated[int | None, _before(shared.MaxTokens)] = None
    batch_size: Annotated[int | None, _before(shared.BatchSize)] = None
    gpu: Annotated[str | None, Setting(help="Forecast for this card, such as h100.", panel=BEFORE, metavar="NAME")] = (
        None
    )
    trust_remote_code: Annotated[bool, _before(shared.TrustRemoteCode)] = False
    take: Annotated[
        tuple[str, ...],
        Setting(
            help="Which pieces of advice --apply and --try take, by name (the first; the first three).", panel=TRYING,
            metavar="NAMES", check=names(),
        ),
    ] = ()  # fmt: skip
    try_out: Annotated[
        bool,
        Setting(
            help="Measure the first three on a part of the work, in turns with the run as it was.", flags=("--try",),
            panel=TRYING,
        ),
    ] = False  # fmt: skip
    try_samples: Annotated[
        int, Setting(help="With --try: samples of the part.", panel=TRYING, metavar="N", check=whole(1))
    ] = 256
    repeats: Annotated[
        int, Setting(help="With --try: how often each is measured.", panel=TRYING, metavar="N", check=whole(3))
    ] = 3
    apply: Annotated[
        Path | None,
        Setting(
            help="Write the settings to a file (for eval --settings, for train as its file), and keep the round.",
            panel=ROUNDS, metavar="FILE", check=path(),
        ),
    ] = None  # fmt: skip
    history: Annotated[bool, Setting(help="Show the rounds of RUN and what each brought.", panel=ROUNDS)] = False
    rollback: Annotated[
        Path | None,
        Setting(
            help="Write the settings of the round before the last one.", panel=ROUNDS, metavar="FILE", check=path()
        ),
    ] = None
    against: Annotated[
        Path | None,
        Setting(help="The run that the last round led to.", panel=ROUNDS, metavar="RUN2", check=path()),
    ] = None
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.run is None and (self.model is None or self.data is None):
            raise RequestError(
                f"{named('run')}: name the folder of a run, or give {named('model')} and {named('data')}"
            )
        if self.run is not None and (self.model is not None or self.data is not None):
            raise RequestError(
                f"{named('model')}: the run {self.run} has its own; leave {named('model')} and {named('data')} out"
            )
        if self.run is None:
            for name, value in (("try_out", self.try_out), ("apply", self.apply), ("history", self.history),
                                ("rollback", self.rollback), ("against", self.against)):  # fmt: skip
                if value:
                    raise RequestError(f"{given(name, value)}: it goes with a run's folder; run it first")

    @property
    def request(self) -> EvalRequest:
        """The evaluation that is to come."""
        return EvalRequest(
            model=str(self.model), data=str(self.data), split=self.split, task=self.task,
            max_new_tokens=self.max_new_tokens, batch_size=self.batch_size, trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
