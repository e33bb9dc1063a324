"""The program `hf-parallel`, beside the package: whatever imports a part of that imports torch, which takes seconds."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `hf_parallel.cli.main.main`; Ctrl-C ends it quietly while it is still being imported, too.

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
