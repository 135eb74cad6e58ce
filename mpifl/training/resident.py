"""Samples and states of hosted clients that stay on the device of their rank (`system.hosting: groups`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpifl.core.devices import state_on
from mpifl.core.federation import Split
from mpifl.core.types import State

RESIDENT_SHARE = 0.5  # fraction of a device's free memory that they may take


class ResidentClients:
    """What a rank keeps on its device of the clients that it hosts: samples, and the state of the last visit.

    What does not fit any more is copied for each visit.

    Args:
        device: device of the clients.
        room: bytes that may be kept.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room
        self._splits: dict[tuple[int, str], Split] = {}
        self._states: dict[int, tuple[int, State]] = {}  # client -> visits that it has made, and its state

    def split(self, client: int, name: str, read: Callable[[], Split]) -> Split:
        """Return samples of a client on the device; `read` copies them there the first time."""
        address = client, name
        if (found := self._splits.get(address)) is not None:
            return found
        split = read()
        if (size := split.x.nbytes + split.y.nbytes) <= self.room:
            self.room -= size
            self._splits[address] = split
        return split

    def state(self, client: int, visit: int, load: Callable[[], State]) -> State:
        """Return a client's state after `visit` visits on the device; `load` reads it from its file."""
        made, state = self._states.get(client, (-1, {}))
        return state if made == visit else state_on(load(), self.device)

    def keep_state(self, client: int, visit: int, state: State) -> None:
        """Keep a copy of a client's state after `visit` visits, in place of that of an earlier visit."""
        self.room += _state_bytes(self._states.pop(client, (0, {}))[1])
        if (size := _state_bytes(state)) <= self.room:
            self.room -= size
            self._states[client] = visit, {name: t.to(self.device, copy=True) for name, t in state.items()}


def _state_bytes(state: State) -> int:
    return sum(t.nbytes for t in state.values())
