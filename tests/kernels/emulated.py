"""The kernels on processors that are not here, emulated by QEMU: they must return the bits of this one.

    python tests/kernels/emulated.py WHEEL...

unpacks wheels for x86-64 and aarch64, calls their kernels (calls.c) and compares. `launch/release` does that.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CALLS = Path(__file__).with_name("calls.c")
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
LIBRARIES = "/usr/aarch64-linux-gnu"  # the C library for aarch64 in Debian's and Ubuntu's packages
OLD = "no fused multiply-add"  # what calls.c says where the training kernels are not used
EMULATED = {  # title -> architecture, command
    "aarch64 (NEON)": ("aarch64", ["qemu-aarch64", "-L", LIBRARIES]),
    "x86-64 with AVX2": ("x86_64", ["qemu-x86_64", "-cpu", "max"]),
    "x86-64 without AVX": ("x86_64", ["qemu-x86_64", "-cpu", "Nehalem"]),
}


def missing() -> str:
    """Return which programs are missing; empty if all are there."""
    programs = [*COMPILERS.values(), *(command[0] for _, command in EMULATED.values())]
    lacking = [name for name in programs if shutil.which(name) is None]
    lacking += [] if platform.machine() == "x86_64" else ["an x86-64 processor"]
    return f"missing: {', '.join(dict.fromkeys(lacking))}" if lacking else ""


def results(folders: dict[str, Path], place: Path) -> dict[str, list[str]]:
    """Return title of a processor -> a line for each call with the hash of its results.

    Args:
        folders: architecture -> folder of its libraries.
        place: folder for programs.
    """
    out = {}
    for arch in folders:
        command = [COMPILERS[arch], "-O1", "-Wall", "-Werror", str(CALLS), "-ldl", "-o", str(place / arch)]
        subprocess.run(command, check=True)
    every = {"this processor": ("x86_64", list[str]())} | EMULATED
    for title, (arch, command) in every.items():
        if arch in folders:
            words = [*command, str(place / arch), str(folders[arch])]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            out[title] = done.stdout.splitlines()
    return out


def unpacked(wheel: Path, place: Path) -> tuple[str, Path]:
    """Unpack the libraries of a wheel; return their architecture and folder."""
    (arch,) = (arch for arch in COMPILERS if wheel.stem.endswith(arch))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / f"of-{arch}", [n for n in archive.namelist() if n.endswith(".so")])
    return arch, place / f"of-{arch}" / "mpifl" / "kernels"


def differences(found: dict[str, list[str]]) -> list[str]:
    """Return a line for each result that is not that of this processor."""
    here = found["this processor"]
    out = []
    for title, lines in found.items():
        expected = [*here[: len(lines) - 1], OLD] if lines[-1] == OLD else here
        pairs = zip(expected, lines, strict=True)
        out += [f"{title}: {line}, here {wanted}" for wanted, line in pairs if wanted != line]
    return out


def main() -> int:
    """Compare the kernels of wheels; the exit code."""
    if lacking := missing():
        print(
            f"emulated.py: {lacking} (on Debian: apt-get install gcc-aarch64-linux-gnu qemu-user)",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as place:
        found = results(dict(unpacked(Path(wheel), Path(place)) for wheel in sys.argv[1:]), Path(place))
    for title, lines in found.items():
        print(f"{title}: {len(lines)} lines, the last: {lines[-1]}")
    different = differences(found)
    print("\n".join(different) or "equal bits")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
