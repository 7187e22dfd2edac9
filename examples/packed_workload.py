"""A workload whose batches are packed: documents end to end in one tensor, without a leading batch dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import brim

LENGTHS = [20 + (37 * document) % 180 for document in range(2_000)]  # tokens of each document in the data set

Packed = Mapping[str, torch.Tensor]


class PackedClassifier(brim.Workload):
    """Classifies whole documents; `tokens` is [total tokens], `offsets` is [documents + 1]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.embedding = nn.Embedding(1_000, 128, device=device)
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
        self.head = nn.Linear(128, 4, device=device)

    def make_batch(self, size: int) -> Packed:
        """The worst case of this size: the longest documents."""
        lengths = torch.tensor([0, *sorted(LENGTHS, reverse=True)[:size]], device=self.device)
        offsets = lengths.cumsum(0)
        return {"tokens": torch.zeros(int(offsets[-1]), dtype=torch.long, device=self.device), "offsets": offsets}

    def batch_length(self, batch: Packed) -> int:
        """Documents, not tokens: the first tensor's leading dimension would be the wrong count."""
        return len(batch["offsets"]) - 1

    @torch.no_grad()
    def step(self, batch: Packed) -> torch.Tensor:
        hidden = self.layers(self.embedding(batch["tokens"]))  # [total tokens, 128]
        documents = torch.segment_reduce(hidden, "mean", offsets=batch["offsets"])  # [documents, 128]
        scores: torch.Tensor = self.head(documents)
        return scores

    def modules(self) -> Sequence[nn.Module]:
        return (self.embedding, self.layers, self.head)

    def largest_size(self) -> int:
        """A batch of more documents than there are makes no sense."""
        return len(LENGTHS)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = brim.SearchSettings(memory_limit_bytes=128 * 2**20, objective="largest")
    plan = brim.find_plan(PackedClassifier(device), settings)
    sizes = ", ".join(f"{probe.batch_size} {probe.verdict}" for probe in plan.probes)
    print(f"{plan.batch_size} documents: {plan.reason}\nprobes: {sizes}")
