"""Several runs in one start of Python: `mpirun -n P python many.py CONFIG FOLDER RUNS [options for all]`.

RUNS is JSON: {id: [options]}. Each is `mpifl run CONFIG --output.folder FOLDER --output.id ID options`.
"""

import json
import sys

from mpifl.cli import main

config, folder, runs, *common = sys.argv[1:]
for name, options in json.loads(runs).items():
    place = ["--output.folder", folder, "--output.id", name]
    code = main(["run", config, "--quiet", *place, *options, *common])
    if code:
        sys.exit(f"{name}: exit code {code}")
