"""Where a workload runs and in which precision: what `--device` and `--dtype` mean."""

from __future__ import annotations

import dataclasses
import os
import re

import torch

from brim.errors import RequestError, nearest_names
from brim.records import Mode
from brim.settings.caller import given

__all__ = ["DTYPES", "Precision", "resolve_device", "resolve_precision"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of the weights (None: the model's own), that of autocast, and whether gradients are scaled."""

    weights: torch.dtype | None
    autocast: torch.dtype | None = None
    scaled: bool = False


def resolve_precision(text: str, mode: Mode) -> Precision:
    """What `--dtype` asks for: in training half precision is autocast over float32 weights, else the weights' dtype."""
    if text != "auto" and text not in DTYPES:
        names = ("auto", *DTYPES)
        raise RequestError(f"{given('dtype', text)}: it must be one of {', '.join(names)}{nearest_names(text, names)}")
    dtype = DTYPES.get(text)
    if mode != "train":
        return Precision(weights=dtype)
    if dtype in (None, torch.float32):
        return Precision(weights=torch.float32)
    return Precision(weights=torch.float32, autocast=dtype, scaled=dtype is torch.float16)


def resolve_device(text: str) -> torch.device:
    """The device that `--device` asks for; `auto` and `cuda` honour `LOCAL_RANK`.

    A device that is not there is a `RequestError` that names what is.
    """
    if text == "cpu":
        return torch.device("cpu")
    if text in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", _local_rank(torch.cuda.device_count()))
    if text == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if text == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps")
        raise _absent(text)
    asked = re.fullmatch(r"cuda:(\d+)", text)
    if asked is None and text != "cuda":
        raise RequestError(f"{given('device', text)}: it must be auto, cpu, cuda, cuda:N or mps; here: {_devices()}")
    index = int(asked[1]) if asked else 0
    if index >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise _absent(text)
    return torch.device("cuda", index)


def _local_rank(count: int) -> int:
    text = os.environ.get("LOCAL_RANK")
    if text is None or count == 1:  # a launcher that shows each process one device has already chosen
        return 0
    if not text.isdigit() or int(text) >= count:
        raise RequestError(f"LOCAL_RANK={text}: there are {count} CUDA devices; start at most {count} processes here")
    return int(text)


def _absent(text: str) -> RequestError:
    return RequestError(f"{given('device', text)}: there is no such device; here: {_devices()}")


def _devices() -> str:
    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return ", ".join(names)
