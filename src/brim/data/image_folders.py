"""Folders of images: a folder for each class (`val/cat/1.jpg`), or a mask for each image.

A mask folder has `images/NAME.jpg` and `masks/NAME.png`, with folders for splits above them or not. A mask has the
number of a class in every pixel (0 is the background, 255 is ignored), as in Pascal VOC.
"""

from __future__ import annotations

from pathlib import Path

from brim.data.base import ImageFile, Sample, SampleFormat, SampleSet
from brim.data.files import IMAGE_SUFFIXES, class_folders, files_below, files_digest, has_class_folders, split_folders
from brim.data.selection import choose_split, refuse_split
from brim.errors import RequestError

__all__ = ["IMAGE_FOLDER", "is_image_folder", "read_image_folder", "read_mask_folder"]

CLASS_NAMES = "classes.txt"  # of a mask folder: one name per line, the background first


def is_image_folder(root: Path) -> bool:
    """Whether there are class folders of images, directly or below folders of splits."""
    return has_class_folders(root, IMAGE_SUFFIXES) or bool(split_folders(root, IMAGE_SUFFIXES))


def read_image_folder(root: Path, split: str | None, images: Path | None = None) -> SampleSet:
    """One sample per image; the class is its folder, numbered over the sorted names of all splits."""
    del images  # they are here
    name, folder = root.name, root
    if has_class_folders(root, IMAGE_SUFFIXES):
        refuse_split(split, where=str(root))
        classes = class_folders([root], IMAGE_SUFFIXES)
    else:
        folders = split_folders(root, IMAGE_SUFFIXES)
        split = choose_split([each.name for each in folders], split, where=str(root))
        classes = class_folders(folders, IMAGE_SUFFIXES)
        name, folder = f"{root.name}/{split}", root / split
    samples = [
        Sample(
            id=file.relative_to(folder).as_posix(),
            images=(ImageFile(path=file),),
            references=(index,),
            group=class_name,
            original={"file": file.relative_to(folder).as_posix(), "class": class_name},
        )
        for index, class_name in enumerate(classes)
        for file in files_below(folder / class_name, IMAGE_SUFFIXES)
    ]
    return SampleSet(
        name=name,
        format="image_folder",
        samples=tuple(samples),
        suggested_task="classify",
        class_names=tuple(classes),
        facts={"split": split},
        fields={"image": "file", "label": "folder"} | ({"split": split} if split else {}),
    )


def read_mask_folder(root: Path, *, split: str | None) -> SampleSet:
    """One sample per image; its mask is `original["mask"]`."""
    folder = root
    if _holds_masked_images(root):
        refuse_split(split, where=str(root))
    else:
        splits = sorted(one.name for one in root.iterdir() if _holds_masked_images(one)) if root.is_dir() else []
        if not splits:
            raise RequestError(
                f"data.root {root}: a segmentation model needs folders images/ and masks/; name the folder of both"
            )
        split = choose_split(splits, split, where=str(root))
        folder = root / split
    masks = {file.stem: file for file in sorted((folder / "masks").iterdir())}
    files = list(files_below(folder / "images", IMAGE_SUFFIXES))
    bare = [file.name for file in files if file.stem not in masks]
    if bare:
        raise RequestError(
            f"data.root {root}: {len(bare)} images have no mask of the same name (the first is {bare[0]}); "
            "add masks or remove the images"
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
            for file in files
        ),
        suggested_task="classify",
        class_names=tuple(names.read_text().split("\n")[:-1]) if names.is_file() else (),
        facts={"split": split, "files": files_digest([*files, *(masks[file.stem] for file in files)])},
    )


def _holds_masked_images(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()


IMAGE_FOLDER = SampleFormat(
    name="image_folder", title="class folders", found_in=is_image_folder, read=read_image_folder, tasks=("classify",)
)
