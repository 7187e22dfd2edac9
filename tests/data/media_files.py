"""Images, videos and tables that the tests of the data layer write."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from brim.data.base import SampleSet
from brim.data.open import DataRequest, open_data

ORIENTATION = 0x0112


def opened(path: Path, **options: Any) -> SampleSet:
    return open_data(DataRequest(path=str(path), **options))


def write_lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def encoded(shade: int = 0, *, size: tuple[int, int] = (4, 3), kind: str = "PNG", orientation: int = 0) -> bytes:
    image = Image.new("RGB", size, (shade, 0, 0))
    exif = Image.Exif()
    if orientation:
        exif[ORIENTATION] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif)
    return file.getvalue()


def write_image(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(shade))
    return path


def write_video(
    path: Path, shades: Iterable[int], *, codec: str = "mpeg4", options: dict[str, str] | None = None
) -> Path:
    """A clip of 64 × 48 with one even shade of grey a frame, ten frames a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for shade in shades:
            picture = np.full((48, 64, 3), shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def cut(path: Path, share: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path
