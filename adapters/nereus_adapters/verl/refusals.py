"""refusals: what of a verl job mode adapt cannot change, said by name before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nereus_adapters.verl.megatron import MISSING
from nereus_adapters.verl.standing import is_hybrid

_ANEW = ("nixl", "mooncake")
"""Checkpoint engines of verl's that meet anew at every synchronization, and send all there is."""
_KEPT = ("nccl",)
"""Those that do where they are told to (``rebuild_group``); hccl goes by this name too."""
_OWN = ("delta_sharded", "kimi_ckpt_engine", "naive", *_ANEW, *_KEPT)
"""All of verl's. delta_sharded sends a new replica what has changed alone; kimi_ckpt_engine ends
the ranks' own process group where it meets anew."""


def refusals(trainer: Any) -> tuple[str, ...]:
    """Say why a trainer can be watched but not changed; empty where it can be.

    Args:
        trainer: verl's PPOTrainer after its ``init()``.
    """
    return tuple(_of(trainer.config, trainer))


def _of(config: Any, trainer: Any) -> Iterator[str]:
    if not is_hybrid(trainer):
        yield from _of_separate(trainer)
    parts = {"actor": config.actor_rollout_ref.actor}
    if trainer.use_critic:
        parts["critic"] = config.critic
    for role, part in parts.items():
        if str(part.strategy) == "megatron":
            yield f"the {role}'s engine is megatron: {MISSING}"
        elif str(part.strategy) != "fsdp2":
            yield f"the {role}'s engine is {part.strategy}; only fsdp2 is rebuilt from shards"
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
    if rollout.get("disaggregation", {}).get("enabled", False):
        yield "rollout.disaggregation: servers that prefill and decode apart are not one replica"


def _of_separate(trainer: Any) -> Iterator[str]:
    if getattr(trainer, "_enable_hybrid_replicas", True):
        yield (
            "separate_async serves from the trainers' devices too; "
            "actor_rollout_ref.hybrid_engine=false keeps them apart, from verl 0.9.1 on"
        )
    engine = trainer.config.actor_rollout_ref.rollout.checkpoint_engine
    name, own = engine.backend, engine.get("engine_kwargs", {}).get(engine.backend, {})
    if name in _KEPT and not own.get("rebuild_group", False):
        yield (
            f"the {name} checkpoint engine keeps its group; set "
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs."
            f"{name}.rebuild_group=true"
        )
    elif name in _OWN and name not in (*_ANEW, *_KEPT):
        known = ", ".join((*_ANEW, *_KEPT))
        yield f"the {name} checkpoint engine cannot take up new replicas; {known} can"
