"""The profile that `brim demo` makes: the shipped model on boards of digits, over its number of crops."""

from __future__ import annotations

from pathlib import Path

from brim.demo.digitboard import write_digitboard
from brim.demo.model import weights_folder
from brim.settings.eval_settings import EvalRequest
from brim.settings.other_settings import DemoSettings
from brim.settings.profile_settings import ProfileRequest, ProfileSettings

__all__ = ["CEILING", "CROPS", "profile_settings", "write_boards"]

CROPS = ("1", "2", "4", "6", "9", "12")
CEILING = 64
SEED = 1


def write_boards(folder: Path, *, questions: int) -> Path:
    """So many questions about boards, in a folder of their own."""
    return write_digitboard(folder / "boards", questions=questions, seed=SEED)


def profile_settings(settings: DemoSettings, boards: Path, folder: Path) -> ProfileSettings:
    """What `brim profile` would be asked."""
    base = EvalRequest(
        model=str(weights_folder()),
        data=str(boards),
        device="cpu",
        batch_size=CEILING,
        memory_limit=settings.memory_limit,
        use_cache=False,
    )
    request = ProfileRequest(base=base, axes={"max_crops": CROPS}, resume=settings.resume)
    return ProfileSettings(request=request, output=folder, json_output=settings.json_output)
