"""Copies of tensors between a GPU and main memory: messages and state to the device, reports back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from .federation import Split
from .types import Message, Report, State

CPU = torch.device("cpu")
ALIGNMENT = 64  # bytes, of PyTorch's own tensors
SHARE = 0.25  # fraction of a device's free memory that the uploads of a round may take


def to_main_memory(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in main memory, copied from a GPU through page-locked memory."""
    home = start_to_main_memory(value)
    if home is not value:
        wait(value.device)
    return home


def start_to_main_memory(value: torch.Tensor) -> torch.Tensor:
    """Start the copy of a tensor to main memory; it is complete after `wait(value.device)`."""
    if not value.is_cuda:
        return value.to(CPU)
    return torch.empty_like(value, device=CPU, pin_memory=True).copy_(value, non_blocking=True)


def wait(device: torch.device) -> None:
    """Block until the current stream of a GPU is empty; do nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload_budget(device: torch.device, ranks: int) -> int:
    """Return the bytes that the uploads of a round may take on a device; see `memory_share`."""
    return memory_share(device, ranks, SHARE)


def memory_share(device: torch.device, ranks: int, share: float) -> int:
    """Return this rank's part of a share of the memory that is free on a device or cached by this process.

    Args:
        device: the device; 0 bytes for the CPU.
        ranks: ranks of this node that use its devices.
        share: the share, in (0, 1].
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    again = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sharing = ceil(ranks / torch.cuda.device_count())
    return int(share * (free + again) / sharing)


def use_deterministic_algorithms(device: torch.device) -> None:
    """Use deterministic algorithms on a GPU; call it before anything is computed there.

    Operations without a deterministic form warn, and their bits may differ between runs.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # not needed: nothing reads memory that it did not write
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def tensors_on(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the mapping with its tensors on `device`."""
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor aligned as PyTorch's own tensors are; a copy if it is not.

    The last bits of BLAS products depend on where their factors begin in a cache line.
    """
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()


def message_on(message: Message, device: torch.device) -> Message:
    """Return a message whose rows are on `device`, aligned: a row may begin anywhere in a table."""
    if device != CPU:
        return replace(message, vectors=tensors_on(message.vectors, device))
    if all(rows.data_ptr() % ALIGNMENT == 0 for rows in message.vectors.values()):
        return message
    return replace(message, vectors={name: aligned(rows) for name, rows in message.vectors.items()})


class RowsOnDevice:
    """Copies the messages of a step to a device; rows that many clients download are copied once.

    The last few rows stay there until `clear`, which the end of a `with` block calls. Nobody may write to
    them, as on a CPU, where all clients read the same memory.

    Args:
        device: device of the clients.
    """

    MOST = 4  # rows, or tables of rows, that are kept

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # address in main memory and form -> the rows there, kept alive, and their copy on the device
        self._kept: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> None:
        """Begin with nothing on the device."""

    def __exit__(self, *error: object) -> None:
        """Leave nothing there."""
        self.clear()

    def clear(self) -> None:
        """Forget all rows: in the next step the same address may hold other numbers."""
        self._kept.clear()

    def message(self, message: Message) -> Message:
        """Return a message whose rows are on the device."""
        if self.device == CPU:
            return message_on(message, self.device)
        return replace(message, vectors={name: self._there(rows) for name, rows in message.vectors.items()})

    def _there(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device != CPU:
            return rows.to(self.device)
        address = rows.data_ptr(), rows.shape, rows.stride()
        found = self._kept.pop(address, None) or (rows, rows.to(self.device))
        self._kept[address] = found
        while len(self._kept) > self.MOST:
            del self._kept[next(iter(self._kept))]
        return found[1]


def state_on(state: State, device: torch.device) -> State:
    """Return a client's state on `device`."""
    return state if device == CPU else tensors_on(state, device)


def split_on(split: Split, device: torch.device) -> Split:
    """Return samples on `device`."""
    return Split(split.x.to(device, non_blocking=True), split.y.to(device, non_blocking=True))


def report_to_main_memory(report: Report, device: torch.device, vectors: bool = True) -> Report:
    """Return a report with its notes, and its vectors, in main memory.

    Args:
        report: a report made on `device`.
        device: device of the client.
        vectors: False leaves the vectors on the device.
    """
    if device == CPU:
        return report
    notes, heavy = (
        _start_to_main_memory(report.notes),
        _start_to_main_memory(report.vectors) if vectors else report.vectors,
    )
    wait(device)
    return replace(report, vectors=heavy, notes=notes)


def _start_to_main_memory(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: start_to_main_memory(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}
