"""The sizes a search may propose: every whole number, multiples of one, or powers of two, up to a ceiling."""

from __future__ import annotations

import dataclasses

from brim.errors import RequestError
from brim.settings.caller import given

__all__ = ["SizeGrid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeGrid:
    """Allowed sizes from `first` to `last`, walked with `floor` and `up`."""

    last: int
    smallest: int = 1  # below this a step makes no sense (batch norm over one value)
    multiple_of: int = 1
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise RequestError(
                f"no batch size is allowed up to {self.last}: the smallest is {self.first} "
                f"({given('multiple_of', self.multiple_of)}, and the model needs {self.smallest})"
            )

    @property
    def first(self) -> int:
        """The smallest allowed size."""
        first = -(-self.smallest // self.multiple_of) * self.multiple_of
        return 1 << (first - 1).bit_length() if self.power_of_two else first

    def floor(self, size: float) -> int:
        """The largest allowed size that is at most `size`, 0 when there is none."""
        whole = min(int(size), self.last)
        if whole < self.first:
            return 0
        if self.power_of_two:
            return 1 << (whole.bit_length() - 1)
        return whole - whole % self.multiple_of

    def up(self, size: int) -> int:
        """The next allowed size above `size`; it may lie past `last`."""
        if size < self.first:
            return self.first
        if self.power_of_two:
            return 1 << size.bit_length()
        return size - size % self.multiple_of + self.multiple_of

    def between(self, size: float, low: int, high: int) -> int:
        """The allowed size nearest below `size` that lies strictly between `low` and `high`."""
        size = self.floor(min(size, high - 1))
        return size if size > low else self.up(low)
