"""Recurrent layers in a trace, as cuDNN runs them: all steps in one kernel, with a reserve kept for the backward.

The CPU runs LSTM, GRU and plain RNN layers by other kernels that keep other tensors. How large cuDNN's reserve is, it
does not document; it is taken as the gates and states of every step, and the trace says that this is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from brim.forecasting.tracer import Tracer

__all__ = ["RECURRENT", "RecurrentKernel"]

# Operation: how many values of the hidden size are kept for each step in training (gates and states), and whether
# there is a cell state beside the hidden one.
RECURRENT = {
    "lstm.input": (6, True),
    "gru.input": (5, False),
    "rnn_tanh.input": (2, False),
    "rnn_relu.input": (2, False),
}
_GUESS = "cuDNN's reserve for recurrent layers is estimated"


class RecurrentKernel:
    """In place of one of `RECURRENT`."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._kept, self._has_cell = RECURRENT[name]

    def __call__(
        self,
        input: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The output of the last layer and the last states."""
        del has_biases, dropout
        self._tracer.facts.guesses.setdefault(_GUESS)
        states = list(hx) if self._has_cell else [hx]
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            input, *states = (part.to(dtype) for part in (input, *states))
            params = [parameter.to(dtype) for parameter in params]
        steps, batch = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
        directions = 2 if bidirectional else 1
        reserved = num_layers * directions * steps * batch * states[0].shape[-1] * self._kept if train else 0
        width = directions * states[0].shape[-1]  # of projected states, where there is a projection
        sequence = input.transpose(0, 1).contiguous() if batch_first else input
        output, *last = _Recurrent.apply(self._tracer, reserved, width, len(states), sequence, *states, *params)
        return (output.transpose(0, 1) if batch_first else output, *last)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, reserved: int, width: int, count: int, input: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states = rest[:count]
        with tracer.imitating("cudnn_rnn"):
            output = input.new_empty((input.shape[0], input.shape[1], width))
            last = [torch.empty_like(state) for state in states]
            reserve = input.new_empty(reserved)
        ctx.save_for_backward(input, output, reserve, *rest)
        ctx.tracer = tracer
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del gradients
        input, _, _, *rest = ctx.saved_tensors
        with ctx.tracer.imitating("cudnn_rnn_backward"):
            made = [torch.empty_like(part) for part in (input, *rest)]
        return None, None, None, None, *made
