"""Entry point of the `hf-parallel` program, outside the package: importing the package imports torch, which is slow."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `hf_parallel.cli.main.main`. Exit quietly on Ctrl-C, also during the import.

    Returns
    -------
    int
        The exit status.
    """
    try:
        from hf_parallel.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
