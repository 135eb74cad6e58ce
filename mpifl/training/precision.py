"""The number format of a training step: float32, TF32, or bfloat16 in the layers that autocast supports.

In bfloat16 the matrix products and convolutions of a step, forward and backward, use numbers with 8 bits of
mantissa; in TF32 a GPU reads the first 10 bits of the mantissa of float32 numbers. Losses, gradients of the
weights, weights, updates and sums stay float32. The kernels support float32 only, so in the other formats
PyTorch trains. By default PyTorch uses TF32 in convolutions on a GPU; here they are float32, unless TF32 is
requested.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mpifl.core import instructions
from mpifl.core.errors import require

FLOAT32, TF32, BFLOAT16 = ("float32", "tf32", "bfloat16")
LACKS = {
    (TF32, "cpu"): "processor has no TF32, which is GPUs'",
    (TF32, "cuda"): "GPU has no TF32",
    (BFLOAT16, "cpu"): "processor has neither AVX512-BF16 nor AMX",
    (BFLOAT16, "cuda"): "GPU has no bfloat16",
}
AMPERE = 8  # compute capability of the first GPUs with TF32


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions that multiply bfloat16, without emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and not instructions.limited()


def has_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `UserError` if a device, this rank's, cannot train in the requested format."""
    if precision == FLOAT32:
        return
    there = has_tf32(device) if precision == TF32 else has_bfloat16(device)
    lacks = LACKS[precision, device.type]
    if precision == BFLOAT16 and device.type == "cpu" and instructions.limited():
        lacks = f"limit {instructions.VARIABLE} leaves neither AVX512-BF16 nor AMX"
    remedy = f"the {lacks} on {socket.gethostname()}; use {FLOAT32}"
    require(there, "local.precision", precision, remedy)


def set_tf32(device: torch.device, on: bool) -> None:
    """Turn TF32 on or off for a GPU's matrix products and convolutions; do nothing on a CPU."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = on
        torch.backends.cudnn.allow_tf32 = on


@contextmanager
def training_in(precision: str, device: torch.device) -> Iterator[None]:
    """Compute a block in TF32 if `precision` is TF32, and return to float32 afterwards."""
    if precision != TF32:
        yield
        return
    set_tf32(device, True)
    try:
        yield
    finally:
        set_tf32(device, False)


def under_autocast() -> bool:
    """Return whether autocast is on in the calling code, for CPUs or GPUs."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def forward_pass(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a step computes its loss; the backward pass uses the same formats.

    Weights are cast again in each step: cached casts would be out of date after updates, or in stacks and
    captured graphs.
    """
    if precision != BFLOAT16:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
