from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brim.data.base import DataError, ImageFile
from brim.data.images import image_size, load_image
from tests.data.media_files import encoded


def in_format(image: Image.Image, kind: str, **options: object) -> ImageFile:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return ImageFile(data=file.getvalue())


def test_an_image_is_loaded_from_a_file_bytes_or_a_function(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(10))
    for image in (ImageFile(path=tmp_path / "a.png"), ImageFile(data=encoded(10)), ImageFile(read=lambda: encoded(10))):
        loaded = load_image(image)
        assert (loaded.mode, loaded.size, loaded.getpixel((0, 0))) == ("RGB", (4, 3), (10, 0, 0))
        assert image_size(image) == (4, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_the_size_from_the_header_respects_exif_orientation(kind: str, orientation: int) -> None:
    image = ImageFile(data=encoded(size=(40, 30), kind=kind, orientation=orientation))
    assert image_size(image) == load_image(image).size == ((30, 40) if orientation > 4 else (40, 30))


def test_exif_orientation_is_applied() -> None:
    picture = Image.new("RGB", (2, 1))
    picture.putpixel((0, 0), (255, 0, 0))
    picture.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    loaded = load_image(in_format(picture, "PNG", exif=exif))
    assert [loaded.getpixel((0, row)) for row in (0, 1)] == [(255, 0, 0), (0, 0, 255)]


def test_the_size_is_read_without_decoding() -> None:
    whole = encoded(size=(400, 300), kind="JPEG")
    assert image_size(ImageFile(data=whole[: len(whole) // 2])) == (400, 300)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("RGB", (4, 3), (0, 0, 0)).convert(mode)
    loaded = load_image(in_format(image, "TIFF"))
    assert (loaded.mode, loaded.getpixel((0, 0))) == ("RGB", (0, 0, 0))


def test_a_palette_with_transparency_becomes_rgb() -> None:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert load_image(in_format(image, "PNG", transparency=b"\x00\x80")).getpixel((0, 0)) == (9, 8, 7)


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    shades = np.array([[0, 25_600, 51_200, 65_535]], np.uint16)
    loaded = load_image(in_format(Image.fromarray(shades), "PNG"))
    assert np.asarray(loaded)[0, :, 0].tolist() == [0, 100, 200, 255]


def test_a_missing_image_is_a_data_error(tmp_path: Path) -> None:
    for read in (load_image, image_size):
        with pytest.raises(DataError, match=r"gone.png does not exist"):
            read(ImageFile(path=tmp_path / "gone.png"))
        with pytest.raises(DataError, match="neither a path nor bytes"):
            read(ImageFile())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_a_data_error(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (60, 60, 3), np.uint8)
    content = in_format(Image.fromarray(noise), kind).data or b""
    path = tmp_path / "cut.img"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"image .*cut.img cannot be read: "):
        load_image(ImageFile(path=path))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_a_file_that_is_not_an_image_is_a_data_error(content: bytes) -> None:
    with pytest.raises(DataError, match=f"embedded image of {len(content)} bytes cannot be read: "):
        load_image(ImageFile(data=content))


def test_an_image_beyond_pillows_limit_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(DataError, match="cannot be read: Image size"):
        load_image(ImageFile(data=encoded()))


def test_a_folder_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_image(ImageFile(path=tmp_path))
