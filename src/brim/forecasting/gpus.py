"""The catalogue of cards a forecast can be made for: memory as the driver reports it, context and workspace sizes.

The figures are data (gpus.json beside this file), each with where it comes from. Workspace sizes are not a card's
but torch's, decided by the compute capability (ATen's CublasHandlePool).

Pure Python: no torch; the card of this machine is looked up by whoever may touch it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.forecasting.events import Target
from brim.settings.caller import given, written
from brim.settings.sizes import format_bytes, parse_bytes

__all__ = ["Gpu", "catalogue", "find_gpu", "gpu_of_memory"]

MIB = 2**20
UNKNOWN_CAPABILITY = (8, 0)  # what a card known only by its memory is taken for
UNKNOWN_CONTEXT_BYTES = 640 * MIB  # the largest that was seen
UNKNOWN_MULTIPROCESSORS = 108  # those of an A100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card, as far as a forecast needs to know it."""

    key: str  # as in --gpu: a100-80gb
    name: str
    memory_bytes: int  # as the driver reports it, not as the box says
    compute_capability: tuple[int, int]
    context_bytes: int  # what a process takes beside torch's allocator
    memory_source: str
    context_source: str
    kind: str = "data centre"
    multiprocessors: int = UNKNOWN_MULTIPROCESSORS  # as the vendor's data sheets say

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can reserve when nothing else is on the card."""
        return self.memory_bytes - self.context_bytes

    @property
    def target(self) -> Target:
        """The card as the tracer wants it."""
        return Target(name=self.name, compute_capability=self.compute_capability, total_bytes=self.memory_bytes)

    def limit_bytes(self, margin: float) -> int:
        """What a workload may reserve if this fraction of the usable memory is to stay free."""
        return int(self.usable_bytes * (1 - margin))


@functools.cache
def catalogue() -> tuple[Gpu, ...]:
    """Every card that brim knows, data-centre cards first; of cards with one name the usual one first."""
    text = importlib.resources.files("brim.forecasting").joinpath("gpus.json").read_text(encoding="utf-8")
    return tuple(_read(card) for card in json.loads(text)["cards"])


def find_gpu(text: str) -> Gpu:
    """The card that a spelling means: `a100-80gb`, `A100 80GB`, `NVIDIA GeForce RTX 4090`, `4090`.

    A name that fits several cards of different memory means the first of them in the catalogue, the usual one (`a100`:
    80 GB). An unknown one is a `RequestError` with the nearest names.
    """
    asked = _words(text)
    if asked:
        fitting = [gpu for gpu in catalogue() if asked == _words(gpu.key) or asked == _words(gpu.name)]
        fitting = fitting or [gpu for gpu in catalogue() if asked == _stem(gpu)]
        fitting = fitting or [gpu for gpu in catalogue() if asked == _stem(gpu)[-len(asked) :]]
        if fitting:
            return fitting[0]
    near = nearest_names(text.lower(), [gpu.key for gpu in catalogue()]) or _same_number(asked)
    raise RequestError(
        f"{given('gpu', text)}: brim knows no such card{near or '; brim forecast --gpus lists them'}"
        f" (any other card: {written('memory', 'SIZE')}, as the driver reports it)"
    )


def gpu_of_memory(memory: str | int) -> Gpu:
    """A card known only by its memory; its architecture is taken for that of an A100."""
    size = parse_bytes(memory, name="memory")
    if size <= UNKNOWN_CONTEXT_BYTES:
        raise RequestError(
            f"{given('memory', memory)}: a CUDA context alone takes about {format_bytes(UNKNOWN_CONTEXT_BYTES)}; "
            "write a card's memory such as 24GiB"
        )
    return Gpu(
        key=f"{format_bytes(size)} card",
        name=f"a card of {format_bytes(size)}",
        memory_bytes=size,
        compute_capability=UNKNOWN_CAPABILITY,
        context_bytes=UNKNOWN_CONTEXT_BYTES,
        memory_source="as given with --memory",
        context_source="the largest of the catalogue's measured figures",
        kind="given",
    )


def _read(card: dict[str, Any]) -> Gpu:
    major, minor = card["compute_capability"]
    return Gpu(
        key=card["key"],
        name=card["name"],
        kind=card["kind"],
        memory_bytes=card["memory_mib"] * MIB,
        compute_capability=(major, minor),
        context_bytes=card["context_mib"] * MIB,
        multiprocessors=card["multiprocessors"],
        memory_source=card["memory_source"],
        context_source=card["context_source"],
    )


def _words(text: str) -> tuple[str, ...]:
    """A name without vendor and punctuation: `NVIDIA GeForce RTX 4090` → rtx, 4090; `80 GB` → 80gb."""
    plain = re.sub(r"(\d+)\s*(?:gib|gb|g)\b", r"\1gb", text.lower().replace("-", " ").replace("_", " "))
    plain = re.sub(r"\b(rtx|gtx|ti)(?=\d)|(?<=\d)(?=ti\b)", r"\1 ", plain)
    skipped = {"nvidia", "geforce", "tesla", "hbm3", "sxm", "sxm2", "sxm4", "sxm5", "pcie", "generation", "quadro"}
    return tuple(word for word in re.findall(r"[a-z0-9]+", plain) if word not in skipped)


def _stem(gpu: Gpu) -> tuple[str, ...]:
    """The words of a card's key without its memory: rtx, 4090."""
    return _words(gpu.key)[:-1]


def _same_number(asked: tuple[str, ...]) -> str:
    """Names that share a model number with what was asked, where the letters are too far off."""
    shared = [gpu.key for gpu in catalogue() if any(word in _words(gpu.key) for word in asked if word not in ("rtx",))]
    return f"; did you mean {', '.join(shared[:4])}?" if shared else ""
