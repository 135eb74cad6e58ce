"""What the uploads of every method are differences from, and what is worked out of what arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import toy
from support.cases import OPTIONS
from support.nightly import mostly_nightly
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import MethodError
from mpifl.core.types import Message, Report
from mpifl.traffic.compression import Payload, TopK
from mpifl.traffic.encoding import base_of, rows_under

METHODS = {name: (name, OPTIONS.get(name, {})) for name in CATALOGUE}
METHODS |= {
    "ifca gradient": ("ifca", {"num_clusters": 2, "variant": "gradient"}),
    "cfl emdcfl": ("cfl", {**OPTIONS["cfl"], "variant": "emdcfl"}),
    "flexcfl emdcfl": ("flexcfl", {"num_groups": 2, "variant": "emdcfl"}),
    "pfedgraph emdcfl": ("pfedgraph", {"variant": "emdcfl"}),
}
SEVERAL = [m for m, (name, _) in METHODS.items() if not CATALOGUE[name]().needs.single_upload]
FEW = (  # of the usual run: what is uploaded in each form
    *("fedavg", "scaffold", "ifca", "ifca gradient", "fedem", "ucfl", "cfl", "pacfl", "emdcfl", "flexcfl"),
    *("cflgp", "fedper", "fedfomo", "fedccfa", "pfedme", "feddrift"),
)
SEVERAL.remove("flt")  # whose clients train as FedAvg's, after statistics that take long


def visits(method: str, folder: Path, **changes) -> list[tuple[Message, Report]]:
    """Return what clients downloaded and reported in a round."""
    name, options = METHODS[method]
    seen = []

    def wrapped(hook, found):
        def called(*args, **named):
            made = found(*args, **named)
            if hook == "local_update":
                seen.append((args[0], made[0]))
            return made

        return called

    algorithm = toy.with_hooks(CATALOGUE[name](**options), wrapped)
    toy.run(algorithm, toy.Tiny(), folder, 1, evaluate=False, **changes)
    return seen


@pytest.mark.parametrize("method", mostly_nightly(SEVERAL, FEW))
def test_what_is_coded_of_an_upload_is_no_longer_than_the_upload(method, tmp_path):
    """A change that were taken for a model would be coded as its difference from that model."""
    for message, made in visits(method, tmp_path):
        for name in {*made.vectors} - {*made.unsent, *CATALOGUE[METHODS[method][0]].statistics}:
            upload = made.vectors[name].reshape(-1, made.vectors[name].shape[-1])
            left = upload - base_of(upload, rows_under(name, made, message))
            assert left.norm() <= 1.0001 * upload.norm() + 1e-6, name


def test_the_uploads_of_fedcuau_are_coded_from_the_model_that_its_client_put_together(tmp_path):
    for message, made in visits("fedcuau", tmp_path):
        for name in {*made.vectors} - {*made.unsent}:
            upload = made.vectors[name][None]
            left = upload - base_of(upload, rows_under(name, made, message))
            assert left.norm() < 0.5 * upload.norm()


UNSENT = ["cfl", "cfl emdcfl", "pfedgraph", "pfedgraph emdcfl", "fedsac", "flexcfl emdcfl"]


@pytest.mark.parametrize("method", UNSENT)
def test_what_is_not_sent_is_worked_out_of_what_arrives(method, tmp_path):
    """Of models and changes that arrive as they are sent, the same; of others, what they are then."""
    name, options = METHODS[method]
    algorithm = CATALOGUE[name](**options)
    for _, made in visits(method, tmp_path):
        sent = {name: x for name, x in made.vectors.items() if name not in made.unsent}
        found = algorithm.unsent_vectors(made, sent)
        assert {*found} == {*made.unsent} & {*made.vectors}
        for name, x in found.items():
            assert_close(x, made.vectors[name], rtol=1e-6, atol=1e-7)
        moved = dict(algorithm.unsent_vectors(made, {name: x + 1 for name, x in sent.items()}))
        if {"delta", "direction"} <= {*moved}:  # a direction has length 1
            direction = moved.pop("direction")
            assert_close(direction.norm(), torch.tensor(1.0))
            assert not torch.allclose(direction, made.vectors["direction"])
        for name, x in moved.items():
            assert_close(x, made.vectors[name] + 1)


@pytest.mark.parametrize(
    "lossy", [{"payload": Payload(compression=TopK(0.1))}, {"payload": Payload("bfloat16")}]
)
def test_a_method_whose_unsent_vectors_cannot_be_worked_out_is_refused(lossy, tmp_path, monkeypatch):
    """CFLGP as a method of one's own that does not declare that it needs exact uploads."""
    declared = CATALOGUE["cflgp"](**METHODS["cflgp"][1]).needs
    assert declared.exact_uploads
    undeclared = replace(declared, exact_uploads=False)
    monkeypatch.setattr(CATALOGUE["cflgp"], "needs", property(lambda self: undeclared))
    with pytest.raises(MethodError, match="profile, which is not sent, cannot be worked out of what arrives"):
        visits("cflgp", tmp_path, **lossy)
