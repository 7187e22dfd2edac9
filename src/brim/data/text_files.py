"""Text files as bytes and text: plain or gzip, UTF-8 with or without a byte-order mark."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from brim.errors import RequestError

__all__ = ["BYTE_ORDER_MARK", "decoded", "inner_suffix", "lines_of", "read_content"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def inner_suffix(path: Path) -> str:
    """The suffix that says what a file holds, in lower case: `.jsonl` for `a.jsonl` and for `a.jsonl.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def lines_of(path: Path) -> Iterator[bytes]:
    """The file's lines with their ends. Only LF ends a line: U+2028 inside a text does not."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file):
                if number == 0 and line.startswith(_UTF_16):
                    raise RequestError(f"{path} is UTF-16; save it as UTF-8")
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RequestError(f"{path} is not a whole gzip file ({error}); copy it again") from error
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def read_content(path: Path) -> bytes:
    """The whole file."""
    return b"".join(lines_of(path))


def decoded(content: bytes, path: Path) -> str:
    """The file's text; bytes that are not UTF-8 are a `RequestError` that names the line."""
    try:
        return content.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
