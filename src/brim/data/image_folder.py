"""Images in a folder for each class, with or without a folder for each split above them."""

from __future__ import annotations

from pathlib import Path

from brim.data.base import ImageFile, Sample, SampleSet
from brim.data.class_folders import IMAGE_SUFFIXES, class_folders, files_below, has_class_folders, split_folders
from brim.data.splits import choose_split, refuse_split

__all__ = ["is_image_folder", "read_image_folder"]


def is_image_folder(root: Path) -> bool:
    """Whether there are class folders of images, directly or below folders of splits."""
    return has_class_folders(root, IMAGE_SUFFIXES) or bool(split_folders(root, IMAGE_SUFFIXES))


def read_image_folder(root: Path, *, split: str | None) -> SampleSet:
    """One sample an image; the class is its folder, numbered over the sorted names of all splits."""
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
