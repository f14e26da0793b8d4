"""refusals: what of a verl job mode adapt cannot change, said by name before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nereus_adapters.verl.reading import ulysses


def refusals(trainer: Any) -> tuple[str, ...]:
    """Say why a trainer can be watched but not changed; empty where it can be.

    Args:
        trainer: verl's PPOTrainer after its ``init()``.
    """
    return tuple(_of(trainer.config, trainer))


def _of(config: Any, trainer: Any) -> Iterator[str]:
    if getattr(trainer, "standalone_server_manager", None) is not None:
        yield "separate_async keeps trainers and rollouts in pools of their own"
    parts = {"actor": config.actor_rollout_ref.actor}
    if trainer.use_critic:
        parts["critic"] = config.critic
    for role, part in parts.items():
        if str(part.strategy) != "fsdp2":
            yield f"the {role}'s engine is {part.strategy}; only fsdp2 is rebuilt from shards"
        degree = ulysses(part)
        if degree > 1:
            yield f"the {role} uses Ulysses sequence parallelism over {degree} ranks"
    models = {"actor": config.actor_rollout_ref.model}
    if trainer.use_critic:
        models["critic"] = config.critic.get("model", {})
    for role, model in models.items():
        if model.get("lora_rank", 0):
            yield f"the {role}'s LoRA adapters are not among the states that are moved"
    rollout = config.actor_rollout_ref.rollout
    for name in ("pipeline_model_parallel_size", "data_parallel_size"):
        if int(rollout.get(name, 1) or 1) > 1:
            yield f"rollout replicas have {name}={rollout.get(name)}"
