"""Where the time of a run goes: the phases of the forward pass, what the device does beside them, the scheduler, the rest."""

from __future__ import annotations

import time
from collections.abc import Sequence

from optimized.checkpoint import Checkpoint
from optimized.device import Sampled
from optimized.model_core import EngineArgs, MakeObserver, TorchCore
from optimized.plan import Plan
from optimized.step import Outcome


class ProfiledCore(TorchCore):
    """An engine core that takes the time of its parts; it costs two looks at the clock a step."""

    def __init__(self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None) -> None:
        super().__init__(checkpoint, args, make_observer)
        self._device_s, self._step_s = 0.0, 0.0
        self._first, self._last = (0.0, 0), (0.0, 0)
        """The time and the processor's clock after the first and after the last step: they say what a cycle lasts."""

    def run(self, plan: Plan) -> Sequence[Sampled]:
        started = time.perf_counter()
        try:
            return super().run(plan)
        finally:
            self._device_s += time.perf_counter() - started
            self._last = self._clocks()
            if self._first[0] == 0.0:
                self._first = self._last

    def step(self) -> Outcome:
        started = time.perf_counter()
        try:
            return super().step()
        finally:
            self._step_s += time.perf_counter() - started

    def _clocks(self) -> tuple[float, int]:
        clock: int = getattr(self.device.model, "clock", 0)  # torch's forward pass has no phases
        return time.perf_counter(), clock

    def shares(self, seconds: float) -> dict[str, float]:
        """What part of so many seconds each part has taken. They add up to 1."""
        (first_s, first_clock), (last_s, last_clock) = self._first, self._last
        found: dict[str, float] = {}
        if last_clock > first_clock:
            cycles: dict[str, int] = getattr(self.device.model, "cycles", {})
            cycle_s = (last_s - first_s) / (last_clock - first_clock)
            found = {name: count * cycle_s / seconds for name, count in cycles.items()}
        found["device, beside these"] = self._device_s / seconds - sum(found.values())
        found["scheduler"] = (self._step_s - self._device_s) / seconds
        found["requests and answers"] = 1.0 - self._step_s / seconds
        return {name: round(share, 4) for name, share in found.items()}
