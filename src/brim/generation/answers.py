"""What a batch came to, on its way back from the device."""

from __future__ import annotations

from typing import Any

import torch

from brim.generation.settings import TokenIds

__all__ = ["Answers"]


class Answers:
    """The new tokens of every row, [rows, max_new_tokens]; read them when they are needed, not before."""

    def __init__(self, produced: torch.Tensor, tokens: TokenIds) -> None:
        self.tokens = tokens
        self._produced = produced
        self._host: torch.Tensor | None = None
        self._arrived: Any = None
        self._read: list[tuple[list[int], bool]] | None = None

    @classmethod
    def empty(cls, rows: int, max_new_tokens: int, tokens: TokenIds, device: torch.device) -> Answers:
        """Room for the answers, filled with padding."""
        return cls(torch.full((rows, max_new_tokens), tokens.pad, dtype=torch.long, device=device), tokens)

    def write(self, rows: torch.Tensor, produced: torch.Tensor, *, at: int) -> None:
        """Put the tokens of a segment in their place."""
        self._produced[rows, at : at + produced.shape[1]] = produced

    def said(self, rows: torch.Tensor, steps: int) -> torch.Tensor:
        """The first tokens of some rows, as written so far."""
        return self._produced[rows, :steps]

    def send(self, steps: int) -> None:
        """Start the way back to the host, without waiting."""
        part = self._produced[:, :steps]
        if part.device.type != "cuda":
            self._host = part
            return
        self._host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self._host.copy_(part, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def token_lists(self) -> list[list[int]]:
        """The answers' tokens, cut before the end token; waits until they are here."""
        return [tokens for tokens, _ in self._rows()]

    def ended(self) -> list[bool]:
        """Which answers ended by themselves rather than at `max_new_tokens`."""
        return [ended for _, ended in self._rows()]

    def _rows(self) -> list[tuple[list[int], bool]]:
        """Every answer's tokens and whether it ended; read when first asked for."""
        if self._read is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            assert self._host is not None, "the answers were never sent"
            self._read = [self._cut(row) for row in self._host.tolist()]
        return self._read

    def _cut(self, row: list[int]) -> tuple[list[int], bool]:
        for position, token in enumerate(row):
            if token in self.tokens.ends:
                return row[:position], True
        return row, False
