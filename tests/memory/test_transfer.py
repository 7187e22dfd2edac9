"""Tensors put together: the same as torch's own, wherever that happens."""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from brim.memory.transfer import end_to_end, moved, on_device, replaced, stacked

CPU = torch.device("cpu")


def test_stacked_is_torchs_stack() -> None:
    parts = [torch.randn(3, 4) for _ in range(5)]
    assert torch.equal(stacked(parts), torch.stack(parts))
    assert torch.equal(stacked(parts, CPU), torch.stack(parts))


@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=5), width=st.integers(1, 4))
def test_even_parts_end_to_end_are_torchs_cat(rows: list[int], width: int) -> None:
    parts = [torch.randn(count, width) for count in rows]
    assert torch.equal(end_to_end(parts), torch.cat(parts))
    assert torch.equal(end_to_end(parts, CPU), torch.cat(parts))


def test_uneven_parts_are_filled_up_with_zeros() -> None:
    whole = end_to_end([torch.ones(2, 3, 1), torch.full((1, 1, 2), 5.0)])
    assert whole.shape == (3, 3, 2)
    assert whole[:2, :, 0].eq(1).all()
    assert whole[:2, :, 1].eq(0).all()
    assert whole[2, 0].tolist() == [5.0, 5.0]
    assert whole[2, 1:].eq(0).all()


def test_tensors_in_a_mapping_that_is_no_dictionary_are_replaced_too() -> None:
    class Named(collections.UserDict):  # type: ignore[type-arg]
        pass

    batch = Named(ids=torch.zeros(2), rest=[torch.ones(1)])
    found = replaced(batch, torch.Tensor, torch.neg)
    assert type(found) is Named
    assert (found["rest"][0].item(), batch["rest"][0].item()) == (-1, 1)


def test_moved_tensors_get_the_wanted_dtype() -> None:
    assert moved(torch.ones(2), CPU, torch.bfloat16).dtype == torch.bfloat16
    assert moved(torch.ones(2, dtype=torch.int64), CPU).dtype == torch.int64


class Sample(NamedTuple):
    """As a data set of the user's own may give it."""

    clip: int
    label: str


def test_what_holds_a_value_keeps_its_form() -> None:
    value = {"a": [1, "x", (2, None)], "b": Sample(3, "y"), "c": collections.OrderedDict(d=4)}
    found = replaced(value, int, lambda number: number * 10)
    assert found == {"a": [10, "x", (20, None)], "b": Sample(30, "y"), "c": {"d": 40}}
    assert isinstance(found["b"], Sample)
    assert value["a"] == [1, "x", (2, None)]


def test_what_moves_itself_does() -> None:
    """As a graph's batch does, or a packed sequence, whose lengths stay on the host."""

    class Graph:
        def __init__(self, nodes: torch.Tensor) -> None:
            self.nodes = nodes

        def to(self, device: torch.device) -> Graph:
            return Graph(self.nodes.to(device))

    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"graph": Graph(torch.ones(2)), "rest": (packed, torch.ones(2), "text", 3)}
    found = on_device(batch, torch.device("meta"))
    graph, (sequence, tensor, *rest) = found["graph"], found["rest"]
    assert [one.device.type for one in (graph.nodes, sequence.data, tensor)] == ["meta"] * 3
    assert sequence.batch_sizes.device.type == "cpu"
    assert rest == ["text", 3]


def test_what_is_of_the_kind_is_not_searched() -> None:
    assert replaced([[1], 2], list, len) == 2
    assert replaced("text", str, len) == 4
