"""UCF101 and similar data sets: videos in a folder for each class, and lists of the videos of each split.

    UCF-101/ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi
    ucfTrainTestlist/classInd.txt      1 ApplyEyeMakeup
    ucfTrainTestlist/testlist01.txt    ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi
    ucfTrainTestlist/trainlist01.txt   ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1

Classes count from 1 in these files and from 0 here. The lists may be in the given folder or beside it. Clips of one
group (`g01`) are cut from one recording: a split should keep them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from brim.data.base import BadRecord, Sample, SampleFormat, SampleSet
from brim.data.files import (
    VIDEO_SUFFIXES,
    class_folders,
    decoded,
    files_below,
    has_class_folders,
    read_content,
    subfolders,
)
from brim.data.selection import choose_split, refuse_split
from brim.errors import RequestError

__all__ = ["UCF101", "is_video_folder", "read_ucf101"]

_LIST = re.compile(r"(train|test)list(\d+)\.txt")
_GROUP = re.compile(r"v_.+_(g\d+)_c\d+")
_LISTS = "ucfTrainTestlist"


def is_video_folder(root: Path) -> bool:
    """Whether there are class folders of videos, here or in `UCF-101`, or lists of them."""
    return has_class_folders(_video_root(root), VIDEO_SUFFIXES) or bool(_split_lists(root))


def read_ucf101(root: Path, split: str | None, images: Path | None = None) -> SampleSet:
    """One sample per video: of the split's list (test01 by default), or all videos where there are no lists."""
    del images  # videos are here
    videos, lists = _video_root(root), _split_lists(root)
    classes = _class_names(root)
    index_of = {name: index for index, name in enumerate(classes)}
    if lists:
        split = _chosen(list(lists), split, root)
        listed = list(_listed(lists[split], videos, index_of))
    else:
        refuse_split(split, where=f"{root} has no lists such as testlist01.txt, and so")
        files = [file for name in classes for file in files_below(videos / name, VIDEO_SUFFIXES)]
        listed = [_sample(videos, file.relative_to(videos).as_posix(), index_of) for file in files]
    return SampleSet(
        name=f"{root.name}/{split}" if split else root.name,
        format="ucf101",
        samples=tuple(item for item in listed if isinstance(item, Sample)),
        suggested_task="classify",
        class_names=tuple(classes),
        bad=tuple(item for item in listed if isinstance(item, BadRecord)),
        facts={"split": split},
        fields={"video": "file", "label": "folder"} | ({"split": split} if split else {}),
    )


def _listed(path: Path, videos: Path, index_of: Mapping[str, int]) -> Iterator[Sample | BadRecord]:
    """The videos of a list; the class is the folder, and a class number beside it must agree."""
    for number, line in enumerate(decoded(read_content(path), path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path.name} line {number}"
        match = re.fullmatch(r"(.+?)(?:\s+(\d+))?", line.strip())
        assert match is not None
        name, claimed = match.groups()
        class_name = PurePosixPath(name).parts[0]
        if class_name not in index_of:
            yield BadRecord(place=place, reason=f"the class {class_name} of {name} is not among the known classes")
        elif claimed is not None and int(claimed) != index_of[class_name] + 1:
            yield BadRecord(
                place=place,
                reason=f"has class number {claimed}, but {class_name} has the number {index_of[class_name] + 1}",
            )
        else:
            yield _sample(videos, name, index_of)


def _sample(videos: Path, name: str, index_of: Mapping[str, int]) -> Sample:
    class_name = PurePosixPath(name).parts[0]
    match = _GROUP.fullmatch(PurePosixPath(name).stem)
    return Sample(
        id=name,
        video=videos / name,
        references=(index_of[class_name],),
        group=class_name,
        recording=f"{class_name}/{match[1]}" if match else None,
        original={"file": name, "class": class_name},
    )


def _class_names(root: Path) -> list[str]:
    """The classes of `classInd.txt` in its order; without it, the sorted names of the folders."""
    path = _lists_folder(root) / "classInd.txt"
    if not path.is_file():
        return class_folders([_video_root(root)], VIDEO_SUFFIXES)
    names: dict[int, str] = {}
    for number, line in enumerate(decoded(read_content(path), path).split("\n"), start=1):
        if not line.strip():
            continue
        index, name = [*line.split(maxsplit=1), ""][:2]
        if not index.isdecimal() or not name:
            raise RequestError(f"{path}, line {number}: {line.strip()!r} is not a class, such as '1 ApplyEyeMakeup'")
        names[int(index)] = name.strip()
    if sorted(names) != list(range(1, len(names) + 1)):
        raise RequestError(f"{path}: the classes are not numbered 1, 2, 3 …; {len(names)} were found")
    return [names[index] for index in sorted(names)]


def _chosen(available: list[str], asked: str | None, root: Path) -> str:
    """The split asked for: `test01`, `testlist01`, or `test` for the first; test01 by default."""
    wanted = (asked or "test").lower().replace("list", "").removesuffix(".txt")
    first = f"{wanted}01"
    if first in available:
        return first
    return choose_split(available, asked and wanted, where=str(root))


def _split_lists(root: Path) -> dict[str, Path]:
    """The lists by the name of their split: `test01`, `train01`."""
    matches = ((_LIST.fullmatch(path.name), path) for path in sorted(_lists_folder(root).glob("*list*.txt")))
    return {match[1] + match[2]: path for match, path in matches if match}


def _lists_folder(root: Path) -> Path:
    """The folder with the lists: inside, or beside if its lists name classes of this folder; else the folder itself."""
    if (root / _LISTS).is_dir() or any(_LIST.fullmatch(path.name) for path in root.glob("*list*.txt")):
        return root / _LISTS if (root / _LISTS).is_dir() else root
    beside = root.absolute().parent / _LISTS
    if beside.is_dir() and _listed_classes(beside) & {folder.name for folder in subfolders(root)}:
        return beside
    return root


def _listed_classes(folder: Path) -> set[str]:
    """The classes named in the lists of a folder."""
    files = [path for path in sorted(folder.glob("*list*.txt")) if _LIST.fullmatch(path.name)]
    lines = [line for path in files for line in decoded(read_content(path), path).split("\n") if line.strip()]
    return {PurePosixPath(line.strip()).parts[0] for line in lines}


def _video_root(root: Path) -> Path:
    folder = root / "UCF-101"
    return folder if folder.is_dir() else root


UCF101 = SampleFormat(name="ucf101", title="UCF101", found_in=is_video_folder, read=read_ucf101, tasks=("classify",))
