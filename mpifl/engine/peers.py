"""Clients that another one looks at in a probe."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpifl.core.client import Client, Peer
from mpifl.training import LocalClient

from .payload import Payload


class CountedPeer(Peer):
    """A peer whose data are at hand; counts what a real exchange through the server would send."""

    def __init__(
        self,
        me: int,
        them: LocalClient,
        traffic: dict[tuple[str, str, int], tuple[int, int]],
        payload: Payload,
    ) -> None:
        self.id, self._me, self._them, self._traffic, self._payload = them.id, me, them, traffic, payload

    def _count(self, kind: str, direction: str, client: int, tensor: torch.Tensor) -> None:
        numbers, messages = self._traffic.get((kind, direction, client), (0, 0))
        self._traffic[kind, direction, client] = (numbers + tensor.numel(), messages + 1)

    def tell(self, payload: torch.Tensor) -> None:
        """Count an upload of the asking client."""
        self._count("embedding", "up", self._me, payload)

    def ask(
        self, payload: torch.Tensor, answer: Callable[[Client, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Count the payload up and down and the answer up."""
        self._count("extractor", "up", self._me, payload)
        self._count("extractor", "down", self.id, payload)
        out = answer(self._them, self._payload.rounded(payload))
        self._count("embedding", "up", self.id, out)
        return self._payload.rounded(out)
