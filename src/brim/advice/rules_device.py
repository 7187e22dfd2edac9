"""Advice on the device: precision, attention kernels, the allocator, a card with room to spare, cards that idle."""

from __future__ import annotations

from brim.advice.base import Advice, figure, on_cuda
from brim.advice.run_reader import Run, mapping, value_at
from brim.units import bytes_text, fraction_text

__all__ = ["allocator", "attention", "idle_cards", "precision", "underfilled_card"]

LOST_FRACTION = 0.25  # of what is allocated, reserved beside it
LOST_BYTES = 1 << 30
LITTLE_USED = 0.5  # of the time
LITTLE_MEMORY = 0.25  # of the limit
SCALING = 0.9  # of a card's speed that each further one brings, as a rule of thumb
LEAST_SECONDS = 30.0  # of a run that is worth starting several processes for
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def precision(run: Run) -> Advice | None:
    """Single precision on a card that computes in half precision several times as fast."""
    if not on_cuda(run):
        return None
    if run.kind == "train":
        asked, key = value_at(run.request, "settings.training.dtype"), "training.dtype"
        single = asked in (None, "auto", "float32")  # in training, auto is float32
    else:
        asked, key = mapping(run.request.get("knobs")).get("dtype") or run.request.get("dtype"), "dtype"
        single = asked == "float32"
    if not single:
        return None
    return Advice(
        name="precision",
        cause="the model computes in float32",
        evidence=f"dtype is {asked}; bfloat16 reads half the bytes and uses the matrix units, but may change answers: "
        "not measured, --try measures it and counts changed answers",
        settings={key: "bfloat16"},
        changes_answers=True,
    )


def attention(run: Run) -> Advice | None:
    """Fused attention kernels are switched off."""
    kernels = mapping(run.environment.get("attention"))
    if not on_cuda(run) or not kernels or kernels.get("flash") or kernels.get("efficient") or kernels.get("cudnn"):
        return None
    return Advice(
        name="attention",
        cause="attention runs without a fused kernel",
        evidence="flash, memory-efficient and cuDNN attention are off in torch.backends.cuda: whatever turned them off "
        "(a plugin or a model's own code) costs time and memory; not measured",
    )


def allocator(run: Run) -> Advice | None:
    """The allocator holds much more than tensors use."""
    reserved, used = figure(run, "peak_reserved_bytes"), figure(run, "peak_allocated_bytes")
    variables = " ".join(str(value) for value in mapping(run.environment.get("variables")).values())
    if not on_cuda(run) or not reserved or not used or "expandable_segments" in variables:
        return None
    lost = reserved - used
    if lost < max(LOST_FRACTION * used, LOST_BYTES):
        return None
    trouble = (figure(run, "oom_events") or 0) + (figure(run, "alloc_retries") or 0)
    events = f", with {trouble:.0f} out-of-memory events or allocator retries" if trouble else ""
    return Advice(
        name="allocator",
        cause=f"{bytes_text(lost)} reserved that no tensor uses",
        evidence=f"at the peak {bytes_text(reserved)} reserved for {bytes_text(used)} of tensors{events}; segments "
        "that grow leave fewer gaps, so that larger batches fit: not measured",
        environment=ALLOCATOR,
    )


def underfilled_card(run: Run) -> Advice | None:
    """A small model that leaves most of a card idle: several trainings at once fill it."""
    used, peak, limit = figure(run, "gpu_utilisation_mean"), figure(run, "peak_reserved_bytes"), run.limit_bytes
    if run.kind != "train" or not on_cuda(run) or used is None or not peak or not limit:
        return None
    if used > LITTLE_USED or peak > LITTLE_MEMORY * limit or run.summary.get("fast_path") not in (None, "off"):
        return None
    return Advice(
        name="underfilled_card",
        cause="the model is too small for the card",
        evidence=f"the card was busy {fraction_text(used)} of the time with {bytes_text(peak)} of {bytes_text(limit)}; "
        "several seeds in one command (--seeds 8) keep data on the device and capture or stack their steps, and a "
        "sweep packs experiments onto one card: not measured",
    )


def idle_cards(run: Run) -> Advice | None:
    """Further cards on this machine do nothing."""
    if not on_cuda(run) or (figure(run, "seconds") or 0.0) < LEAST_SECONDS:
        return None
    import torch

    cards, ranks = torch.cuda.device_count(), int(figure(run, "ranks") or 1)
    if cards <= ranks:
        return None
    return Advice(
        name="idle_cards",
        cause=f"{cards - ranks} of {cards} cards of this machine are not used",
        evidence=f"the run had {ranks} of {cards}; the gain is a rule of thumb ({fraction_text(SCALING)} of each "
        "further card), not measured",
        expected_gain=1 + SCALING * (cards / ranks - 1),
        processes=cards,
    )
