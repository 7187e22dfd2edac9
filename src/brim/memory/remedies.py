"""What to propose when memory runs out, in one order everywhere."""

from __future__ import annotations

__all__ = ["memory_remedies"]


def memory_remedies(mode: str, *, batch_size: int = 1) -> list[str]:
    """Remedies for a workload that does not fit, the gentlest first; `mode` is forward, generate or train."""
    remedies = []
    if batch_size > 1:
        remedies.append(f"a smaller batch (it was {batch_size})")
    remedies.append("half precision: --dtype bfloat16 (about half of what is in float32)")
    if mode == "generate":
        remedies.append("fewer new tokens (--max-tokens) or a smaller --knob")
    else:
        remedies.append("a smaller --knob (size, frames, tokens)")
    if mode == "train":
        remedies.append("--gradient-checkpointing (trades activations for time)")
    remedies.append("another device with more memory, or a larger --memory-limit")
    return remedies
