"""``nereus run`` over the simulated world: configuration, scripted device events, steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from nereus_core.cluster import Cluster, Device
from nereus_core.config import NereusConfig, validated
from nereus_core.device_specs import DEVICE_SPECS, LINK_SPECS
from nereus_core.errors import ConfigError
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim import models
from nereus_core.sim.clock import VirtualClock
from nereus_core.sim.job import SimJob
from nereus_core.sim.pace import Script
from nereus_core.workload import ALGORITHMS, FLOAT32, Algorithm, Job, ModelStage

_PLACEMENT = re.compile(r"(tp\d+pp\d+)dp(\d+)")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SimJobConfig(_Section):
    """The section ``job`` for adapter ``sim``."""

    algorithm: Algorithm = "grpo"
    model: str = "TINY"
    """A name in `nereus_core.sim.models`; its state is held in host memory."""
    steps: int = Field(8, ge=1)
    global_batch: int = Field(16, ge=1)
    max_prompt_tokens: int = Field(64, ge=1)
    max_response_tokens: int = Field(1024, ge=1)
    response_tokens: tuple[float, ...] = (64.0,)
    """Mean response length by step; the last goes on."""
    plan: Mapping[str, str] = Field(default_factory=dict)
    """Model-stage -> ``tp2pp1dp2``, packed from the first device; ``tp1pp1dp1`` where absent."""


class SimEvent(_Section):
    """What happens to devices after a step."""

    step: int
    take: tuple[str, ...] = ()
    """Announced to leave."""
    kill: tuple[str, ...] = ()
    """Lost without notice."""
    give: tuple[str, ...] = ()
    """Returned."""


class SimBackendConfig(_Section):
    """The section ``backend`` for adapter ``sim``."""

    nodes: int = Field(1, ge=1)
    devices_per_node: int = Field(4, ge=1)
    device: str = "cpu-seat"
    intra_node: str = "loopback"
    inter_node: str = "loopback"
    events: tuple[SimEvent, ...] = ()


class SimLaunched:
    """A simulated job on a virtual clock. Implements `nereus_core.launched.Launched`."""

    def __init__(self, running: SimJob, steps: int, events: tuple[SimEvent, ...]) -> None:
        self.handle = running
        self._steps, self._events = steps, events

    @classmethod
    def of(cls, config: NereusConfig) -> Self:
        """Start what a configuration describes; raises ConfigError for what it cannot be."""
        job_config = validated(SimJobConfig, config.job, at="job")
        backend = validated(SimBackendConfig, config.backend, at="backend")
        spec = getattr(models, job_config.model, None)
        if spec is None:
            raise ConfigError("job.model", f"{job_config.model!r} is not in nereus_core.sim.models")
        for key, names, known in (
            ("device", [backend.device], DEVICE_SPECS),
            ("intra_node", [backend.intra_node, backend.inter_node], LINK_SPECS),
        ):
            for name in names:
                if name not in known:
                    raise ConfigError(
                        f"backend.{key}", f"{name!r} is unknown; known: {', '.join(known)}"
                    )
        job = Job(
            workload=ALGORITHMS[job_config.algorithm](),
            models={"actor": spec, "ref": spec, "critic": spec.as_critic("critic")},
            cluster=Cluster.homogeneous(
                backend.nodes,
                backend.devices_per_node,
                DEVICE_SPECS[backend.device],
                LINK_SPECS[backend.intra_node],
                LINK_SPECS[backend.inter_node],
            ),
            global_batch=job_config.global_batch,
            max_prompt_tokens=job_config.max_prompt_tokens,
            max_response_tokens=job_config.max_response_tokens,
            precision=FLOAT32,
            num_steps=job_config.steps,
        )
        lengths = job_config.response_tokens
        script = Script(config.seed, lambda step: lengths[min(step, len(lengths) - 1)])
        plan = _plan(job, job_config.plan)
        running = SimJob(job, plan, script=script, clock=VirtualClock())
        return cls(running, job_config.steps, backend.events)

    @property
    def finished(self) -> bool:
        """Whether all configured steps have run."""
        return self.handle.steps >= self._steps

    def step(self) -> Mapping[str, float]:
        """Run one step, then what the script says about devices after it."""
        result = self.handle.step()
        for event in self._events:
            if event.step == result.step:
                self.handle.world.drain(Device.parse(d) for d in event.take)
                for device in event.kill:
                    self.handle.fail(Device.parse(device))
                for device in event.give:
                    self.handle.world.give_back(Device.parse(device))
        return {f"{model}/loss": loss for model, loss in result.losses.items()}

    def clock_s(self) -> float:
        """Seconds on the simulated world's clock. Implements `nereus_core.launched.Timed`."""
        return self.handle.world.clock.now_s()

    def close(self) -> None:
        """Nothing outlives a job in memory."""


def _plan(job: Job, wanted: Mapping[str, str]) -> Plan:
    known = {str(stage) for stage in job.workload.stages}
    for stage in wanted:
        if stage not in known:
            raise ConfigError(f"job.plan.{stage}", f"is not one of {', '.join(sorted(known))}")
    return Plan({s: _placement(job, s, wanted.get(str(s))) for s in job.workload.stages})


def _placement(job: Job, stage: ModelStage, text: str | None) -> Placement:
    match = _PLACEMENT.fullmatch(text or "tp1pp1dp1")
    if match is None:
        raise ConfigError(f"job.plan.{stage}", f"got {text!r}; expected e.g. 'tp2pp1dp2'")
    layout, dp = Layout.parse(match[1]), int(match[2])
    devices = job.cluster.healthy[: layout.num_devices * dp]
    if len(devices) < layout.num_devices * dp:
        raise ConfigError(
            f"job.plan.{stage}",
            f"{text} takes {layout.num_devices * dp} devices, the cluster has {len(devices)}",
        )
    return Placement.packed(layout, devices)
