"""Features in safetensors files: tensor `features`, one row a sample, and what is known of the rows as metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import RequestError
from brim.storage.files import write_atomic

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["file_digest", "read_arrays", "read_metadata", "write_arrays"]


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; metadata are JSON values by name."""
    import numpy as np
    from safetensors.numpy import save

    data = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()},
    )
    write_atomic(path, data)


def read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Every tensor of the file; half precision that numpy does not have comes as float32."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RequestError("features need safetensors: pip install 'brim[molecules]'") from error
    if not path.is_file():
        raise RequestError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a safetensors file: {error}") from error
    except TypeError:  # a dtype that numpy does not have
        return _through_torch(path)


def _through_torch(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }


def read_metadata(path: Path) -> dict[str, str]:
    """What the file says of itself."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})


def file_digest(path: Path) -> str:
    """Of the file's bytes."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
