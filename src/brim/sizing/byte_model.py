"""The byte model: peak bytes as a function of size, refitted by every observation.

Probes and forecasts feed it through `observe`; a search asks `largest_within(limit)`. Most workloads are
affine in the size, a pairwise loss or unfused attention is quadratic, and tiled kernels or padded batches
climb in stairs. The model keeps every point and answers from the ones nearest to where it is asked, so a
slope that changes with the size is followed once a point lies beyond the change.

Pure arithmetic: no torch, no device, no clock.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Literal

__all__ = ["ByteModel", "Shape", "Staircase"]

Point = tuple[int, int]
Shape = Literal["unknown", "flat", "affine", "quadratic", "staircase"]
LARGEST_SIZE = 2**30  # no batch is larger


@dataclasses.dataclass(frozen=True)
class Staircase:
    """Bytes that rise by `rise` after every `tread` sizes; the tread is known only as a range."""

    rise: int
    allowed_steps: int  # how many treads fit under the limit
    smallest_tread: int
    largest_tread: int


class ByteModel:
    """Peak bytes as a function of size.

        model = ByteModel(base_bytes=resident)
        model.observe(1, peak_1)
        model.observe(8, peak_8)
        model.largest_within(limit)      # where to probe next

    `base_bytes` is what is resident whatever the size (weights, optimizer state); it only bounds
    how fast the bytes can grow before the curve is known. `noise` is the fraction by which bytes may
    stray from a smooth curve: 0 for a meter that counts exactly, more for a caching allocator. `prior` is a forecast:
    the bytes of any size, never falling, believed until two sizes were seen, and corrected by the first. With
    `most_off`, a first size that shows it to be off by more than this factor is not a correction: it is forgotten.
    """

    def __init__(self, *, base_bytes: int = 0, noise: float = 0.0, prior: Callable[[int], int] | None = None) -> None:
        self.base_bytes = base_bytes
        self.noise = noise
        self.prior = prior
        self.most_off = math.inf
        self._points: dict[int, int] = {}

    def expect(self, prior: Callable[[int], int], *, base_bytes: int, most_off: float = math.inf) -> None:
        """Start from a forecast, as if it had been given from the beginning."""
        self.prior, self.base_bytes, self.most_off = prior, base_bytes, most_off

    def observe(self, size: int, peak_bytes: int) -> None:
        """Take in one measured or traced point; a second measurement of a size keeps the larger figure."""
        self._points[size] = max(peak_bytes, self._points.get(size, 0))

    @property
    def points(self) -> list[Point]:
        """The points seen, by size."""
        return sorted(self._points.items())

    @property
    def shape(self) -> Shape:
        """What the points look like so far."""
        points = self.points
        if len(points) < 2:
            return "unknown"
        if points[0][1] == points[-1][1]:
            return "flat"
        if any(a[1] == b[1] for a, b in itertools.pairwise(points)):
            return "staircase"
        if len(points) < 3:
            return "affine"
        return "quadratic" if self._bends(*points[-3:]) else "affine"

    @property
    def straight(self) -> bool:
        """Whether all points so far lie on one line, to within noise."""
        points = self.points
        if len(points) < 3:
            return True
        (n1, y1), (n2, y2) = points[0], points[-1]
        slope = (y2 - y1) / (n2 - n1)
        return all(abs(y1 + slope * (n - n1) - y) <= 2.0 + self.noise * y for n, y in points)

    def bytes_at(self, size: int) -> int | None:
        """The bytes expected at a size, or None before there is a point."""
        points = self.points
        if size in self._points:
            return self._points[size]
        if self.prior is not None and self._believes_prior():
            return round(self.base_bytes + self.prior_error() * max(self.prior(size) - self.base_bytes, 0))
        if not points:
            return None
        if len(points) == 1:
            (n, y), base = points[0], self.base_bytes
            return round(base + (y - base) * size / n)
        constant, slope, curvature = self._coefficients(near=size)
        return round(max(constant + slope * size + curvature * size * size, 0))

    def largest_within(self, limit: int) -> int | None:
        """The largest size expected to stay within the limit; None when the points are flat or missing."""
        points = self.points
        if self._believes_prior():
            return self._largest_by_prior(limit)
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        size = points[-1][0]
        for _ in range(4):  # the coefficients depend on where they are asked
            constant, slope, curvature = self._coefficients(near=size)
            root = _largest_root(constant - limit, slope, curvature)
            if root is None:
                return None
            size = max(math.floor(root + 1e-9), 0)
            if size <= points[-1][0]:
                break
        return size

    def prior_error(self) -> float:
        """By which factor what grows with the size was more than the prior said, at the largest size seen; 1 unseen."""
        if self.prior is None or not self._points:
            return 1.0
        size, size_bytes = self.points[-1]
        return max(size_bytes - self.base_bytes, 1) / max(self.prior(size) - self.base_bytes, 1)

    def surely_within(self, limit: int) -> int:
        """The largest size that stays within the limit even if all growth seen so far is quadratic.

        For bytes a + b·n + c·n² with no negative coefficient this never overshoots: from one point they
        grow at most with n², from two points at most like the pure quadratic through both.
        """
        points = self.points
        if not points:
            return 0
        (n2, y2) = points[-1]
        if len(points) == 1:
            growth = max(y2 - self.base_bytes, 1)
            room = max(limit - self.base_bytes, 0)
            return math.floor(n2 * math.sqrt(room / growth))
        (n1, y1) = points[0]
        if y2 <= y1:
            return n2
        curvature = (y2 - y1) / (n2 * n2 - n1 * n1)
        return max(math.floor(math.sqrt(max((limit - y1) / curvature + n1 * n1, 0.0)) + 1e-9), 0)

    def proportionally_within(self, limit: int) -> float:
        """The size that the limit allows if bytes grow from what is resident in a line through the largest point."""
        if not self._points:
            return 0.0
        size, size_bytes = self.points[-1]
        return size * max(limit - self.base_bytes, 0) / max(size_bytes - self.base_bytes, 1)

    def staircase(self, limit: int, *, fits_below: int) -> Staircase | None:
        """The stairs through all points, if one rise and a range of treads explain every one of them.

        `fits_below`: the smallest size known not to fit; it narrows the tread.
        """
        points = self.points
        rises = [b[1] - a[1] for a, b in itertools.pairwise(points)]
        rise = math.gcd(*rises) if rises else 0
        if rise <= 0 or self.noise or self.shape != "staircase":
            return None
        first_bytes = points[0][1]
        if points[0][0] != 1:
            return None
        allowed = (limit - first_bytes) // rise + 1  # treads that fit, counted from the first
        smallest, largest = 1, fits_below - 1
        for size, size_bytes in points:
            tread_index = (size_bytes - first_bytes) // rise + 1  # 1-based: (index-1)·tread < size <= index·tread
            smallest = max(smallest, -(-size // tread_index))
            if tread_index > 1:
                largest = min(largest, (size - 1) // (tread_index - 1))
        largest = min(largest, (fits_below - 1) // allowed)
        if allowed < 1 or smallest > largest:
            return None
        return Staircase(rise, allowed, smallest, largest)

    def _believes_prior(self) -> bool:
        """Whether the prior counts: there is one, at most one size was seen, and that one does not refute it."""
        if self.prior is None or len(self._points) > 1:
            return False
        return 1 / self.most_off <= self.prior_error() <= self.most_off

    def _largest_by_prior(self, limit: int) -> int:
        """The largest size within the limit by the corrected prior; 0 when none is.

        To ask a prior takes time, and most are nearly straight: so where a line through both ends meets the limit, and
        every third time in the middle, since some are not.
        """
        low, high = 0, 1
        low_bytes, high_bytes = float(self.base_bytes), float(self.bytes_at(high) or 0)
        while high < LARGEST_SIZE and high_bytes <= limit:
            low, low_bytes, high = high, high_bytes, high * 4
            high_bytes = self.bytes_at(high) or 0
        asked = 0
        while high - low > 1:
            asked += 1
            meets = low + (high - low) * (limit - low_bytes) / max(high_bytes - low_bytes, 1)
            # One beyond where it should fit the second time: the two ends then lie beside each other.
            aim = (low + high) // 2 if asked % 3 == 0 else math.floor(meets) + (asked % 3 == 2)
            middle = min(max(aim, low + 1), high - 1)
            middle_bytes = self.bytes_at(middle) or 0
            if middle_bytes <= limit:
                low, low_bytes = middle, middle_bytes
            else:
                high, high_bytes = middle, middle_bytes
        return low

    def _coefficients(self, *, near: int) -> tuple[float, float, float]:
        """Constant, slope and curvature of the curve around a size, from the points nearest to it."""
        points = sorted(self._distinct_points(), key=lambda point: abs(point[0] - near))[:3]
        points.sort()
        if len(points) < 2:
            return (float(points[0][1]), 0.0, 0.0)
        if len(points) == 3 and self._bends(*points):
            return _quadratic(*points)
        (n1, y1), (n2, y2) = points[-2], points[-1]
        if (
            y2 - y1 <= self.noise * y2
        ):  # a rise that may be noise says nothing of the slope: compare with a point farther off
            n1, y1 = points[0]
        slope = (y2 - y1) / (n2 - n1)
        return y1 - slope * n1, slope, 0.0

    def _bends(self, p1: Point, p2: Point, p3: Point) -> bool:
        """Whether three points bend upwards by more than noise, like a parabola that rises from the start."""
        _, slope, curvature = _quadratic(p1, p2, p3)
        bend = curvature * (p3[0] - p1[0]) ** 2
        rounding = 2.0 + self.noise * p3[1]  # bytes
        return bend > rounding and slope * p3[0] > -rounding

    def _distinct_points(self) -> list[Point]:
        """The points without those that repeat the bytes of a smaller size: a tread says nothing of the rise."""
        distinct: list[Point] = []
        for size, size_bytes in self.points:
            if distinct and size_bytes <= distinct[-1][1]:
                continue
            distinct.append((size, size_bytes))
        return distinct


def _quadratic(p1: Point, p2: Point, p3: Point) -> tuple[float, float, float]:
    """The parabola through three points, as constant, slope and curvature."""
    (x1, y1), (x2, y2), (x3, y3) = p1, p2, p3
    first, second = (y2 - y1) / (x2 - x1), (y3 - y2) / (x3 - x2)
    curvature = (second - first) / (x3 - x1)
    slope = first - curvature * (x1 + x2)
    return y1 - slope * x1 - curvature * x1 * x1, slope, curvature


def _largest_root(constant: float, slope: float, curvature: float) -> float | None:
    """Where constant + slope·n + curvature·n² crosses zero from below."""
    if curvature <= 0:
        return -constant / slope if slope > 0 else None
    discriminant = slope * slope - 4 * curvature * constant
    if discriminant < 0:
        return None
    return (-slope + math.sqrt(discriminant)) / (2 * curvature)
