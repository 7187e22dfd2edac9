"""Whether a video file is as long as its container says: AVI, MP4 and Matroska name their size at the front.

The decoders do not tell: the frames of a file that was cut short simply end early.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

__all__ = ["declared_bytes"]

_UNKNOWN_RIFF = (0, 0xFFFFFFFF)  # what recorders leave that could not go back to fill it in
_SEGMENT = b"\x18\x53\x80\x67"
_EBML = b"\x1a\x45\xdf\xa3"


def declared_bytes(path: Path) -> int | None:
    """How many bytes the file should have at least; None where it does not say."""
    with path.open("rb") as file:
        head = file.read(12)
        if head[:4] == b"RIFF" and len(head) == 12:
            size = int.from_bytes(head[4:8], "little")
            return None if size in _UNKNOWN_RIFF else size + 8
        if head[4:8] == b"ftyp":
            return _end_of_boxes(file, path.stat().st_size)
        if head[:4] == _EBML:
            return _end_of_segment(file)
    return None


def _end_of_boxes(file: BinaryIO, file_bytes: int) -> int:
    """Where the last box of an MP4 file ends, inside the file or past its end."""
    end = 0
    while end < file_bytes:
        file.seek(end)
        head = file.read(16)
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # a long box: 64 bits follow its name
            size = int.from_bytes(head[8:16], "big")
        if size < 8:  # 0: up to the end of the file
            return max(end, file_bytes) if size == 0 else file_bytes
        end += size
    return end


def _end_of_segment(file: BinaryIO) -> int | None:
    """Where the segment of a Matroska file ends: after the header comes its id, then its size."""
    file.seek(len(_EBML))
    header = _variable_size(file)
    if header is None:
        return None
    file.seek(header, 1)
    if file.read(4) != _SEGMENT:
        return None
    size = _variable_size(file)
    return None if size is None else file.tell() + size


def _variable_size(file: BinaryIO) -> int | None:
    """A number whose leading zero bits say how many bytes it has; all ones mean unknown."""
    first = file.read(1)
    if not first or first == b"\0":
        return None
    count = 9 - first[0].bit_length()
    rest = file.read(count - 1)
    value = int.from_bytes(bytes([first[0] & (0xFF >> count)]) + rest, "big")
    return None if value == (1 << 7 * count) - 1 else value
