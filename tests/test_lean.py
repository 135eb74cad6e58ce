"""A run imports what it needs: on a shared file system every import costs all ranks."""

from __future__ import annotations

from support import toy
from support.runs import CONFIG

HEAVY = ("torchvision", "transformers", "peft", "umap", "ot", "matplotlib", "PIL", "torch._dynamo", "sympy")
PROGRAM = f"""
import sys
from mpifl.cli import main
code = main(sys.argv[1:])
print(code, [name for name in {HEAVY!r} if name in sys.modules])
"""


def test_a_run_of_fedavg_on_digits_imports_nothing_heavy(mpirun, tmp_path):
    arguments = ["run", CONFIG, "--quiet", "--output.folder", tmp_path]
    done = mpirun(None, "-c", PROGRAM, *arguments, env=toy.PYTHONPATH, timeout=300)
    assert done.stdout.strip() == "0 []", done.stderr
