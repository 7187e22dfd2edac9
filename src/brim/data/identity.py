"""What a data set is, apart from where it lies and when it was written: digests for fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from brim.data.base import Sample

__all__ = ["files_digest", "records_digest", "samples_digest", "text_digest"]


def text_digest(parts: Iterable[bytes]) -> str:
    """The sha256 of a file's content."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def records_digest(records: Iterable[Any]) -> str:
    """The sha256 of values that JSON can hold, in their order."""
    return text_digest(json.dumps(record, sort_keys=True).encode() + b"\n" for record in records)


def files_digest(files: Iterable[Path]) -> str:
    """Names and sizes of files, in their order; each file is looked at once, and one that is missing has no size."""
    sizes: dict[Path, int | None] = {}
    for file in files:
        if file not in sizes:
            try:
                sizes[file] = file.stat().st_size
            except OSError:
                sizes[file] = None
    return records_digest([file.name, size] for file, size in sizes.items())


def samples_digest(samples: Sequence[Sample], class_names: Sequence[str]) -> str:
    """What the models read and what their answers are held against."""
    asked = ([each.id, each.prompt, each.choices, each.references, len(each.images)] for each in samples)
    return records_digest([list(class_names), *asked])
