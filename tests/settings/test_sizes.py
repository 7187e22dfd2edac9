"""Byte sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30), ("24G", 24 * 2**30), ("24g", 24 * 2**30), ("24GB", 24 * 10**9), ("24gib", 24 * 2**30),
        ("512MiB", 512 * 2**20), ("512mb", 512 * 10**6), ("1.5k", 1536), ("64KiB", 65536), ("2TiB", 2**41), ("7B", 7),
        ("7b", 7), (" 8 GiB ", 8 * 2**30), ("1e3", 1000), ("1e-3MB", 1000), (12345, 12345),
    ],
)  # fmt: skip
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "24GiBs", "1,5GiB", "nan", "inf", "0x10", "--", "8GiB8"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"memory_limit=.*24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["-1GiB", "0", "0.2", "-0", -5])
def test_nothing_or_less_is_refused(text: str | int) -> None:
    with pytest.raises(RequestError, match="more than zero"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["24", 80, "1.5"])
def test_gibibytes_without_their_unit_are_no_bytes(text: str | int) -> None:
    with pytest.raises(RequestError, match=rf"write the unit, such as {text}GiB"):
        parse_bytes(text)


def test_a_number_too_large_to_hold_is_refused() -> None:
    with pytest.raises(RequestError, match="memory_limit="):
        parse_bytes("1e999")


def test_the_argument_is_named() -> None:
    with pytest.raises(RequestError, match=r"^target_memory='much'"):
        parse_bytes("much", name="target_memory")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "—"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (24 * 2**30, "24.0 GiB"),
        (5 * 2**40, "5.0 TiB"), (-2048, "-2.0 KiB"),
    ],
)  # fmt: skip
def test_bytes_are_written_for_people(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_what_is_written_reads_back_to_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)
