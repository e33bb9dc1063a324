"""Configurations run one by one until the time is over: none is dropped without a word, none takes others with it."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .timing import Deadline, OutOfTimeError

OUT_OF_TIME = "out of time"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, eq=False)
class Case:
    """One configuration: what it is (ready for JSON), and the function that measures it."""

    settings: dict[str, Any]
    run: Callable[[], dict[str, Any]]


def run_cases(cases: Iterable[Case], deadline: Deadline, report: Callable[[dict[str, Any]], None]) -> None:
    """Run cases in order, giving to `report` the settings of each with its figures, or why there are none."""
    for case in cases:
        figures = {"not_measured": OUT_OF_TIME} if deadline.left <= 0 else attempt(case.run)
        report(case.settings | figures)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures that `run()` gives, `not_measured` with the reason, or `error` where it fails."""
    try:
        return run()
    except OutOfTimeError:
        return {"not_measured": OUT_OF_TIME}
    except torch.OutOfMemoryError:
        return {"not_measured": OUT_OF_MEMORY}
    except Exception as error:  # whatever fails is a finding; the other configurations are measured all the same
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(limit=-4)}
    finally:
        _release()


def fits(num_bytes: float, device: torch.device) -> bool:
    """Whether so many bytes are free on a GPU, with some to spare; elsewhere there is only trying."""
    if device.type != "cuda":
        return True
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return num_bytes < 0.92 * (torch.cuda.mem_get_info(device)[0] + held_back)


def _release() -> None:
    """Give memory back where half of a GPU is taken; always would cost more than many a measurement."""
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError):  # of a GPU that a kernel has broken, which the case has reported
        if torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1] / 2:
            gc.collect()
            torch.cuda.empty_cache()
