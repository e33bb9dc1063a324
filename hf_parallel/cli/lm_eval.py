"""`hf-parallel lm-eval`: the command line of lm-evaluation-harness with the backend `hf-parallel`.

For releases of lm-eval that do not load models of other packages (0.4.13 and earlier).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Register the backend and run lm-eval with the given arguments.

    Raises
    ------
    ImportError
        If lm-eval is not installed.
    """
    import hf_parallel.evaluation.lm_eval  # noqa: F401 (registers the backend)

    from lm_eval.__main__ import cli_evaluate  # isort: skip (the import above says which extra is missing)

    given, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = given
    return 0
