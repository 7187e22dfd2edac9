"""The settings of a search, checked once, however they were given."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from brim.errors import RequestError
from brim.records import Objective
from brim.settings import shared
from brim.settings.caller import given, named, written
from brim.settings.declare import Setting, check_fields
from brim.settings.setting_checks import choice, flag, fraction, number, whole
from brim.settings.shared import BATCH, LARGEST_SIZE

__all__ = ["DEFAULT_MAX_SIZE", "LARGEST_SIZE", "SearchSettings"]

DEFAULT_MAX_SIZE = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What the user asked of a search; the batch-size flags of docs/interface.md, one field each."""

    batch_size: shared.BatchSize = None  # None is auto; a number is a ceiling, or fixed
    fixed: shared.NoAutoBatchSize = False  # exactly `batch_size`
    fail_on_oom: shared.FailOnOom = False  # a fixed size that does not fit is an error, not split
    objective: Annotated[
        Objective,
        Setting(
            help="fastest or largest.", panel=BATCH, metavar="fastest|largest", check=choice("fastest", "largest"),
            python='Literal["fastest", "largest"]',
        ),
    ] = "fastest"  # fmt: skip
    memory_limit_bytes: shared.ByteLimit = None
    margin: shared.Margin = None
    tolerance: Annotated[
        float,
        Setting(
            help="How close to the best rate is fast enough.", panel=BATCH, metavar="FRACTION", check=fraction(),
        ),
    ] = 0.02  # fmt: skip
    max_probes: Annotated[
        int | None,
        Setting(help="Stop after N probes with the best size seen.", panel=BATCH, metavar="N", check=whole(1)),
    ] = None
    probe_timeout_seconds: Annotated[
        float | None,
        Setting(
            name="probe_timeout", help="A probe that takes longer does not fit; a hang needs --isolate.", panel=BATCH,
            metavar="SECONDS", check=number(above=0),
            python_help="Seconds; a probe that takes longer does not fit, and a hang needs isolate.",
        ),
    ] = None  # fmt: skip
    multiple_of: shared.MultipleOf = 1
    power_of_two: shared.PowerOfTwo = False
    max_size: shared.MaxBatchSize = DEFAULT_MAX_SIZE
    use_cache: shared.NoCache = True
    per_rank: Annotated[
        bool,
        Setting(help="Under torchrun, let each rank keep its own training size.", panel=BATCH, check=flag()),
    ] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fixed and self.batch_size is None:
            raise RequestError(f"{named('no_auto_batch_size')} needs {written('batch_size', 'N')}")
        if self.fail_on_oom and not self.fixed:
            raise RequestError(
                f"{named('fail_on_oom')} goes with {named('no_auto_batch_size')} and {written('batch_size', 'N')}"
            )
        if self.power_of_two and self.multiple_of & (self.multiple_of - 1):
            raise RequestError(
                f"{given('multiple_of', self.multiple_of)}: with {named('power_of_two')} it must be a power of two "
                "itself"
            )
