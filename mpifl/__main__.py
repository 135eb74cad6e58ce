"""`python -m mpifl` and the console script: a rank that raises ends the whole job."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    from .cli import main as command_line

    sys.exit(command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
