"""Attention in a trace keeps what the target's kernel keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from brim.forecasting.attention import AttentionCall, AttentionSettings, backward_scratch, choose_backend
from brim.forecasting.events import Target, Trace
from brim.forecasting.trace import trace_workload
from brim.workloads.inference import ForwardWorkload
from tests.forecasting.traced_workloads import training

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


def test_efficient_backward_in_float32_needs_gradient_output_sums() -> None:
    # As recorded on an H200 for ViT-B/16 on 32 images: the product and its sums, then those and the kernel's own.
    asked = call(query=(32, 12, 197, 64), key=(32, 12, 197, 64), value=(32, 12, 197, 64), dtype="float32")
    assert backward_scratch(asked, "efficient") == ((19_365_888, 302_592), (302_592, 25_190_400))


def test_grouped_heads_cost_the_gradients_of_every_query_head() -> None:
    grouped = call(key=(2, 2, 128, 64), value=(2, 2, 128, 64), grouped=True)
    (blocks,), (plain,) = backward_scratch(grouped, "flash"), backward_scratch(CALL, "flash")
    assert blocks == (2 * 8 * 128 * 64 * 2, 2 * 8 * 128 * 64 * 2, *plain)  # keys and values, in bfloat16


BATCH, HEADS, LENGTH, WIDTH = 2, 4, 512, 64


def card(major: int, minor: int = 0) -> Target:
    return Target(name=f"sm{major}{minor}", compute_capability=(major, minor), total_bytes=2**35)


class Attention(nn.Module):
    def __init__(self, *, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.masked, self.dropout = masked, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, width]
        query, key, value = (part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for part in self.project(x).chunk(3, 2))
        mask = torch.ones(x.shape[0], 1, LENGTH, LENGTH, dtype=torch.bool) if self.masked else None
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, self.dropout)
        return mixed.transpose(1, 2).flatten(2)


def traced(
    target: Target, *, train: bool = True, dtype: torch.dtype | None = torch.bfloat16, **options: object
) -> Trace:
    model = Attention(**options)  # type: ignore[arg-type]
    make = lambda n: torch.randn(n, LENGTH, HEADS * WIDTH)  # noqa: E731
    if train:
        return trace_workload(training(model, make, autocast_dtype=dtype), BATCH, target=target)
    return trace_workload(ForwardWorkload(model=model.eval(), make_batch=make, device="cpu"), BATCH, target=target)


def taken(trace: Trace, prefix: str) -> list[int]:
    start, end = trace.step_starts[0], trace.step_starts[1]
    return [event.bytes for event in trace.events[start:end] if event.kind == "alloc" and event.op.startswith(prefix)]


OUTPUT = 2 * BATCH * HEADS * LENGTH * WIDTH  # bfloat16
SUMS = 4 * BATCH * HEADS * LENGTH  # the log-sum-exp of every row


def test_flash_keeps_the_output_and_one_number_per_row() -> None:
    trace = traced(card(8))
    assert trace.attention == ("flash",)
    assert taken(trace, "flash_attention")[:2] == [OUTPUT, SUMS]
    rows = 4 * BATCH * HEADS * LENGTH
    assert taken(trace, "flash_attention_backward") == [OUTPUT, OUTPUT, OUTPUT, rows, rows * WIDTH]


def test_without_a_fused_kernel_the_matrix_of_scores_is_made() -> None:
    trace = traced(card(7))  # no fused kernel takes bfloat16 before Ampere
    assert trace.attention == ("math",)
    scores = 4 * BATCH * HEADS * LENGTH * LENGTH
    assert scores in {event.bytes for event in trace.events}
    assert traced(card(8)).peak_allocated() < trace.peak_allocated() - scores


def test_the_card_decides_and_not_this_machine() -> None:
    # cuDNN comes first on Hopper from torch 2.11 on, with the cuDNN of that time; flash before.
    assert traced(card(9)).attention in (("cudnn",), ("flash",))
    assert traced(card(8), dtype=None).attention == ("efficient",)  # float32


def test_a_mask_of_truths_becomes_one_to_add() -> None:
    trace = traced(card(8), masked=True)
    assert trace.attention == ("efficient",)
    mask = BATCH * LENGTH * LENGTH
    assert taken(trace, "aten.zeros_like")[0] == 2 * mask
    assert taken(trace, "efficient_attention")[:2] == [OUTPUT, SUMS]


def test_without_gradients_efficient_attention_keeps_no_sums() -> None:
    trace = traced(card(8), train=False)
    assert trace.attention == ("efficient",)
    assert taken(trace, "efficient_attention") == [2 * OUTPUT]  # float32 output only


@pytest.mark.parametrize("train", [True, False])
def test_multi_head_attention_is_fused_with_and_without_its_fast_path(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 512, batch_first=True, dropout=0.0)
    make = lambda n: torch.randn(n, LENGTH, HEADS * WIDTH)  # noqa: E731
    workload = (
        training(layer, make) if train else ForwardWorkload(model=layer.eval(), make_batch=make, device="cpu")
    )  # fmt: skip
    trace = trace_workload(workload, BATCH, target=card(8))
    assert trace.attention == ("efficient",)
    assert max(event.bytes for event in trace.events) < 4 * BATCH * HEADS * LENGTH * LENGTH


def test_the_kernels_that_a_user_has_switched_off_are_not_taken() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = Attention()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return model(x).square().mean()

    workload = training(model, lambda n: torch.randn(n, LENGTH, HEADS * WIDTH), loss, autocast_dtype=torch.bfloat16)
    assert trace_workload(workload, BATCH, target=card(9)).attention == ("math",)


def test_the_version_of_torch_on_the_target_decides_and_not_the_one_here() -> None:
    # Fewer heads of keys than of queries: the efficient kernel takes them from torch 2.14 on.
    class Grouped(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (
                part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for part in self.project(x).chunk(3, 2)
            )
            return functional.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)

    workload = training(Grouped(), lambda n: torch.randn(n, LENGTH, HEADS * WIDTH))
    older, newer = (dataclasses.replace(card(9), torch_version=version) for version in ((2, 11), (2, 14)))
    assert trace_workload(workload, BATCH, target=older).attention == ("math",)
    assert trace_workload(workload, BATCH, target=newer).attention == ("efficient",)


def test_the_efficient_backward_makes_gradients_with_the_heads_innermost() -> None:
    class Outermost(Attention):
        """Heads are the outermost dimension in memory, so that gradients must be copied to be views of them again."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(x.shape[0], LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).contiguous()
            return functional.scaled_dot_product_attention(*heads.unbind(0))

    workload = training(Outermost(), lambda n: torch.randn(n, LENGTH, HEADS * WIDTH))
    trace = trace_workload(workload, BATCH, target=card(9))
    assert trace.attention == ("efficient",)
    whole = 2 * OUTPUT  # float32
    # The gradient that comes in is copied, then those of queries, keys and values, then product, sums, sums, workspace.
    blocks = taken(trace, "efficient_attention_backward")
    assert blocks[:7] == [whole, whole, whole, whole, whole, SUMS, SUMS]
