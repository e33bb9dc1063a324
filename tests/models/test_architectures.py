"""The table of architectures in the docs equals the capabilities that probing finds."""

from __future__ import annotations

import pytest
from architecture_table import PAGE, make_page


@pytest.mark.slow
def test_page_equals_the_probed_capabilities() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run: python tests/helpers/architecture_table.py"
