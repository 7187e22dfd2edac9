"""The kernel of an attention call is the one torch would choose on the card, whatever machine this is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from brim.forecasting.attention_rules import AttentionCall, AttentionSettings, backward_scratch, choose_backend

CALL = AttentionCall(query=(2, 8, 128, 64), key=(2, 8, 128, 64), value=(2, 8, 128, 64), dtype="bfloat16")
HOPPER = AttentionSettings(compute_capability=(9, 0), torch_version=(2, 11), cudnn_version=91900)
AMPERE = dataclasses.replace(HOPPER, compute_capability=(8, 0))
ADA = dataclasses.replace(HOPPER, compute_capability=(8, 9))
TURING = dataclasses.replace(HOPPER, compute_capability=(7, 5))
VOLTA = dataclasses.replace(HOPPER, compute_capability=(7, 0))


def call(**changes: Any) -> AttentionCall:
    return dataclasses.replace(CALL, **changes)


def heads_of(width: int, **changes: Any) -> AttentionCall:
    shape = (2, 8, 128, width)
    return call(query=shape, key=shape, value=shape, **changes)


@pytest.mark.parametrize(
    ("asked", "settings", "backend"),
    [
        (CALL, HOPPER, "cudnn"),
        (CALL, dataclasses.replace(HOPPER, cudnn_version=91002), "flash"),  # before odd lengths were fixed
        (CALL, dataclasses.replace(HOPPER, torch_version=(2, 9)), "flash"),
        (CALL, AMPERE, "flash"),
        (call(dtype="float32"), HOPPER, "efficient"),
        (call(dtype="float32"), VOLTA, "efficient"),
        (call(dtype="float16"), TURING, "efficient"),
        (CALL, TURING, "math"),  # bfloat16 before Ampere
        (call(mask=(2, 1, 128, 128)), AMPERE, "efficient"),
        (call(mask=(2, 1, 128, 128)), HOPPER, "cudnn"),
        (call(mask=(2, 8, 128, 128), mask_needs_grad=True), HOPPER, "efficient"),
        (call(mask=(2, 1, 128, 128), mask_last_stride_is_one=False), AMPERE, "math"),
        (call(dropout=0.1), HOPPER, "flash"),  # cuDNN knows sixteenths only
        (call(dropout=0.125), HOPPER, "cudnn"),
        (call(causal=True, key=(2, 8, 256, 64), value=(2, 8, 256, 64)), AMPERE, "efficient"),  # not square
        (heads_of(192), HOPPER, "flash"),
        (heads_of(320), HOPPER, "efficient"),
        (heads_of(40), AMPERE, "flash"),
        (heads_of(36), HOPPER, "flash"),  # padded to 40
        (heads_of(36, dtype="float32"), HOPPER, "efficient"),
        (heads_of(38, dtype="float32"), HOPPER, "math"),  # no multiple of four
        (heads_of(256, needs_grad=True), AMPERE, "flash"),
        (heads_of(208, needs_grad=True), ADA, "efficient"),  # too little shared memory for its backward
        (heads_of(208), ADA, "flash"),
        (call(key=(2, 2, 128, 64), value=(2, 2, 128, 64)), AMPERE, "math"),  # grouped without saying so
        (call(key=(2, 2, 128, 64), value=(2, 2, 128, 64), grouped=True), AMPERE, "flash"),
        (call(key=(2, 2, 128, 64), value=(2, 2, 128, 64), grouped=True, dtype="float32"), AMPERE, "math"),
        (call(query=(2, 8, 1, 64), key=(2, 8, 1, 64), value=(2, 8, 1, 64)), HOPPER, "flash"),  # one key
        (call(last_stride_is_one=False), HOPPER, "math"),
        (call(query=(8, 128, 64), key=(8, 128, 64), value=(8, 128, 64)), HOPPER, "math"),  # no batch dimension
        (CALL, dataclasses.replace(HOPPER, enabled=("efficient", "math")), "efficient"),
        (CALL, dataclasses.replace(HOPPER, enabled=("math",)), "math"),
        (CALL, dataclasses.replace(HOPPER, deterministic=True), "flash"),
    ],
)
def test_the_kernel_is_torchs_choice(asked: AttentionCall, settings: AttentionSettings, backend: str) -> None:
    assert choose_backend(asked, settings) == backend


def test_the_backward_of_flash_sums_gradients_of_queries_in_float32() -> None:
    # [batch, heads, length rounded up to 128, head_dim rounded up to 32], and one number per row
    asked = call(query=(2, 8, 100, 40), key=(2, 8, 100, 40), value=(2, 8, 100, 40))
    assert backward_scratch(asked, "flash") == ((2 * 8 * 128 * 4, 2 * 8 * 128 * 64 * 4),)
    assert backward_scratch(asked, "cudnn") == ((2 * 8 * 100 * (40 + 1) * 4 + 256,),)
    assert backward_scratch(asked, "math") == ()


def test_the_efficient_backward_in_float32_is_given_the_sums_of_gradient_times_output() -> None:
    # As recorded on an H200 for ViT-B/16 on 32 images: the product and its sums, then those and the kernel's own.
    asked = call(query=(32, 12, 197, 64), key=(32, 12, 197, 64), value=(32, 12, 197, 64), dtype="float32")
    assert backward_scratch(asked, "efficient") == ((19_365_888, 302_592), (302_592, 25_190_400))


def test_grouped_heads_cost_the_gradients_of_every_query_head() -> None:
    grouped = call(key=(2, 2, 128, 64), value=(2, 2, 128, 64), grouped=True)
    (blocks,), (plain,) = backward_scratch(grouped, "flash"), backward_scratch(CALL, "flash")
    assert blocks == (2 * 8 * 128 * 64 * 2, 2 * 8 * 128 * 64 * 2, *plain)  # keys and values, in bfloat16
