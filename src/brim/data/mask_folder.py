"""Pictures with a mask for each: `images/NAME.jpg` beside `masks/NAME.png`, below folders of splits or not.

A mask has the number of a class in every pixel (0 is the background, 255 is not counted), as Pascal VOC's have.
"""

from __future__ import annotations

from pathlib import Path

from brim.data.base import ImageFile, Sample, SampleSet
from brim.data.class_folders import IMAGE_SUFFIXES, files_below
from brim.data.identity import files_digest
from brim.data.splits import choose_split, refuse_split
from brim.errors import RequestError

__all__ = ["read_mask_folder"]

CLASS_NAMES = "classes.txt"  # one name a line, that of the background first


def read_mask_folder(root: Path, *, split: str | None) -> SampleSet:
    """One sample a picture; its mask is `original["mask"]`."""
    folder = root
    if _holds_pictures(root):
        refuse_split(split, where=str(root))
    else:
        splits = sorted(one.name for one in root.iterdir() if _holds_pictures(one)) if root.is_dir() else []
        if not splits:
            raise RequestError(
                f"data.root {root}: there is no folder images/ beside a folder masks/, as a segmentation model needs"
            )
        split = choose_split(splits, split, where=str(root))
        folder = root / split
    masks = {file.stem: file for file in sorted((folder / "masks").iterdir())}
    pictures = list(files_below(folder / "images", IMAGE_SUFFIXES))
    bare = [file.name for file in pictures if file.stem not in masks]
    if bare:
        raise RequestError(
            f"data.root {root}: {len(bare)} pictures have no mask of their name (the first is {bare[0]})"
        )
    names = root / CLASS_NAMES
    return SampleSet(
        name=root.name if split is None else f"{root.name}/{split}",
        format="mask_folder",
        samples=tuple(
            Sample(
                id=file.relative_to(folder / "images").as_posix(),
                images=(ImageFile(path=file),),
                original={"mask": str(masks[file.stem])},
            )
            for file in pictures
        ),
        suggested_task="classify",
        class_names=tuple(names.read_text().split("\n")[:-1]) if names.is_file() else (),
        facts={"split": split, "files": files_digest([*pictures, *(masks[file.stem] for file in pictures)])},
    )


def _holds_pictures(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()
