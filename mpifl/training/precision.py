"""The number format of a training step: float32, or bfloat16 in the layers that PyTorch's autocast knows.

In bfloat16 a step's matrix products and convolutions, forward and backward, are of numbers with 8 bits of
mantissa; losses, gradients of the weights, weights, updates and sums stay float32. The kernels know float32
only, so PyTorch trains.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext

import torch

from mpifl.core.errors import require

FLOAT32, BFLOAT16 = "float32", "bfloat16"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 by instructions of its own, not by emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `UserError` where a device, this rank's, cannot train in the format that is asked for."""
    what = "processor has neither AVX512-BF16 nor AMX" if device.type == "cpu" else "GPU has no bfloat16"
    remedy = f"the {what} on {socket.gethostname()}; take {FLOAT32}"
    require(precision == FLOAT32 or has_bfloat16(device), "local.precision", precision, remedy)


def forward_pass(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return what the loss of a training step is computed in; the backward pass follows its formats.

    Weights are cast anew in each step: a cache would hold what updates, stacks or captured graphs change.
    """
    if precision == FLOAT32:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
