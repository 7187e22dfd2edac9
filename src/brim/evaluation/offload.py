"""The last resort for a sample that does not fit even alone: weights in host memory, brought over layer by layer."""

from __future__ import annotations

from collections.abc import Callable

from brim.errors import RequestError
from brim.evaluation.subject import Subject
from brim.settings.caller import written
from brim.settings.eval_settings import EvalRequest

__all__ = ["Offload"]


class Offload:
    """Moves the weights once, when asked for and when there is somewhere to move them from."""

    def __init__(self, request: EvalRequest, subject: Subject, tell: Callable[[str], None]) -> None:
        self._wanted = request.offload == "cpu"
        self._subject = subject
        self._tell = tell
        self._applied = False

    def apply(self) -> bool:
        """Whether the weights were moved just now, so that the sample is worth another try."""
        if self._applied or not self._wanted:
            return False
        self._applied = True
        device = self._subject.device
        if device.type == "cpu":
            self._tell(f"{written('offload', 'cpu')}: the model is on the CPU already; there is nothing to move")
            return False
        try:
            from accelerate import cpu_offload
        except ImportError as error:
            raise RequestError(f"{written('offload', 'cpu')} needs accelerate: pip install accelerate") from error
        self._subject.task.release()
        module = self._subject.model.module.to("cpu")
        cpu_offload(module, execution_device=device)
        self._tell("a sample does not fit even alone: the weights go to host memory from here on, which is slower")
        return True
