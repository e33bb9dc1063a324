"""Engines that wait, so that requests which are submitted one by one are all there at the first step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_parallel.engine import Engine


@contextmanager
def first_step_held() -> Iterator[None]:
    """Let engines run no step until the context ends."""
    release = threading.Event()
    run_step = Engine._step

    def step(engine: Engine) -> None:
        release.wait()
        run_step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_step", step)
        try:
            yield
        finally:
            release.set()
