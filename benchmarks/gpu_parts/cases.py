"""Cases, which run one by one within a time limit, and the targets for their figures.

Each case is reported, and an error in one does not stop the others.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from hf_parallel.progress import progress_bar

from .models import Models
from .timing import Ceilings, Deadline, OutOfTimeError, Timer

OUT_OF_TIME = "out of time"
OUT_OF_MEMORY = "out of memory"

Figures = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Bench:
    """Objects that all stages share to measure: models, timer, ceilings and deadline."""

    models: Models
    timer: Timer
    ceilings: Ceilings
    deadline: Deadline


@dataclass(frozen=True, eq=False)
class Case:
    """Settings of a configuration, ready for JSON, and the function that measures it."""

    settings: Figures
    run: Callable[[], Figures]


@dataclass(frozen=True)
class Target:
    """All values, one per relevant case, are at most (or at least) `limit`; a value is None if it was not measured."""

    what: str
    values: Callable[[list[Figures]], Iterable[float | None]]
    limit: float
    at_least: bool = False

    def judge(self, cases: list[Figures]) -> Figures:
        """Return the worst value, the number of values, and the status: met, missed or not (fully) measured."""
        values = list(self.values(cases)) if cases else []
        measured = [value for value in values if value is not None]
        worst = (min if self.at_least else max)(measured, default=None)
        status = "met" if measured and len(measured) == len(values) else "not measured"
        if worst is not None and not (worst >= self.limit if self.at_least else worst <= self.limit):
            status = "missed"
        about = {"what": self.what, "limit": self.limit, "at_least": self.at_least, "status": status}
        return about | {"worst": worst, "measured": len(measured), "of": len(values)}


class Stage(Protocol):
    """Sizes of a stage, its cases in order of importance, and its targets. `share`: of the time of a run."""

    share: ClassVar[float]

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield the cases."""

    def targets(self) -> list[Target]:
        """Return the targets."""


def figure(
    name: str, selects: Callable[[Figures], bool] = lambda case: True
) -> Callable[[list[Figures]], Iterable[float | None]]:
    """Return the values of a target: a figure of each selected case that has it, None of cases not measured."""
    return lambda cases: [
        case.get(name) for case in cases if (name in case or "not_measured" in case) and selects(case)
    ]


def run_cases(cases: Iterable[Case], deadline: Deadline) -> Iterator[Figures]:
    """Run cases in order; yield the settings of each with its figures, or the reason if there are none."""
    for case in progress_bar(cases, what="Measuring", unit="cases"):
        yield case.settings | ({"not_measured": OUT_OF_TIME} if deadline.left <= 0 else attempt(case.run))


def attempt(run: Callable[[], Figures]) -> Figures:
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
