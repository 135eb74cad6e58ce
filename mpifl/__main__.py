"""Entry point of `python -m mpifl` and of the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    from .cli import main as command_line

    sys.exit(command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
