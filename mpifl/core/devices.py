"""What lies on a device: how it comes to main memory, and how much may stay."""

from __future__ import annotations

from math import ceil

import torch

CPU = torch.device("cpu")
SHARE = 0.25  # of a device's free memory that the uploads of a round may take


def staged(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in main memory, from a GPU through page-locked memory; what is there is not copied."""
    home = sent_home(value)
    if home is not value:
        wait(value.device)
    return home


def sent_home(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is in main memory once its device was waited for."""
    if not value.is_cuda:
        return value.to(CPU)
    return torch.empty_like(value, device=CPU, pin_memory=True).copy_(value, non_blocking=True)


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for; others are never late."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def room(device: torch.device, ranks: int) -> int:
    """Return the bytes that this process's uploads of a round may take on a device: a share of what is free
    there, or this process's to use again.

    Args:
        ranks: of this node that use its devices.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    again = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sharing = ceil(ranks / torch.cuda.device_count())
    return int(SHARE * (free + again) / sharing)
