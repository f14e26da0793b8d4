"""Real ``python -m verl.trainer.main_ppo`` jobs on CPU, each run once for all its tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from verl_cpu.assets import make_assets
from verl_cpu.command import Ran, overrides, run_job

from nereus_core.events import Event, read_events

STEPS = 5
JOB_S = 540
"""A job of five steps takes 60 to 100 s on two cores that do nothing else."""
GRPO_PLANS = {
    1: {"actor/generate": ["tp2pp1", 2]},
    2: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]},
    3: {"actor/train": ["tp4pp1", 4]},
    4: {"actor/generate": ["tp1pp1", 2], "actor/train": ["tp2pp1", 2]},
}
"""Rollout TP1x2 -> TP2x1 -> TP1x4; actor 2 ranks -> 4 as HSDP 2x2 -> 4 as FSDP -> 2."""
PPO_PLANS = {
    1: {"critic/train": ["tp1pp1", 2]},
    2: {"ref/infer": ["tp1pp1", 2]},
    3: {
        "actor/generate": ["tp1pp1", 4],
        "actor/train": ["tp2pp1", 4],
        "critic/train": ["tp2pp1", 4],
        "ref/infer": ["tp1pp1", 4],
    },
    4: {
        "actor/generate": ["tp1pp1", 2],
        "actor/train": ["tp2pp1", 2],
        "critic/train": ["tp2pp1", 2],
        "ref/infer": ["tp2pp1", 2],
    },
}
"""Critic and reference alone, then all of them to twice the devices and back."""


@dataclass(frozen=True)
class Job:
    """A job that ended, and what Nereus left."""

    ran: Ran
    work: Path

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in read_events(self.work / "run" / "events.jsonl")]

    @property
    def forced(self) -> list[dict]:
        """What was seen around each transition that the test asked for."""
        return [json.loads(line) for line in (self.work / "forced.jsonl").read_text().splitlines()]

    def series(self, metric: str) -> list[float]:
        return [step[metric] for step in self.ran.metrics]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """Run a job: ``launch(name, *extra overrides, plans=..., env=..., **shape)``."""
    assets = make_assets(tmp_path_factory.mktemp("assets"))

    def run(name, *extra, plans=None, env=None, timeout_s=JOB_S, steps=STEPS, **shape):
        work = tmp_path_factory.mktemp(name)
        modules = ["verl_cpu.platform", "verl_cpu.rollout"]
        changes = dict(env or {})
        if plans is not None:
            modules += ["verl_cpu.forced", "verl_cpu.faults"]
            changes["VERL_CPU_FORCED"] = json.dumps(plans)
            changes["VERL_CPU_FORCED_LOG"] = str(work / "forced.jsonl")
        arguments = [
            *overrides(assets, work, steps=steps, **shape),
            "+nereus.enable=true",
            f"+nereus.run_dir={work}/run",
            *extra,
        ]
        changes["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        return Job(run_job(work, arguments, timeout_s=timeout_s, env=changes), work)

    return run


FORCED = ("+nereus.backend.max_devices=4", "+nereus.policy.admission=never")
"""Room to grow, and no decision but those that a test takes."""


@pytest.fixture(scope="session")
def jobs(launch) -> Callable[[str], Job]:
    """Return a job by name, running it the first time it is asked for."""

    @cache
    def job(name: str) -> Job:
        critic = name.endswith("ppo")
        if name.startswith("fixed"):
            return launch(name, "+nereus.mode=advise", critic=critic)
        plans = PPO_PLANS if critic else GRPO_PLANS
        return launch(name, *FORCED, plans=plans, ray_devices=4, critic=critic)

    return job
