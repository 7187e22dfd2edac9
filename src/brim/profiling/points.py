"""Which points a profile visits: the values of every knob checked against the model, combined and put in order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from brim.errors import RequestError, nearest_names
from brim.models.build import model_knobs, parse_knobs, resolve_model
from brim.models.placement import DTYPES
from brim.settings.caller import given, named, pair, written
from brim.settings.profile_settings import Pairing, ProfileRequest, Sampling, ScaleStep
from brim.workloads.knobs import Knob

__all__ = [
    "Point", "make_points", "plan_points", "point_folder", "point_label", "sample_points", "scale_for", "start_from",
    "whole_range",
]  # fmt: skip

Point = dict[str, Any]

MOST_IN_A_RANGE = 16  # values of a whole range one by one; of a wider one a few, ever farther apart
SPREAD = 8
MOST_POINTS = 10_000


def plan_points(request: ProfileRequest) -> list[Point]:
    """Every point in the order of the run; whatever the model does not take is a `RequestError` now."""
    _check_new_tokens(request)
    lists = {name: _values(request, name, values) for name, values in request.axes.items()}
    if request.start_from is not None:
        (name,) = lists
        lists[name] = start_from(lists[name], _first(request, name, lists[name]))
    count = math.prod(len(values) for values in lists.values()) if request.pairing == "cross" else 0
    if count > MOST_POINTS:
        raise RequestError(
            f"{named('knob')}: {count:,} combinations; {MOST_POINTS:,} at most. Draw some with "
            f"{written('sample', 'lhs')} {written('num_points', '50')}"
        )
    if request.sample is not None and request.num_points is not None:
        points = sample_points(lists, request.num_points, strategy=request.sample, seed=request.base.seed)
    else:
        points = make_points(lists, pairing=request.pairing)
    for place, size in request.batch_size_for:
        if not any(matches(point, place) for point in points):
            values = ",".join(f"{name}={value}" if name else value for name, value in place.items())
            raise RequestError(
                f"{written('batch_size_for', f'{values}={size}')}: no point of this profile has {values}"
            )
    if request.order == "given":
        return points
    points = sorted(points, key=lambda point: tuple(_sortable(value) for value in point.values()))
    return points if request.order == "ascending" else points[::-1]


def start_from(values: Sequence[Any], first: Any) -> tuple[Any, ...]:
    """The values from this one on; one above all of them is a `RequestError`."""
    kept = tuple(value for value in values if value >= first)
    if not kept:
        raise RequestError(f"{given('start_from', first)}: it is above every value ({', '.join(map(str, values))})")
    return kept


def make_points(lists: Mapping[str, Sequence[Any]], *, pairing: Pairing = "cross") -> list[Point]:
    """Every combination, or the n-th of each list with the n-th of the others."""
    if pairing not in get_args(Pairing):
        raise RequestError(f"{given('pairing', pairing)}: it must be one of {', '.join(get_args(Pairing))}")
    names = list(lists)
    if pairing == "cross":
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*lists.values())]
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise RequestError(
            f"{given('pairing', 'zip')}: the lists differ in length ({counts}); give as many values of each, or cross"
        )
    return [dict(zip(names, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def sample_points(lists: Mapping[str, Sequence[Any]], count: int, *, strategy: Sampling, seed: int = 0) -> list[Point]:
    """So many points of the whole space, the same ones every time.

    `boundary` takes the corners, the middle, then spreads; `lhs` uses every value of every knob about equally often
    (Latin hypercube); `stratified` cuts the space, in its order, into parts of equal size and takes one point of each.
    """
    if strategy not in get_args(Sampling):
        raise RequestError(f"{given('sample', strategy)}: it must be one of {', '.join(get_args(Sampling))}")
    if count < 1:
        raise RequestError(f"{given('num_points', count)}: it must be at least 1")
    whole = make_points(lists)
    if count >= len(whole):
        return whole
    draw = random.Random(seed)
    if strategy == "stratified":
        return _stratified(whole, count, draw)
    chosen = _corners(lists) if strategy == "boundary" else []
    return _unique([*chosen, *_latin(lists, count, draw), *draw.sample(whole, len(whole))])[:count]


def _stratified(whole: Sequence[Point], count: int, draw: random.Random) -> list[Point]:
    edges = [len(whole) * part // count for part in range(count + 1)]
    return [whole[draw.randrange(low, high)] for low, high in itertools.pairwise(edges)]


def _corners(lists: Mapping[str, Sequence[Any]]) -> list[Point]:
    ends = {name: (values[0], values[-1]) for name, values in lists.items()}
    middle = {name: values[len(values) // 2] for name, values in lists.items()}
    return [*make_points(ends), middle]


def _latin(lists: Mapping[str, Sequence[Any]], count: int, draw: random.Random) -> list[Point]:
    columns: dict[str, list[Any]] = {}
    for name, values in lists.items():
        column = [values[place * len(values) // count] for place in range(count)]
        draw.shuffle(column)
        columns[name] = column
    return [{name: column[place] for name, column in columns.items()} for place in range(count)]


def _unique(points: Sequence[Point]) -> list[Point]:
    return list({tuple(point.items()): point for point in points}.values())


def matches(point: Mapping[str, Any], named: Mapping[str, str]) -> bool:
    """Whether a point has these values; the knob of a profile of one may be left unnamed."""
    return all(
        str(point[name] if name else next(iter(point.values()))) == value if not name or name in point else False
        for name, value in named.items()
    )


def point_label(point: Mapping[str, Any]) -> str:
    """`max_crops=12`, or several of them with commas."""
    return ", ".join(f"{name}={value}" for name, value in point.items())


def point_folder(point: Mapping[str, Any]) -> str:
    """A point as the name of a folder."""
    text = "_".join(f"{name}={value}" for name, value in point.items())
    return "".join(sign if sign.isalnum() or sign in "=-._" else "-" for sign in text)


def whole_range(knob: Knob) -> tuple[Any, ...]:
    """Every value from the smallest to the largest (or the default, if there is no largest); of many a few."""
    if isinstance(knob.default, bool):
        return (False, True)
    if not isinstance(knob.default, int) or knob.minimum is None:
        raise RequestError(
            f"{given('knob', knob.name)}: it has no range; give its values, such as "
            f"{written('knob', f'{knob.name}=a,b')}"
        )
    step = knob.multiple_of
    low = -(-max(knob.minimum, 1 if knob.minimum != 0 else 0) // step) * step
    high = max(knob.maximum if knob.maximum is not None else knob.default, low)
    if (high - low) // step < MOST_IN_A_RANGE:
        return tuple(range(low, high + 1, step))
    first = max(low, step)
    spread = [first * (high / first) ** (place / (SPREAD - 1)) for place in range(SPREAD)]
    return tuple(sorted({min(max(round(value / step) * step, low), high // step * step) for value in spread}))


def _values(request: ProfileRequest, name: str, values: Sequence[Any] | None) -> tuple[Any, ...]:
    """The values of one knob, parsed as the model takes them."""
    if name == "dtype":
        return _dtypes(values)
    base = request.base
    if values is None:
        known = model_knobs(base.model, trust_remote_code=base.trust_remote_code)
        knob = next((knob for knob in known if knob.name == name), None)
        if knob is None:
            names = [knob.name for knob in known]
            has = f"it has {', '.join(names)}" if names else "it has none"
            owner = resolve_model(base.model)
            raise RequestError(f"{given('knob', name)}: {owner} has no such knob ({has}){nearest_names(name, names)}")
        return whole_range(knob)
    if not values:
        raise RequestError(
            f"{given('knob', name)}: its list of values is empty; give some, such as {written('knob', f'{name}=2-13')}"
        )
    fixed = {other: value for other, value in base.knobs.items() if other not in ("max_new_tokens", "dtype")}
    parsed = parse_knobs(
        base.model, [{**fixed, name: value} for value in values], trust_remote_code=base.trust_remote_code
    )
    return tuple(one[name] for one in parsed)


def _check_new_tokens(request: ProfileRequest) -> None:
    """`--max-tokens` holds at every point, so more than the model has positions for is refused before the first."""
    base = request.base
    if base.max_new_tokens is None or "max_new_tokens" in request.axes:
        return
    known = model_knobs(base.model, trust_remote_code=base.trust_remote_code)
    knob = next((knob for knob in known if knob.name == "max_new_tokens"), None)
    if knob is not None and knob.maximum is not None and base.max_new_tokens > knob.maximum:
        raise RequestError(
            f"{given('max_tokens', base.max_new_tokens)}: {resolve_model(base.model)} has {knob.maximum} positions; "
            f"use fewer than {knob.maximum}, less the tokens of a prompt"
        )


def _dtypes(values: Sequence[Any] | None) -> tuple[str, ...]:
    if values is None:
        return tuple(DTYPES)
    for value in values:
        if value not in DTYPES:
            raise RequestError(f"{pair('knob', 'dtype', value)}: it must be one of {', '.join(DTYPES)}")
    return tuple(values)


def _first(request: ProfileRequest, name: str, values: Sequence[Any]) -> Any:
    """`--start-from` in the type of the values."""
    kind = type(values[0])
    try:
        return kind(request.start_from)
    except (TypeError, ValueError):
        raise RequestError(f"{given('start_from', request.start_from)}: {name} takes {kind.__name__} values") from None


def _sortable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def scale_for(steps: Sequence[ScaleStep], value: Any) -> float:
    """The part of the ceiling to begin with at a value; 1 for values that are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 1.0
    return next((scale for up_to, scale in steps if value <= up_to), steps[-1][1])
