"""Bad input on every rank, with one start of Python: `mpirun -n P python refusals.py CONFIG FOLDER CASES`.

CASES is JSON: {case: [options]}. Rank r writes FOLDER/r.json: {case: [exit code, error output]}.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from mpifl.cli import main

config, folder, cases = sys.argv[1:]
said = {}
for case, options in json.loads(cases).items():
    words = io.StringIO()
    with contextlib.redirect_stderr(words):
        code = main(["run", config, "--quiet", *options])
    said[case] = (code, words.getvalue())
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
(Path(folder) / f"{rank}.json").write_text(json.dumps(said))
