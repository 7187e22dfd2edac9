"""What to propose when memory runs out, in one order everywhere.

Who raises the error knows which flags its command has and what the model supports: nothing else is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from brim.settings.caller import named

__all__ = ["HALF_PRECISION", "memory_remedies", "memory_savings"]

HALF_PRECISION = "half precision (about half of what is in float32)"


def memory_savings(*, half_precision: str = "", smaller: str = "", checkpointing: str = "") -> tuple[str, ...]:
    """What makes a batch of the same size take less, the gentlest first.

    Each argument says how it is asked for, such as `--dtype bfloat16`; an empty one leaves it out.
    """
    found = (
        HALF_PRECISION.replace("half precision", f"half precision: {half_precision}") if half_precision else "",
        smaller,
        f"{checkpointing} (trades activations for time)" if checkpointing else "",
    )
    return tuple(part for part in found if part)


def memory_remedies(
    savings: Sequence[str],
    *,
    batch_size: int = 1,
    more: str | None = None,
) -> list[str]:
    """Remedies for a workload that does not fit: a smaller batch, what `savings` names, more memory."""
    if more is None:
        more = f"another device with more memory, or a larger {named('memory_limit')}"
    smaller = [f"a smaller batch (it was {batch_size})"] if batch_size > 1 else []
    return [*smaller, *savings, more]
