from __future__ import annotations

import torch

from brim.workloads.random_tensors import random_floats, random_integers


def test_the_global_generator_is_not_moved() -> None:
    before = torch.get_rng_state()
    random_floats((3, 4), device=torch.device("cpu"))
    random_integers(0, 5, (3, 4), device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_values_are_the_same_each_time_and_within_range() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(random_floats((8,), device=cpu), random_floats((8,), device=cpu))
    integers = random_integers(3, 5, (100,), device=cpu)
    assert set(integers.tolist()) == {3, 4}


def test_half_precision_and_devices_without_memory_work() -> None:
    assert random_floats((2,), device=torch.device("cpu"), dtype=torch.float16).dtype == torch.float16
    assert random_integers(0, 2, (2,), device=torch.device("meta")).is_meta
