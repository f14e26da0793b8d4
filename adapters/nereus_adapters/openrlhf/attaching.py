"""Attaching: from OpenRLHF's trainer, in the process of its actor, to an adapter."""

from __future__ import annotations

from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

from nereus_adapters.openrlhf import facts, joining
from nereus_adapters.openrlhf.adapter import OpenRLHFAdapter
from nereus_adapters.openrlhf.checks import refuse_adapting
from nereus_adapters.openrlhf.experience import per_group
from nereus_adapters.openrlhf.inside import device_kind, max_steps
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.signals import Signals
from nereus_adapters.openrlhf.supply import FILE, Supply
from nereus_adapters.ray_calls import ask
from nereus_core.config import NereusConfig
from nereus_core.gate import Gate
from nereus_core.workload import ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER


def attach(trainer: Any, config: NereusConfig) -> OpenRLHFAdapter:
    """Attach to a trainer before its first step.

    Raises:
        JobError, ModelConfigError, ConfigError: Nereus has no words for this job.
        WaitTimeout, SeatDead: a rank or an engine does not answer.
    """
    section = facts.backend_section(config)
    facts.refuse_unreadable(trainer.args)
    if config.enabled and config.mode == "adapt":
        refuse_adapting(trainer.args)
        per_group(trainer.experience_maker)
    asynchronous = bool(trainer.args.train.async_enable)
    gate = Gate(config.timeouts.boundary_s, asynchronous=asynchronous)
    running = Running(trainer, section, gate, Signals())
    running.look()
    for stage, group in running.groups.items():
        running.signals.listen_to_group(stage, group)
    running.signals.listen_to_steps(trainer)
    there = running.groups
    workload = facts.workload(
        critic=CRITIC_TRAIN in there,
        ref=REF_INFER in there,
        reward=facts.REWARD_INFER in there,
        asynchronous=asynchronous,
    )
    rank0 = there[ACTOR_TRAIN]._actor_handlers[:1]
    (running.max_steps,) = ask(
        rank0, max_steps, awaited="the number of steps", timeout_s=section.call_s
    )
    (kind,) = ask(rank0, device_kind, awaited="the kind of device", timeout_s=section.call_s)
    job = facts.job_of(
        trainer.args,
        workload,
        facts.models(workload, _configs(trainer.args)),
        facts.cluster(tuple(running.bundles), kind, section),
        _num_steps(trainer),
    )
    supply = Supply(lambda: running.devices, Path(config.run_dir) / FILE)
    joining.look(running, supply.leaving(), supply.draining_nodes())
    adapter = OpenRLHFAdapter(running, job, version("openrlhf"), supply)
    if config.enabled and config.mode == "adapt":
        adapter.warm()
    return adapter


def _configs(args: Any) -> dict[str, dict[str, Any]]:
    """Hugging Face config by model."""
    from transformers import AutoConfig

    paths = {
        "actor": args.actor.model_name_or_path,
        "critic": args.critic.model_name_or_path,
        "reward": args.reward.model_name_or_path,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        if path:
            config = AutoConfig.from_pretrained(path, trust_remote_code=True)
            found[name] = config.to_dict()
    return found


def _num_steps(trainer: Any) -> int | None:
    """RL steps of the whole job; None where the trainer does not hold the prompts (async)."""
    prompts = getattr(trainer, "prompts_dataloader", None)
    if prompts is None:
        return None
    per_episode = ceil(len(prompts) / trainer.args.rollout.batch_size)
    return int(per_episode * trainer.args.train.num_episodes)
