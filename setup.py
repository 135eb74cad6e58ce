"""Build the C kernels (setup.cfg cannot). Without a compiler, mpifl is installed without them."""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
FOLDER = Path("mpifl/kernels")
NAMES = "common.h", "dispatch.h", "reductions.c", "training.c", "training_simd.inc", "channels_last.c"
SOURCES = [str(FOLDER / name) for name in (*NAMES, "channels_last_simd.inc")]
# bindings.py computes the hash again at import and does not use libraries built from other sources
HASH = hashlib.sha256(b"".join(Path(name).read_bytes() for name in SOURCES)).hexdigest()[:12]


def extension(name: str, *flags: str) -> Extension:
    """Return the library built from one C file; every library is rebuilt when any source changes."""
    given = [*FLAGS, *flags, *os.environ.get("CFLAGS", "").replace("\\", "/").replace('"', "'").split()]
    return Extension(
        f"mpifl.kernels.{name}",
        [str(FOLDER / f"{name}.c")],
        depends=[*SOURCES, "setup.py"],
        define_macros=[("BUILD", f'"{HASH}|{" ".join(given)}"')],
        extra_compile_args=[*FLAGS, *flags],
        optional=True,
    )


setup(
    ext_modules=[
        extension("reductions", "-ffp-contract=off"),
        extension("training", "-ffp-contract=fast", "-Wno-psabi"),
        extension("channels_last", "-ffp-contract=fast", "-Wno-psabi"),
    ]
)
