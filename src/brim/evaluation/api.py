"""An evaluation as it was asked for: in this process, by torchrun's, or by the workers of a cluster."""

from __future__ import annotations

from brim.evaluation.listener import EvalListener
from brim.evaluation.run import EvalResult, evaluate
from brim.settings.eval_settings import EvaluateSettings

__all__ = ["evaluate_as"]


def evaluate_as(settings: EvaluateSettings, *, listener: EvalListener | None = None) -> EvalResult:
    """Evaluate, and leave the run's folder behind; a sample that fails has its error in `samples`, none is raised."""
    if settings.on is None:
        return evaluate(settings.request, output=settings.output, listener=listener)
    from brim.evaluation.on_ray import evaluate_on_ray

    return evaluate_on_ray(
        settings.request, output=settings.output, listener=listener or EvalListener(), workers=settings.workers,
        gpus_per_worker=settings.gpus_per_worker,
    )  # fmt: skip
