"""Builds the loops in C, which setup.cfg cannot name; without a compiler mpifl is installed without them."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
setup(
    ext_modules=[
        Extension("mpifl.core.kernels", ["mpifl/core/kernels.c"], extra_compile_args=FLAGS, optional=True)
    ]
)
