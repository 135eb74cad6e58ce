"""Builds the loops in C, which setup.cfg cannot name; without a compiler mpifl is installed without them."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
setup(
    ext_modules=[
        Extension(
            "mpifl.core.kernels",
            ["mpifl/core/kernels.c"],
            extra_compile_args=[*FLAGS, "-ffp-contract=off"],
            optional=True,
        ),
        Extension(
            "mpifl.core.layers",
            ["mpifl/core/layers.c"],
            depends=["mpifl/core/layers.h"],
            extra_compile_args=[*FLAGS, "-ffp-contract=fast", "-Wno-psabi"],
            optional=True,
        ),
    ]
)
