"""What a device takes its time for once in a process, in a thread of its own while the host does something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

__all__ = ["load_libraries", "start_device"]

# Channels of the convolutions and width of the products: small, and a multiple of what tensor cores take at once.
WIDTH = 64


def start_device(device: torch.device) -> Callable[[], None]:
    """Have CUDA start in a thread, which takes a second, while data and model are read; the result waits for it."""
    if device.type != "cuda" or torch.cuda.is_initialized():
        return lambda: None
    return _in_thread(lambda: torch.zeros(1, device=device).add_(1))


def load_libraries(device: torch.device, dtype: torch.dtype, modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Have cuBLAS, and cuDNN for modules with convolutions, load in a thread; the result waits for it.

    The host, which traces a step meanwhile, has nothing on the device. No memory stays taken: not the workspaces of
    the products either, which whoever comes next takes again.
    """
    if device.type != "cuda":
        return lambda: None
    if device.index is None:  # another thread has a current device of its own
        device = torch.device("cuda", torch.cuda.current_device())
    dimensions = {
        len(layer.kernel_size)
        for module in modules
        for layer in module.modules()
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    }

    # In inference mode nothing passes through autograd's keys, behind which a trace puts kernels of its own.
    @torch.inference_mode()
    def load() -> None:
        with torch.cuda.device(device):
            square = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
            torch.addmm(square[0], square, square)
            torch.bmm(square[None], square[None])
            for count in sorted(dimensions):
                image = torch.ones(1, WIDTH, *[8] * count, dtype=dtype, device=device)
                weight = torch.ones(WIDTH, WIDTH, *[3] * count, dtype=dtype, device=device)
                sides = ([1] * count, [1] * count, [1] * count, False, [0] * count, 1)
                made = torch.ops.aten.convolution(image, weight, None, *sides)
                torch.ops.aten.convolution_backward(made, image, weight, None, *sides, [True, True, False])
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()

    return _in_thread(load)


def _in_thread(start: Callable[[], object]) -> Callable[[], None]:
    """Start it; the result waits for it. What goes wrong there shows again where the device is used."""

    def run() -> None:
        with contextlib.suppress(Exception):
            start()

    thread = threading.Thread(target=run, name="brim-start-device", daemon=True)
    thread.start()
    return thread.join
