"""Builds the loops in C, which setup.cfg cannot name; without a compiler mpifl is installed without them."""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
SOURCES = ["mpifl/kernels/reductions.c", "mpifl/kernels/training.c", "mpifl/kernels/training_simd.inc"]
# as mpifl/kernels/bindings.py takes it again at import: what was built from other sources is not used
HASH = hashlib.sha256(b"".join(Path(name).read_bytes() for name in SOURCES)).hexdigest()[:12]


def extension(name: str, *flags: str) -> Extension:
    """Return a library of one file; all are built anew when any source changes."""
    given = [*FLAGS, *flags, *os.environ.get("CFLAGS", "").replace("\\", "/").replace('"', "'").split()]
    return Extension(
        f"mpifl.kernels.{name}",
        [f"mpifl/kernels/{name}.c"],
        depends=[*SOURCES, "setup.py"],
        define_macros=[("BUILD", f'"{HASH}|{" ".join(given)}"')],
        extra_compile_args=[*FLAGS, *flags],
        optional=True,
    )


setup(
    ext_modules=[
        extension("reductions", "-ffp-contract=off"),
        extension("training", "-ffp-contract=fast", "-Wno-psabi"),
    ]
)
