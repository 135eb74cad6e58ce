"""What setup.cfg cannot say: C kernels, the tag of a wheel, the version of a checkout, the long description.

The kernels are plain libraries, loaded by ctypes: one wheel serves all versions of Python. Without a compiler
mpifl is installed without kernels.
"""

import hashlib
import os
import re
import runpy
from email.parser import HeaderParser
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
FOLDER = Path("mpifl/kernels")
NAMES = "common.h", "dispatch.h", "reductions.c", "training.c", "training_simd.inc", "channels_last.c"
SOURCES = [str(FOLDER / name) for name in (*NAMES, "channels_last_simd.inc")]
LIBM = FOLDER / "glibc.h"  # not in the hash: it changes no number
# bindings.py computes the hash again at import and does not use libraries built from other sources
HASH = hashlib.sha256(b"".join(Path(name).read_bytes() for name in SOURCES)).hexdigest()[:12]


def extension(name: str, *flags: str) -> Extension:
    """Return the library built from one C file; every library is rebuilt when any source changes."""
    given = [*FLAGS, *flags, *os.environ.get("CFLAGS", "").replace("\\", "/").replace('"', "'").split()]
    return Extension(
        f"mpifl.kernels.{name}",
        [str(FOLDER / f"{name}.c")],
        depends=[*SOURCES, str(LIBM), "setup.py"],
        define_macros=[("BUILD", f'"{HASH}|{" ".join(given)}"')],
        extra_compile_args=["-include", str(LIBM), *FLAGS, *flags],
        libraries=["m"],
        optional=True,
    )


class Libraries(build_ext):
    """Libraries that no version of Python is part of, nor of their names."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{os.path.join(*fullname.split('.'))}.so"


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def version() -> str:
    """Return the version of a source archive, or of the checkout; the release stands in mpifl/__init__.py."""
    if Path("PKG-INFO").is_file():
        return HeaderParser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))["Version"]
    (release,) = re.findall(r'^__version__ = "(.+)"$', Path("mpifl/__init__.py").read_text(), re.MULTILINE)
    of_checkout = runpy.run_path("mpifl/core/version.py")["of_checkout"]
    return of_checkout(Path(), release) if Path(".git").exists() else release


def description() -> str:
    """Return README.md for a package index: links to pages become names for `mpifl docs`, others text."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    installed = r"docs/(?!notes|reproductions)([^)#]+?)(?:/README)?\.md"
    text = re.sub(rf"\[([^]]+)\]\({installed}(?:#[^)]*)?\)", r"\1 (`mpifl docs \2`)", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    version=version(),
    long_description=description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel},
    ext_modules=[
        extension("reductions", "-ffp-contract=off"),
        extension("training", "-ffp-contract=fast", "-Wno-psabi"),
        extension("channels_last", "-ffp-contract=fast", "-Wno-psabi"),
    ],
)
