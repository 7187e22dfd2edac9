"""Frames of a video: the only file that imports av (PyAV), on use.

Decoders do not report a file that was cut short: its frames just end early. So the size that the container declares
(AVI, MP4 and Matroska have it at the front) is compared with the file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from brim.data.base import DataError
from brim.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["declared_bytes", "frame_places", "load_video"]


@dataclass(frozen=True, kw_only=True)
class _Clip:
    """What the container holds, counted, and what its header claims."""

    packets: int
    seconds: float
    claimed_packets: int  # 0 where it is not given
    claimed_seconds: float
    packet_seconds: float

    @property
    def ends_early(self) -> bool:
        fewer = 0 < self.packets < self.claimed_packets
        return fewer or self.seconds + 1.5 * self.packet_seconds < self.claimed_seconds


def load_video(path: Path, *, frames: int) -> npt.NDArray[np.uint8]:
    """`frames` frames in RGB, evenly spaced over the clip: [frames, height, width, 3].

    The frames are counted; the number in the container's header is not trusted. A clip with fewer frames repeats some.
    A clip that was cut short or cannot be decoded is a `DataError`.
    """
    if frames < 1:
        raise RequestError(f"frames={frames}: a clip has at least 1 frame")
    library = _av()
    try:
        clip = _counted(library, path)
        _refuse_cut(path, clip)
        count, found = _decoded(library, path, set(frame_places(clip.packets, frames)))
        if count != clip.packets:  # packets without a frame of their own
            count, found = _decoded(library, path, set(frame_places(count, frames)))
    except library.FFmpegError as error:
        raise DataError(f"video {path} cannot be read: {error.strerror or error}") from error
    except OSError as error:
        raise DataError(f"video {path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise DataError(f"video {path} has no frame that can be decoded")
    return _stacked([found[place] for place in frame_places(count, frames)])


def frame_places(count: int, frames: int) -> list[int]:
    """The indices of the frames to take, of `count`: the middle of each of `frames` equal parts of the clip."""
    return [(2 * step + 1) * count // (2 * frames) for step in range(frames)]


def _counted(library: Any, path: Path) -> _Clip:
    """One pass over the container, without decoding."""
    with library.open(str(path)) as container:
        stream = _video_stream(container, path)
        packets, end = 0, 0.0
        for packet in container.demux():
            packets += packet.stream.index == stream.index and packet.size > 0  # the last packet is an empty one
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        return _Clip(
            packets=packets,
            seconds=end - (container.start_time or 0) / 1e6,
            claimed_packets=stream.frames,
            claimed_seconds=(container.duration or 0) / 1e6,
            packet_seconds=float(1 / stream.average_rate) if stream.average_rate else 1.0,
        )


def _refuse_cut(path: Path, clip: _Clip) -> None:
    """Refuse a clip with too few bytes and too few frames: a header may be wrong, and only an index may be missing."""
    should_be = declared_bytes(path)
    size = path.stat().st_size
    if should_be is not None and size < should_be and clip.ends_early:
        of_all = f" of {clip.claimed_packets}" if clip.claimed_packets else ""
        raise DataError(
            f"video {path} is cut short: {size} of {should_be} bytes, {clip.packets}{of_all} frames; copy it again"
        )


def _decoded(library: Any, path: Path, places: set[int]) -> tuple[int, dict[int, Any]]:
    """The number of frames, and the frames at the given indices."""
    count, found = 0, {}
    with library.open(str(path)) as container:
        for frame in container.decode(_video_stream(container, path)):
            if count in places:
                found[count] = frame
            count += 1
    return count, found


def _video_stream(container: Any, path: Path) -> Any:
    if not container.streams.video:
        raise DataError(f"video {path} has no video stream")
    return container.streams.video[0]


def _stacked(frames: Sequence[Any]) -> npt.NDArray[np.uint8]:
    import numpy as np

    width, height = frames[0].width, frames[0].height  # a stream may change its size
    turns = round(frames[0].rotation / 90) % 4  # counter-clockwise, from the metadata of phones
    arrays = {id(frame): frame.to_ndarray(format="rgb24", width=width, height=height) for frame in frames}
    return np.stack([np.rot90(arrays[id(frame)], k=turns) for frame in frames])


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise RequestError(f"videos need PyAV ({error}): pip install av") from error
    return av


_UNKNOWN_RIFF = (0, 0xFFFFFFFF)  # written by recorders that could not seek back to fill it in
_SEGMENT = b"\x18\x53\x80\x67"
_EBML = b"\x1a\x45\xdf\xa3"


def declared_bytes(path: Path) -> int | None:
    """The least number of bytes that the file should have; None if the container does not record it."""
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
    """The offset at which the last box of an MP4 file ends, which may be beyond the end of the file."""
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
    """The offset at which the segment of a Matroska file ends: its id and size follow the header."""
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
    """A number whose leading zero bits give its length in bytes; all ones mean unknown."""
    first = file.read(1)
    if not first or first == b"\0":
        return None
    count = 9 - first[0].bit_length()
    rest = file.read(count - 1)
    value = int.from_bytes(bytes([first[0] & (0xFF >> count)]) + rest, "big")
    return None if value == (1 << 7 * count) - 1 else value
