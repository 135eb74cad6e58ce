"""Options of local training that differ between clients, by device name or client number."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from mpifl.core.errors import UserError, require
from mpifl.core.options import (
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    ShareBelowOne,
)

from .config import LocalConfig

SECTION = "per_client"
_NUMBERS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


@dataclass(frozen=True)
class LocalChanges(Options):
    """Keys of the section `local` that may differ between clients; null uses the value in `local`.

    Attributes:
        epochs: passes over the training data in one visit; overrides `local.steps` as well.
        steps: mini-batches in one visit, instead of `epochs`.
        batch_size: samples per step.
        lr: learning rate of the first server step.
        momentum: momentum of SGD.
        weight_decay: coefficient of weight decay; the gradient gets `weight_decay * w` added.
        augment: `none`, or `crop_flip`.
    """

    epochs: NonNegativeInt | None = None
    steps: NonNegativeInt | None = None
    batch_size: PositiveInt | None = None
    lr: PositiveFloat | None = None
    momentum: ShareBelowOne | None = None
    weight_decay: NonNegativeFloat | None = None
    augment: Literal["none", "crop_flip"] | None = None

    def of(self, local: LocalConfig, key: str) -> LocalConfig:
        """Return the options of a client.

        Args:
            local: options of all clients.
            key: key of these changes in the configuration, for messages.

        Raises:
            UserError: `local` refuses a value, or both epochs and steps are given.
        """
        both = self.epochs is not None and self.steps is not None
        require(not both, f"{key}.steps", self.steps, "epochs are given as well; leave one of them out")
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if self.epochs is not None:
            given["steps"] = None
        try:
            return replace(local, **given)
        except UserError as error:
            raise error.under(key) from None


PerClient = Mapping[str, LocalChanges]  # a client (`3`), a range (`4-7`) or the name of a device -> changes


def given_keys(local: LocalConfig, per_client: PerClient) -> dict[str, dict[str, Any]]:
    """Return the keys of local training that are set: section -> name -> value.

    Args:
        local: options of all clients; those at their defaults are not set.
        per_client: options that differ.
    """
    default = asdict(LocalConfig())
    given = {"local": {name: value for name, value in asdict(local).items() if value != default[name]}}
    for clients, changes in per_client.items():
        own = {name: value for name, value in asdict(changes).items() if value is not None}
        given[f"{SECTION}.{clients}"] = own
    return given


def check_changes(local: LocalConfig, per_client: PerClient, devices: Sequence[str]) -> None:
    """Check the options that differ between clients, without knowing the number of clients.

    Args:
        local: options of all clients.
        per_client: options that differ.
        devices: names of the devices that clients may have.

    Raises:
        UserError: `local` refuses a value, a key names no client and no device, or a client is named twice.
    """
    for name, changes in per_client.items():
        changes.of(local, f"{SECTION}.{name}")
    check_clients(SECTION, per_client, devices)


def check_clients(section: str, given: Collection[str], devices: Sequence[str]) -> None:
    """Check keys that name clients, without knowing the number of clients.

    Args:
        section: the section or key that has them, for messages.
        given: a client (`3`), a range (`4-7`) or the name of a device, each.
        devices: names of the devices that clients may have.

    Raises:
        UserError: a key names no client and no device, or a client is named twice.
    """
    seen: dict[int, str] = {}
    for name in given:
        for client in () if name in devices else _clients(section, name, devices):
            remedy = f"client {client} is in {seen.get(client)} as well; name it once"
            require(client not in seen, section, name, remedy)
            seen[client] = name


def clients_of(
    section: str, given: Collection[str], devices: Sequence[str], num_clients: int
) -> dict[int, str]:
    """Return client -> the key that names it; its number goes before its device.

    Args:
        section: the section or key that has them, for messages.
        given: keys that were checked by `check_clients`.
        devices: the device of each client; empty if all are alike.
        num_clients: N, number of clients.

    Raises:
        UserError: a key names a client that does not exist.
    """
    out = {k: name for k, name in enumerate(devices) if name in given}
    for name in given:
        for k in () if name in devices or _NUMBERS.fullmatch(name) is None else _clients(section, name):
            require(k < num_clients, section, name, f"there are {num_clients} clients, numbered from 0")
            out[k] = name
    return out


def local_configs(
    local: LocalConfig, per_client: PerClient, devices: Sequence[str], num_clients: int
) -> dict[int, LocalConfig]:
    """Return client -> its options, for the clients that `per_client` names.

    Args:
        local: options of all clients.
        per_client: options that differ; those of a client's number override those of its device.
        devices: the device of each client; empty if all are alike.
        num_clients: N, number of clients.

    Raises:
        UserError: a key names a client that does not exist, or `local` refuses a value.
    """
    of_device = {name: per_client[name].of(local, f"{SECTION}.{name}") for name in {*devices} & {*per_client}}
    out = {k: of_device[name] for k, name in enumerate(devices) if name in of_device}
    for k, name in clients_of(SECTION, per_client, devices, num_clients).items():
        if name not in of_device:
            out[k] = per_client[name].of(out.get(k, local), f"{SECTION}.{name}")
    return out


def names_devices(per_client: PerClient) -> bool:
    """Return whether any key is the name of a device."""
    return any(_NUMBERS.fullmatch(name) is None for name in per_client)


def _clients(section: str, name: str, devices: Sequence[str] = ()) -> range:
    """Return the clients that a key names: `3` or `4-7`."""
    found = _NUMBERS.fullmatch(name)
    known = f", or a device: {', '.join(devices)}" if devices else ""
    remedy = f"use the number of a client, as 3, or a range, as 4-7{known}"
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UserError(section, name, remedy)
    return range(int(found[1]), int(found[2] or found[1]) + 1)
