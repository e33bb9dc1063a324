"""Folders of the repository, and the import path of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
PYTHONPATH = os.pathsep.join(map(str, (ROOT, HELPERS)))
