"""What ``nereus run`` drives: steps, and what the configuration says happens to devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from nereus_adapters.torch.config import DeviceEvent, sections
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.setup import start
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError
from nereus_core.plan import Plan


class TorchLaunched:
    """A job on its own seats. Implements `nereus_core.launched.Launched` and `Saves`."""

    def __init__(self, running: TorchJob, steps: int, events: tuple[DeviceEvent, ...]) -> None:
        self.handle: TorchJob = running
        self._steps, self._events = steps, events

    @classmethod
    def of(cls, config: NereusConfig, plan: Plan | None = None) -> Self:
        """Start what a configuration describes; raises ConfigError for what it cannot be."""
        job, backend = sections(config)
        for event in backend.events:
            for device in (*event.take, *event.kill, *event.give):
                try:
                    Device.parse(device)
                except ValueError as error:
                    raise ConfigError("backend.events", str(error)) from error
        return cls(start(config, plan), job.steps, backend.events)

    @property
    def finished(self) -> bool:
        """Whether all configured steps have run."""
        return self.handle.steps_done >= self._steps

    def step(self) -> Mapping[str, float]:
        """Run one step, then what the configuration says about devices after it."""
        running = self.handle
        index = running.steps_done
        metrics = running.step()
        for event in self._events:
            if event.step == index:
                running.take(Device.parse(d) for d in event.take)
                for device in event.kill:
                    running.kill(Device.parse(device))
                if event.give:
                    running.give(Device.parse(d) for d in event.give)
        return metrics

    @property
    def steps_done(self) -> int:
        """RL steps done since the job first began."""
        return self.handle.steps_done

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.handle.save(folder)

    def close(self) -> None:
        """End the job and its seats."""
        self.handle.close()
