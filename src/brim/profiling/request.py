"""A profile as it was asked for, in plain values; and the rules of thumb it starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from brim.errors import RequestError
from brim.evaluation.request import EvalRequest
from brim.settings.knob_points import Pairing, Sampling, parse_values
from brim.settings.sizes import parse_bytes

__all__ = ["SEED_SCALE", "Order", "ProfileRequest", "ScaleStep", "parse_axes", "parse_scale", "scale_for"]

Order = Literal["given", "ascending", "descending"]
ScaleStep = tuple[float, float]  # up to this value of the knob, this part of the ceiling

# The rule that people with Molmo on an 80 GB card go by: a first guess where nothing better is known.
SEED_SCALE: tuple[ScaleStep, ...] = ((4, 1.0), (8, 0.75), (12, 0.5), (float("inf"), 0.4))
LATENCY_SAMPLES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What `brim profile` and `brim.profile_knob` take: an evaluation, and the knobs to vary.

    `axes` has a list of values for each knob, or None for its whole range. `batch_size_for` names points by some of
    their knob values.
    """

    base: EvalRequest
    axes: Mapping[str, Sequence[Any] | None]
    pairing: Pairing = "cross"
    sample: Sampling | None = None
    num_points: int | None = None
    start_from: str | None = None
    order: Order = "given"
    initial_scale: tuple[ScaleStep, ...] = SEED_SCALE
    batch_size_for: tuple[tuple[Mapping[str, str], int], ...] = ()
    latency_samples: int = LATENCY_SAMPLES
    within: float = 0.01
    target_latency_ms: float | None = None
    target_memory: int | str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.axes:
            raise RequestError("--knob is missing: name the knob to profile, such as --knob max_crops")
        if self.order not in get_args(Order):
            raise RequestError(f"--order {self.order}: it must be one of {', '.join(get_args(Order))}")
        if (self.sample is None) != (self.num_points is None):
            raise RequestError("--sample and --num-points go together: --sample lhs --num-points 20")
        if self.sample is not None and self.pairing == "zip":
            raise RequestError("--sample draws from all combinations: leave --pairing zip out")
        if self.start_from is not None and len(self.axes) > 1:
            raise RequestError("--start-from: with several knobs, give the values themselves: --knob max_crops=12,13")
        if not 0 <= self.within < 1:
            raise RequestError(f"--within {self.within:g}: give a fraction from 0 to below 1; 0.01 is 1 %")
        if self.latency_samples < 0:
            raise RequestError(f"--latency-samples {self.latency_samples}: it must be 0 (not at all) or more")
        if self.target_latency_ms is not None and not self.target_latency_ms > 0:
            raise RequestError(f"--target-latency-ms {self.target_latency_ms:g}: it must be above 0")
        _ = self.target_memory_bytes  # a size that cannot be read is refused before anything runs
        if self.batch_size_for and self.base.cost_cap is not None:
            raise RequestError("--batch-size-for counts samples: it cannot go with --cost-cap")
        for _, size in self.batch_size_for:
            if size < 1:
                raise RequestError(f"--batch-size-for …={size}: the size must be a whole number from 1")

    @property
    def target_memory_bytes(self) -> int | None:
        """The bound on memory in bytes."""
        return None if self.target_memory is None else parse_bytes(self.target_memory, argument="--target-memory")

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["base"] = self.base.to_json()
        fields["axes"] = {name: None if values is None else list(values) for name, values in self.axes.items()}
        fields["initial_scale"] = [
            [None if up_to == float("inf") else up_to, scale] for up_to, scale in self.initial_scale
        ]
        fields["batch_size_for"] = [{"point": dict(point), "batch_size": size} for point, size in self.batch_size_for]
        return fields


def parse_axes(flags: Sequence[str], values: str | None) -> dict[str, tuple[str, ...] | None]:
    """`["max_crops=2-13", "max_new_tokens=8,16"]` as lists; a bare name has its whole range, or those of --values."""
    axes: dict[str, tuple[str, ...] | None] = {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        name = name.strip()
        if not name or (equals and not text.strip()):
            raise RequestError(f"--knob {flag}: write NAME for the whole range, or NAME=2-13, or NAME=8,16")
        if name in axes:
            raise RequestError(f"--knob {name} is given twice; put its values into one list")
        axes[name] = parse_values(text, flag=f"--knob {name}") if equals else None
    if values is None:
        return axes
    bare = [name for name, listed in axes.items() if listed is None]
    if len(bare) != 1 or len(axes) != 1:
        raise RequestError(f"--values {values}: it goes with one --knob NAME; for several write --knob NAME=2-13 each")
    return {bare[0]: parse_values(values)}


def parse_scale(text: str) -> tuple[ScaleStep, ...]:
    """`4=1,8=0.75,12=0.5,0.4` as steps: up to 4 the whole ceiling, and so on; the last one holds for all above."""
    steps: list[ScaleStep] = []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for place, part in enumerate(parts):
        up_to, equals, scale = part.rpartition("=")
        try:
            step = (float(up_to) if equals else float("inf"), float(scale))
        except ValueError:
            raise RequestError(f"--initial-scale {text}: {part} is not VALUE=FRACTION") from None
        if not 0 < step[1] <= 1 or (not equals and place < len(parts) - 1) or (steps and step[0] <= steps[-1][0]):
            raise RequestError(
                f"--initial-scale {text}: write rising values with fractions up to 1, such as 4=1,8=0.75,12=0.5,0.4"
            )
        steps.append(step)
    if not steps:
        raise RequestError("--initial-scale: it is empty; write for instance 4=1,8=0.75,12=0.5,0.4")
    return tuple(steps)


def scale_for(steps: Sequence[ScaleStep], value: Any) -> float:
    """The part of the ceiling to begin with at a value; 1 for values that are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 1.0
    return next((scale for up_to, scale in steps if value <= up_to), steps[-1][1])
