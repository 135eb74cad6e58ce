"""Several runs in one start of Python: `mpirun -n P python many.py CONFIG FOLDER RUNS [options for all]`.

RUNS is JSON: {id: [options]}. Each is `mpifl run CONFIG --output.folder FOLDER --output.id ID options`, with
FOLDER itself in the place of that word in an option; options that begin with a configuration take that one.
A run named `refused...` must be refused.
"""

import json
import sys

from mpifl.cli import main

config, folder, runs, *common = sys.argv[1:]
for name, options in json.loads(runs).items():
    place = ["--output.folder", folder, "--output.id", name]
    given = [option.replace("FOLDER", folder) for option in options]
    own = [] if given[:1] and not given[0].startswith("--") else [config]
    code = main(["run", *own, *given, "--quiet", *place, *common])
    if code != (2 if name.startswith("refused") else 0):
        sys.exit(f"{name}: exit code {code}")
