"""Images from files and bytes: the only file that imports Pillow, on use."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from brim.data.base import DataError, ImageFile
from brim.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

__all__ = ["image_size", "load_image", "load_mask", "polygon_mask"]

_ORIENTATION = 0x0112  # the EXIF tag
_ON_ITS_SIDE = (5, 6, 7, 8)


def load_image(image: ImageFile) -> Image:
    """The image in RGB, rotated by its EXIF orientation; one that cannot be decoded is a `DataError`.

    One that its caller has decoded is left as it is.
    """
    if image.decoded is not None:
        own: Image = image.decoded()
        return own
    with _opened(image) as found:
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(found)
        if upright.mode.startswith("I"):  # 16-bit grey: otherwise all values above 255 become white
            upright = upright.point(lambda value: value / 256).convert("L")
        if upright.mode == "P":
            upright = upright.convert("RGBA" if "transparency" in upright.info else "RGB")
        return upright.convert("RGB")


def image_size(image: ImageFile) -> tuple[int, int]:
    """Width and height of the image that `load_image` returns; only the header is read."""
    if image.size is not None:
        return image.size
    with _opened(image) as found:
        width, height = found.size
        return (height, width) if _is_turned(found) else (width, height)


def _is_turned(found: Image) -> bool:
    """Whether `load_image` will swap width and height; the image is not decoded."""
    if found.format == "TIFF" or (found.format == "PNG" and "exif" not in found.info):
        return False  # a TIFF has its final size already; a PNG would decode its pixels to find EXIF after them
    return found.getexif().get(_ORIENTATION) in _ON_ITS_SIDE


def load_mask(path: Path, size: int | None) -> npt.NDArray[np.uint8]:
    """A mask of classes as stored, palette indices included; resized by the nearest pixel."""
    import numpy as np

    with _opened(ImageFile(path=path)) as found:
        if found.mode not in ("P", "L", "1"):
            raise DataError(f"{path} is of the mode {found.mode}; a mask has one number in every pixel (modes L or P)")
        import PIL.Image

        shown = found if size is None else found.resize((size, size), PIL.Image.Resampling.NEAREST)
        return np.array(shown, dtype=np.uint8)


def polygon_mask(polygons: Sequence[Sequence[float]], width: int, height: int) -> npt.NDArray[np.uint8]:
    """Polygons in COCO's form (x, y, x, y, …), filled with ones."""
    import numpy as np
    import PIL.Image
    import PIL.ImageDraw

    canvas = PIL.Image.new("L", (width, height))
    for polygon in polygons:
        PIL.ImageDraw.Draw(canvas).polygon(list(polygon), fill=1, outline=1)
    return np.array(canvas, dtype=np.uint8)


@contextlib.contextmanager
def _opened(image: ImageFile) -> Iterator[Image]:
    try:
        import PIL.Image
    except ImportError as error:
        raise RequestError(f"images need Pillow ({error}): pip install pillow") from error
    try:
        with _encoded(image) as file, PIL.Image.open(file) as found:
            yield found
    except (DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"image {image} does not exist") from error
    except PIL.UnidentifiedImageError as error:
        raise DataError(f"image {image} cannot be read: it is in no format that Pillow knows") from error
    except Exception as error:  # each decoder has its own kinds
        raise DataError(f"image {image} cannot be read: {error or type(error).__name__}") from error


def _encoded(image: ImageFile) -> BinaryIO:
    if image.data is not None:
        return io.BytesIO(image.data)
    if image.read is not None:
        return io.BytesIO(image.read())
    if image.path is None:
        raise DataError("the sample's image has neither a path nor bytes")
    return image.path.open("rb")
