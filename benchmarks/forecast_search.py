"""How many probes the search for the fastest size takes with a forecast and without, over stored curves.

    python -m benchmarks.forecast_search benchmarks/data/curves-h200.json

Needs no GPU: a probe is a lookup on the curve (bytes and step times in lines between its points; a size from the first
that did not fit on is out of memory). The forecast is the real one for that card, and the same off by a factor.
A second table lays the sizes near the limit beside what the replay of the allocator under that limit says of them.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replay_engines import Look, search

GIB = 2**30
NEAR = 0.85  # of the limit
FACTORS = (None, 1.0, 0.8, 1.25, 0.5, 2.0, 0.25, 4.0)  # None: no forecast


class Curve:
    """The measured points of one workload under a limit."""

    def __init__(self, points: dict[str, Any]) -> None:
        fitting = sorted((int(size), point) for size, point in points.items() if point["verdict"] == "fits")
        self.sizes = [size for size, _ in fitting]
        self.reserved = [point["reserved"] for _, point in fitting]
        self.allocated = [point["allocated"] for _, point in fitting]
        self.seconds = [size / point["rate"] for size, point in fitting]
        self.fails = min(int(size) for size, point in points.items() if point["verdict"] != "fits")
        self.best_rate = max(point["rate"] for _, point in fitting)

    def look(self, size: int) -> Look:
        """What a probe of this size would see."""
        if size >= self.fails:
            return Look(None)
        allocated, reserved = (round(self.at(values, size)) for values in (self.allocated, self.reserved))
        return Look(reserved, self.at(self.seconds, size), allocated)

    def rate(self, size: int) -> float:
        return size / self.at(self.seconds, size)

    def at(self, values: list[float], size: int) -> float:
        place = min(max(bisect.bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        (low, high), (before, after) = self.sizes[place - 1 : place + 1], values[place - 1 : place + 1]
        return before + (after - before) * (size - low) / (high - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, help="a file of stored curves, as benchmarks/find.py fills it")
    parser.add_argument("--workloads", default="", help="only workloads with this in their name")
    arguments = parser.parse_args()
    stored = json.loads(arguments.curves.read_text())
    ((limit, curves),) = stored["curves"].items()
    from benchmarks.forecast_cases import build, case_named
    from brim.settings.sizes import parse_bytes

    environment = stored["environments"][limit]
    results: dict[float | None, list[tuple[int, int, float]]] = {factor: [] for factor in FACTORS}
    under_limit: list[str] = []
    for name, points in curves.items():
        if arguments.workloads not in name:
            continue
        case = case_named(name)
        assert case is not None
        base, model = forecast_of(lambda case=case: build(case, "cpu"), environment)  # type: ignore[misc]
        under_limit.append(_under_limit(name, points, model, parse_bytes(limit)))
        curve = Curve(points)
        for factor in FACTORS:
            forecast = off_by(model, base, factor)
            size, probes, ooms = search("fastest", curve.look, limit=parse_bytes(limit), base=base, forecast=forecast)
            results[factor].append((probes, ooms, curve.rate(size) / curve.best_rate))
    print("| forecast | probes of each workload | mean | out of memory | rate at the choice over the best, lowest |")
    print("|---|---|---|---|---|")
    for factor, rows in results.items():
        made = [probes for probes, _, _ in rows]
        label = "none" if factor is None else "as it is" if factor == 1 else f"what grows × {factor:g}"
        print(
            f"| {label} | {', '.join(map(str, made))} | {sum(made) / len(made):.1f} "
            f"| {sum(ooms for _, ooms, _ in rows)} | {min(rate for *_, rate in rows):.3f} |"
        )
    print("\n| workload | sizes near the limit | right | forecast to run, did not | forecast not to run, did |")
    print("|---|---|---|---|---|")
    print("\n".join(under_limit))


def _under_limit(name: str, points: dict[str, Any], model: Any, limit: int) -> str:
    """A row: whether sizes near the limit ran on the card, and in the replay under that limit."""
    near = {int(size): point for size, point in points.items() if (point["reserved"] or limit) > NEAR * limit}
    ran = {size for size, point in near.items() if point["verdict"] == "fits"}
    said = {size for size in near if model.runs_within(size, limit)}
    wrong = [", ".join(map(str, sorted(sizes))) or "—" for sizes in (said - ran, ran - said)]
    return f"| {name} | {len(near)} | {len(near) - len(said ^ ran)} | {wrong[0]} | {wrong[1]} |"


def forecast_of(build: Callable[[], Any], environment: dict[str, Any]) -> tuple[int, Any]:
    """What is resident before a step of a workload, and the forecast of any size, on the card of a measurement."""
    from brim.forecasting.forecast import Forecaster, TracedWorkload
    from brim.forecasting.gpus import find_gpu
    from brim.forecasting.overheads import version_pair
    from brim.forecasting.shape_tensor import without_initialisation

    with without_initialisation():
        workload = build()
    version = version_pair(environment["packages"]["torch"])
    model = Forecaster(TracedWorkload(workload), find_gpu(environment["gpu"]), torch_version=version).model()
    tensors = [t for module in workload.modules() for t in (*module.parameters(), *module.buffers())]
    return sum(t.numel() * t.element_size() for t in tensors), model


def off_by(model: Any, base: int, factor: float | None) -> Any:
    """The forecast with what grows off by a factor, and every limit with it."""
    from brim.sizing.priors import ForecastCurve

    if factor is None:
        return None
    return ForecastCurve(
        reserved_at=lambda size: round(base + factor * (model.replayed(size).reserved_bytes - base)),
        allocated_at=lambda size: round(base + factor * (model.replayed(size).allocated_bytes - base)),
        runs_within=lambda size, limit: model.runs_within(size, round(base + (limit - base) / factor)),
    )


if __name__ == "__main__":
    main()
