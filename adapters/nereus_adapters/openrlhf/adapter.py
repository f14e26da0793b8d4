"""OpenRLHFAdapter: the four primitives as changes of a live job's groups and engines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from nereus_adapters.openrlhf.calls import ask
from nereus_adapters.openrlhf.inside import peak_bytes
from nereus_adapters.openrlhf.running import Running
from nereus_core.adapter import Boundary
from nereus_core.cluster import Device
from nereus_core.device_specs import CPU_SEAT
from nereus_core.observation import Observation, TokenStats, clip_ratio
from nereus_core.units import UnitMap
from nereus_core.workload import Job, ModelStage


class OpenRLHFAdapter:
    """Reads a live job. Implements `nereus_core.adapter.Adapter`."""

    name = "openrlhf"

    def __init__(self, running: Running, job: Job) -> None:
        self._running, self._job = running, job

    # --- Reading --------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts."""
        return self._job

    def units(self) -> UnitMap:
        """Units alive now, read off the trainer's groups and engines."""
        return self._running.units()

    def observe(self) -> Observation:
        """Drain what was heard since the last call."""
        heard = self._running.signals.drain()
        return Observation(
            step=heard.step,
            step_s=heard.step_s,
            stage_s=heard.stage_s,
            prompt_tokens=heard.prompts,
            response_tokens=TokenStats.of(heard.responses),
            peak_bytes=self._peaks(),
            healthy=frozenset(self._job.cluster.healthy),
            metrics=heard.metrics,
            clip_ratio=clip_ratio(heard.responses, self._job.max_response_tokens),
        )

    def _peaks(self) -> dict[Device, int]:
        """Most bytes that torch allocated on the device of each rank; ranks are idle here."""
        if self._job.cluster.device_spec is CPU_SEAT:
            return {}
        found: dict[Device, int] = {}
        for group in self._running.groups.values():
            ranks = group._actor_handlers
            peaks = ask(ranks, peak_bytes, awaited="peak memory of ranks",
                        timeout_s=self._running.section.call_s)  # fmt: skip
            for rank, peak in zip(ranks, peaks, strict=True):
                (device,) = self._running.devices_of(rank)
                found[device] = found.get(device, 0) + (peak or 0)
        return found

    # --- Boundary -------------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages at the safe boundary: after training and weight synchronization."""
        held = self._running.gate.close_on(stages, timeout_s)
        try:
            yield Boundary(held, self._running.signals.step + 1)
        finally:
            self._running.gate.open()

    def close(self) -> None:
        """Hold nothing: the job is not the adapter's."""
