"""Sizes of uploads, measured on one client before they are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from support import toy

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilter
from mpifl.algorithms.fedavg import FedAvg
from mpifl.core.parameters import VectorParts
from mpifl.core.rng import Key
from mpifl.core.torch_state import state
from mpifl.core.types import Report
from mpifl.experiment.build import build_server_step
from mpifl.protection.privacy import Privacy
from mpifl.runtime.upload_size import UploadSizes


class Changes(UpdateFilter):
    """Takes denormal numbers as 0 from then on."""

    at_clients = True

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        torch.set_flush_denormal(True)
        return report


@dataclass(frozen=True)
class Own(Privacy):
    def filter(self, parts: VectorParts, key: Key) -> UpdateFilter:
        return Changes()


def test_a_filter_that_changes_a_setting_leaves_it_to_nobody(tmp_path):
    context, before = toy.context_of(toy.config_of(FedAvg(), privacy=Own()), toy.Tiny()), state()
    step = build_server_step(context, ClientStore("test", str(tmp_path)))
    server = step.initialize()
    assert UploadSizes(step).clear(server, step.hooks.reads("reads", server, np.array([0]))[0], 0) > 0
    assert state() == before
