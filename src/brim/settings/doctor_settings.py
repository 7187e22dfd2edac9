"""What `brim doctor` takes; `brim.doctor` takes nothing."""

from __future__ import annotations

import dataclasses

from brim.settings import shared

__all__ = ["DoctorSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """How the examination is shown."""

    json_output: shared.JsonOutput = False
