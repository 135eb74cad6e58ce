"""A run imports what it needs: on a shared file system every import costs all ranks."""

from __future__ import annotations

from support import toy
from support.runs import CONFIG

HEAVY = ("torchvision", "transformers", "peft", "umap", "ot", "matplotlib", "PIL", "torch._dynamo", "sympy")
PROGRAM = f"""
import gc, runpy, sys
try:
    runpy.run_module("mpifl", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code, [name for name in {HEAVY!r} if name in sys.modules], gc.get_freeze_count() > 100_000)
"""


def test_a_run_of_fedavg_on_digits_imports_nothing_heavy_and_ends_at_once(mpirun, tmp_path):
    """What PyTorch has made is not looked through when Python ends, which took half a second of each rank."""
    arguments = ["run", CONFIG, "--quiet", "--output.folder", tmp_path]
    done = mpirun(None, "-c", PROGRAM, *arguments, env=toy.PYTHONPATH, timeout=300, fresh=True)
    assert done.stdout.strip() == "0 [] True", done.stderr
