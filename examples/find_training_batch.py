"""The fastest batch size for a training step of your own, on a GPU where there is one, else on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import brim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 512, device=device), torch.zeros(size, dtype=torch.long, device=device)


def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, labels = batch
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


if __name__ == "__main__":
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plan = brim.find(step=step, make_batch=make_batch, model=model, optimizer=optimizer, memory_limit="256MiB")
    print(f"batch size {plan.batch_size}, largest seen to fit {plan.batch_size_max}: {plan.reason}")
    for probe in plan.probes:
        print(f"  {probe.batch_size:>6}  {probe.verdict:<8}  {probe.samples_per_second or 0:>10,.0f} samples/s")
    same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    print(f"weights as before: {same}; optimizer state as before: {len(optimizer.state) == 0}")
