"""Calls made for a device that is not here are answered on the host."""

from __future__ import annotations

import torch

from brim.forecasting.ledger import Ledger
from brim.forecasting.tracer import Tracer


def test_a_generator_of_the_device_is_left_out_where_an_overload_must_have_the_argument() -> None:
    generator = torch.Generator().manual_seed(0)  # stands for one of the card, which no host kernel would take
    with Tracer(Ledger(), device_type="mps"):
        for random in (torch.ops.aten.randint.low_generator, torch.ops.aten.randint.low):
            more = {"generator": generator} if random is torch.ops.aten.randint.low_generator else {}
            made = random(0, 10, [8], device=torch.device("mps"), **more)
            assert (made.shape, made.device.type) == ((8,), "mps")
