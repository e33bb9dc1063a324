"""The clocks of `python -m benchmarks.gpu`, with fake CUDA events."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_parts import hogwild, layer
from benchmarks.gpu_parts.layer import Features, Layer
from benchmarks.gpu_parts.timing import PeakMemory, Timer

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeEvent:
    """Fake CUDA event; `clock` is the clock of the device, in milliseconds."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def tick(milliseconds: float) -> None:
    FakeEvent.clock += milliseconds


@pytest.fixture
def gpu_timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """Return a timer of a fake GPU, with a long flush and sleep before each measurement."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Timer, "queue_ahead", lambda timer, lead: tick(1000 * lead + 10))
    return Timer(torch.device("cuda"), at_least=3, at_most=3)


def test_events_exclude_the_flush_and_the_sleep(gpu_timer: Timer) -> None:
    assert gpu_timer.median(lambda: tick(3)) == pytest.approx(3e-3)
    costs = iter([100, 100, 1, 7, 2])  # two warm-up runs
    assert gpu_timer.median(lambda: tick(next(costs))) == pytest.approx(2e-3)


def test_set_up_excludes_the_layers(gpu_timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Layer(Features(2, 2, 16, torch.float32, layer.rotary_of(16)), torch.device("cpu"), num_layers=4)
    segments = layer.hogwild(made, 2, 128, spare=8)
    made.step(segments)
    prepare, costs = made.cache.prepare, iter([9.0, 5.0, 5.0, 6.0])  # per layer
    monkeypatch.setattr(made.cache, "prepare", lambda segments: (tick(2), prepare(segments))[1])
    monkeypatch.setattr(Layer, "attend", lambda made, layer_idx: tick(next(costs)))
    assert hogwild.step_times(gpu_timer, made, segments, hogwild.GpuClock) == pytest.approx(2e-3 + 9e-3 - 5e-3)


def test_peak_memory_excludes_what_was_allocated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"now": 100, "peak": 900}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sizes["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: sizes.update(peak=sizes["now"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: sizes["peak"])
    memory = PeakMemory(torch.device("cuda"))
    assert memory.figures() == {"peak_bytes": 0}
    sizes["peak"] = 350
    assert memory.figures() == {"peak_bytes": 250}
    assert PeakMemory(torch.device("cpu")).figures() == {}
