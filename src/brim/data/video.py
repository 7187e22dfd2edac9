"""Frames of a video: the only place that imports av (PyAV), on use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.data.base import DataError
from brim.data.containers import declared_bytes
from brim.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["frame_places", "load_video"]


@dataclass(frozen=True, kw_only=True)
class _Clip:
    """What the container holds, counted, against what it claims."""

    packets: int
    seconds: float
    claimed_packets: int  # 0 where it does not say
    claimed_seconds: float
    packet_seconds: float

    @property
    def ends_early(self) -> bool:
        fewer = 0 < self.packets < self.claimed_packets
        return fewer or self.seconds + 1.5 * self.packet_seconds < self.claimed_seconds


def load_video(path: Path, *, frames: int) -> npt.NDArray[np.uint8]:
    """`frames` frames in RGB, evenly spaced over the clip: [frames, height, width, 3].

    The frames are counted, never taken from the container's word; a clip that has fewer repeats them. A clip that was
    cut short or cannot be decoded is a `DataError`.
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
    """Which of `count` frames are taken: the middle of each of `frames` equal parts of the clip."""
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
    """Both signs must agree: a container may lie about its frames, and a file may lack only the index at its end."""
    should_be = declared_bytes(path)
    size = path.stat().st_size
    if should_be is not None and size < should_be and clip.ends_early:
        of_all = f" of {clip.claimed_packets}" if clip.claimed_packets else ""
        raise DataError(
            f"video {path} is cut short: {size} of {should_be} bytes, {clip.packets}{of_all} frames; copy it again"
        )


def _decoded(library: Any, path: Path, places: set[int]) -> tuple[int, dict[int, Any]]:
    """How many frames there are, and those at the places asked for."""
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

    width, height = frames[0].width, frames[0].height  # a stream may change its size on the way
    turns = round(frames[0].rotation / 90) % 4  # counter-clockwise, as a phone held upright notes it
    pictures = {id(frame): frame.to_ndarray(format="rgb24", width=width, height=height) for frame in frames}
    return np.stack([np.rot90(pictures[id(frame)], k=turns) for frame in frames])


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise RequestError(f"videos need PyAV ({error}): pip install av") from error
    return av
