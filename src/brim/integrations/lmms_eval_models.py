"""What lmms-eval reads from brim's entry point, in the group `lmms_eval.models`: `--model brim`.

Imported whenever lmms-eval is, so it imports nothing but lmms-eval's own record.
"""

from __future__ import annotations

from typing import Any

__all__ = ["manifest"]


def manifest() -> Any:
    """The model's name and class; the class is imported when the model is asked for."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="brim", chat_class_path="brim.integrations.lmms_eval.BrimLMMS")
