"""Cases, which run one by one within a time limit. Each is reported, and an error in one does not stop the others."""

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
    """Settings of a configuration, ready for JSON, and the function that measures it."""

    settings: dict[str, Any]
    run: Callable[[], dict[str, Any]]


def run_cases(cases: Iterable[Case], deadline: Deadline, report: Callable[[dict[str, Any]], None]) -> None:
    """Run cases in order; pass to `report` the settings of each with its figures, or the reason if there are none."""
    for case in cases:
        figures = {"not_measured": OUT_OF_TIME} if deadline.left <= 0 else attempt(case.run)
        report(case.settings | figures)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of `run()`, `not_measured` with the reason, or `error` if it fails."""
    try:
        return run()
    except OutOfTimeError:
        return {"not_measured": OUT_OF_TIME}
    except torch.OutOfMemoryError:
        return {"not_measured": OUT_OF_MEMORY}
    except Exception as error:  # an error is a result; the other cases still run
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(limit=-4)}
    finally:
        _release()


def fits(num_bytes: float, device: torch.device) -> bool:
    """Return whether a GPU has this many bytes free, with a margin; True on other devices."""
    if device.type != "cuda":
        return True
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return num_bytes < 0.92 * (torch.cuda.mem_get_info(device)[0] + held_back)


def _release() -> None:
    """Empty the memory pool if it holds half of the GPU; doing so after every case would take too long."""
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError):  # a kernel has broken the GPU, which the case has reported
        if torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1] / 2:
            gc.collect()
            torch.cuda.empty_cache()
