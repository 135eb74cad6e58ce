"""The number format of a training step: float32, TF32, or bfloat16 in the layers that autocast knows.

In bfloat16 a step's matrix products and convolutions, forward and backward, are of numbers with 8 bits of
mantissa; in TF32, of float32 numbers of which a GPU reads the first 10. Losses, gradients of the weights,
weights, updates and sums stay float32. The kernels know float32 only, so PyTorch trains. PyTorch's own
default on a GPU is TF32 in convolutions; here they are float32, too, unless TF32 is asked for.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mpifl.core import instructions
from mpifl.core.errors import require

FLOAT32, TF32, BFLOAT16 = PRECISIONS = ("float32", "tf32", "bfloat16")
LACKS = {
    (TF32, "cpu"): "processor has no TF32, which is GPUs'",
    (TF32, "cuda"): "GPU has no TF32",
    (BFLOAT16, "cpu"): "processor has neither AVX512-BF16 nor AMX",
    (BFLOAT16, "cuda"): "GPU has no bfloat16",
}
AMPERE = 8  # compute capability of the first GPUs with TF32


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 by instructions of its own, not by emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and not instructions.limited()


def has_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `UserError` where a device, this rank's, cannot train in the format that is asked for."""
    if precision == FLOAT32:
        return
    there = has_tf32(device) if precision == TF32 else has_bfloat16(device)
    lacks = LACKS[precision, device.type]
    if precision == BFLOAT16 and device.type == "cpu" and instructions.limited():
        lacks = f"limit {instructions.VARIABLE} leaves neither AVX512-BF16 nor AMX"
    remedy = f"the {lacks} on {socket.gethostname()}; take {FLOAT32}"
    require(there, "local.precision", precision, remedy)


def set_tf32(device: torch.device, on: bool) -> None:
    """Let a GPU's matrix products and convolutions take TF32, or not, from here on; do nothing on a CPU."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = on
        torch.backends.cudnn.allow_tf32 = on


@contextmanager
def training_in(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in TF32 where that is the precision; float32 again after the block."""
    if precision != TF32:
        yield
        return
    set_tf32(device, True)
    try:
        yield
    finally:
        set_tf32(device, False)


def under_autocast() -> bool:
    """Return whether the code around has turned autocast on, for processors or GPUs."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def forward_pass(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return what the loss of a training step is computed in; the backward pass follows its formats.

    Weights are cast anew in each step: a cache would hold what updates, stacks or captured graphs change.
    """
    if precision != BFLOAT16:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
