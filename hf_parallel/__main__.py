"""`python -m hf_parallel`: the command `hf-parallel`."""

import sys

from hf_parallel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
