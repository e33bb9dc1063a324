"""Adds pages in docs/modes that mkdocs.yml does not list to the navigation, so that a new mode needs no entry there.

A hook of mkdocs, named in mkdocs.yml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Append the pages to the section "Modes"; their headings become their titles."""
    section = next(entry["Modes"] for entry in config["nav"] if "Modes" in entry)
    listed = str(config["nav"])
    pages = (f"modes/{page.name}" for page in sorted((Path(config["docs_dir"]) / "modes").glob("*.md")))
    section += [page for page in pages if page not in listed]
    return config
