"""Names of images and videos to places on disk; only whether they exist is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.data.answers import unpacked
from brim.data.base import ImageFile, Sample
from brim.data.table import BadRowError, is_empty
from brim.errors import RequestError
from brim.settings.caller import written

__all__ = ["LOOKED_AT", "base_folder", "check_media", "media_paths", "names_in", "read_images", "read_video"]

LOOKED_AT = 20  # one image that is missing costs a sample; if none of so many is there, the folder is wrong


def base_folder(names: Iterable[str], folder: Path, images: Path | None) -> Path:
    """The folder that relative names start from: the one given, else the data's own or `images` or `videos` in it."""
    candidates = [images] if images is not None else [folder, folder / "images", folder / "videos"]
    first = list(itertools.islice((name for name in names if "://" not in name), LOOKED_AT))
    hits = [sum((base / name).is_file() for name in first) for base in candidates]
    if first and not any(hits):
        raise _none_there(f"such as {first[0]}", len(first), candidates)
    return candidates[hits.index(max(hits))]


def names_in(value: Any) -> list[str]:
    """The names of files in a cell; stored images have none."""
    value = unpacked(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and isinstance(value.get("path"), str) and value.get("bytes") is None:
        return [value["path"]]
    if isinstance(value, list | tuple):
        return [name for part in value for name in names_in(part)]
    return []


def read_images(value: Any, column: str, base: Path) -> tuple[ImageFile, ...]:
    """The images of a cell: names, bytes, `{"bytes": …, "path": …}`, or a list of these; an empty cell has none."""
    value = unpacked(value)
    if is_empty(value):
        return ()
    if isinstance(value, list | tuple):
        return tuple(image for part in value for image in read_images(part, column, base))
    if isinstance(value, ImageFile):
        return (value,)
    if isinstance(value, bytes):
        return (ImageFile(data=value),)
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return (ImageFile(data=value["bytes"]),)
    return tuple(ImageFile(path=_resolved(name, column, base)) for name in _one_name(value, column))


def read_video(value: Any, column: str, base: Path) -> Path | None:
    """The video of a cell: a name, or a `{"path": …}`; an empty cell has none."""
    if is_empty(value):
        return None
    if isinstance(value, ImageFile | bytes):
        raise BadRowError(f"{column!r} holds an embedded video; brim reads videos from files of their own")
    return _resolved(_one_name(value, column)[0], column, base)


def media_paths(samples: Iterable[Sample]) -> Iterable[Path]:
    """Every image and video that lies in a file of its own."""
    for sample in samples:
        yield from (image.path for image in sample.images if image.path is not None)
        if sample.video is not None:
            yield sample.video


def check_media(samples: Sequence[Sample], name: str) -> None:
    """Refuse a data set of which none of the first images or videos is there."""
    first = list(itertools.islice(dict.fromkeys(media_paths(samples)), LOOKED_AT))
    if first and not any(path.is_file() for path in first):
        folders = dict.fromkeys(path.parent for path in first)
        raise _none_there(f"such as {first[0].name} of {name}", len(first), list(folders)[:3])


def _none_there(example: str, count: int, folders: Sequence[Path]) -> RequestError:
    return RequestError(
        f"of the first {count} images or videos none exists, {example}; brim looked in "
        f"{', '.join(map(str, folders))}; give the folder that their names start from with "
        f"{written('images', 'FOLDER')}"
    )


def _one_name(value: Any, column: str) -> list[str]:
    names = names_in(value)
    if len(names) != 1:
        keys = f" with the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
        raise BadRowError(f"{column!r} holds a {type(value).__name__}{keys}, not the name of a file")
    return names


def _resolved(name: str, column: str, base: Path) -> Path:
    if "://" in name:
        raise BadRowError(f"{column!r} holds the address {name}; brim downloads nothing, save the file first")
    return base / Path(name).expanduser()  # an absolute name stays as it is
