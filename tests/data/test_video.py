from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from brim.data import video
from brim.data.base import DataError
from brim.data.video import declared_bytes, frame_places, load_video
from brim.errors import RequestError
from tests.data.media_files import cut, write_video

SHADES = range(0, 240, 8)  # 30 frames


def shades_of(frames: np.ndarray) -> list[int]:
    """The shade of each frame, to the nearest that was written."""
    return [round(float(frame.mean()) / 8) * 8 for frame in frames]


@pytest.mark.parametrize("name", ["clip.avi", "clip.mp4", "clip.mkv"])
def test_frames_are_evenly_spaced_over_the_clip(tmp_path: Path, name: str) -> None:
    frames = load_video(write_video(tmp_path / name, SHADES), frames=5)
    assert (frames.shape, frames.dtype) == ((5, 48, 64, 3), np.uint8)
    assert shades_of(frames) == [SHADES[place] for place in (3, 9, 15, 21, 27)]


def test_all_frames_come_in_order(tmp_path: Path) -> None:
    frames = load_video(write_video(tmp_path / "clip.avi", SHADES, codec="mjpeg"), frames=30)
    assert shades_of(frames) == list(SHADES)


def test_a_short_clip_repeats_its_frames(tmp_path: Path) -> None:
    frames = load_video(write_video(tmp_path / "clip.avi", [0, 80, 160]), frames=6)
    assert shades_of(frames) == [0, 0, 80, 80, 160, 160]
    frames = load_video(write_video(tmp_path / "one.avi", [80]), frames=4)
    assert shades_of(frames) == [80] * 4


@pytest.mark.parametrize(("count", "frames"), [(1, 1), (1, 8), (7, 3), (8, 8), (3, 8), (1000, 16)])
def test_frame_indices_are_in_range_and_sorted(count: int, frames: int) -> None:
    places = frame_places(count, frames)
    assert len(places) == frames
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] < count


@pytest.mark.parametrize("claimed", [1, 300])
def test_the_frame_count_of_the_header_is_not_trusted(tmp_path: Path, claimed: int) -> None:
    path = write_video(tmp_path / "clip.avi", SHADES)
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"avih", 8 + 16), (b"strh", 8 + 32)):  # the numbers of frames in the two headers
        place = content.index(mark) + offset
        assert int.from_bytes(content[place : place + 4], "little") == 30
        content[place : place + 4] = claimed.to_bytes(4, "little")
    path.write_bytes(content)
    assert shades_of(load_video(path, frames=3)) == [SHADES[place] for place in (5, 15, 25)]


def test_packets_without_a_frame_do_not_shift_the_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "clip.avi", SHADES)
    counted = video._counted
    monkeypatch.setattr(video, "_counted", lambda *given: replace(counted(*given), packets=40))
    assert shades_of(load_video(path, frames=3)) == [SHADES[place] for place in (5, 15, 25)]


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.3, 0.05])
def test_a_truncated_avi_is_refused(tmp_path: Path, codec: str, share: float) -> None:
    path = cut(write_video(tmp_path / "clip.avi", SHADES, codec=codec), share)
    with pytest.raises(DataError, match=r"video .*clip.avi (is cut short|cannot be read|has no frame)"):
        load_video(path, frames=4)


def test_a_cut_between_two_frames_is_detected(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.avi", SHADES, codec="mjpeg")
    content = path.read_bytes()
    first = content.index(b"movi")
    starts = [place for place in range(first, len(content)) if content[place : place + 4] == b"00dc"]
    path.write_bytes(content[: starts[20]])
    with pytest.raises(DataError, match=rf"is cut short: {starts[20]} of {len(content)} bytes, 20 of 30 frames"):
        load_video(path, frames=4)


@pytest.mark.parametrize(("name", "options"), [("clip.mkv", {}), ("clip.mp4", {"movflags": "faststart"})])
def test_other_truncated_containers_are_refused(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    path = cut(write_video(tmp_path / name, SHADES, options=options), 0.6)
    with pytest.raises(DataError, match=rf"{name} is cut short"):
        load_video(path, frames=4)


def test_a_file_that_lacks_only_its_index_is_read(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.avi", SHADES)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"idx1")])
    assert shades_of(load_video(path, frames=3)) == [SHADES[place] for place in (5, 15, 25)]


def test_a_file_that_is_not_a_video_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "junk.avi").write_bytes(b"no video at all" * 99)
    (tmp_path / "empty.mp4").touch()
    for name in ("junk.avi", "empty.mp4", "gone.avi"):
        with pytest.raises(DataError, match=f"video .*{name} cannot be read: "):
            load_video(tmp_path / name, frames=4)


def test_a_file_with_audio_only_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
    with pytest.raises(DataError, match=r"sound.mkv has no video stream"):
        load_video(path, frames=4)


def test_rotation_metadata_is_applied(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", SHADES)
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4 + 40  # the matrix of the picture on the screen
    turned = [0, 0x10000, 0, -0x10000, 0, 0, 48 << 16, 0, 0x40000000]
    content[place : place + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in turned)
    path.write_bytes(content)
    assert load_video(path, frames=2).shape == (2, 64, 48, 3)


def test_zero_frames_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="frames=0"):
        load_video(tmp_path / "clip.avi", frames=0)


@pytest.mark.parametrize("name", ["clip.avi", "clip.mp4", "clip.mkv"])
def test_the_declared_size_is_the_files_own_until_it_is_cut(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, SHADES)
    size = path.stat().st_size
    assert declared_bytes(path) == size
    declared = declared_bytes(cut(path, 0.7))
    assert declared is not None
    assert path.stat().st_size < declared <= size


def test_a_box_of_an_mp4_file_may_have_a_64_bit_size(tmp_path: Path) -> None:
    front = (16).to_bytes(4, "big") + b"ftypisom\0\0\0\0"
    long_box = (1).to_bytes(4, "big") + b"mdat" + (5_000_000_000).to_bytes(8, "big")
    (tmp_path / "clip.mp4").write_bytes(front + long_box + b"frames")
    assert declared_bytes(tmp_path / "clip.mp4") == 16 + 5_000_000_000


@pytest.mark.parametrize(
    "content", [b"", b"RIFF", b"RIFF\0\0\0\0AVI ", b"\x1a\x45\xdf\xa3", b"\x1a\x45\xdf\xa3\x00", b"text"]
)
def test_a_file_without_declared_size_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "clip").write_bytes(content)
    assert declared_bytes(tmp_path / "clip") is None
