"""A profile as it was asked for."""

from __future__ import annotations

from brim.profiling.listener import ProfileListener
from brim.profiling.run import ProfileResult, profile
from brim.settings.profile_settings import ProfileSettings

__all__ = ["profile_as"]


def profile_as(settings: ProfileSettings, *, listener: ProfileListener | None = None) -> ProfileResult:
    """Evaluate at every point, and leave the profile's folder behind."""
    return profile(settings.request, output=settings.output, listener=listener)
