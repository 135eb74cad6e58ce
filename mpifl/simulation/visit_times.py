"""Duration of visits, from the sections `delay`, `network`, `availability` and `devices`."""

from __future__ import annotations

from mpifl.core.rng import Key

from .availability import Availability, Presence
from .client_devices import Alike, Devices, Fleet
from .delays import Delay
from .durations import VisitDuration
from .network import Network


def visit_duration(
    delay: Delay,
    network: Network,
    availability: Availability,
    key: Key,
    num_clients: int,
    model_bytes: int = 0,
    devices: Devices | None = None,
    fleet: Fleet | None = None,
) -> VisitDuration:
    """Return how long the visits of a run last.

    Args:
        delay: computing times, unless the network defines them.
        network: the links.
        availability: when clients are available.
        key: random key of the system seed.
        num_clients: N, to check files.
        model_bytes: bytes of the whole model in float32.
        devices: the clients' devices; None: all are alike.
        fleet: the device of each client, if already drawn; None draws it.

    Raises:
        UserError: a file does not fit the clients.
    """
    computing, devices = network.computing or delay, devices or Alike()
    computing.check(num_clients)
    network.check(num_clients)
    fleet = devices.fleet(num_clients, key.of("devices")) if fleet is None else fleet
    presence = Presence(availability, key.of("presence"), devices.availability(availability, fleet))
    computing, network = devices.delay(computing, fleet), devices.network(network, fleet)
    return VisitDuration(
        computing, key.of("delay"), network, key.of("network"), presence, model_bytes, fleet.names
    )
