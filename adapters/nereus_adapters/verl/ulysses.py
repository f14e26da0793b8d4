"""ulysses: how many ranks share each sequence, role by role: as configured, or as shard groups are.

verl's Ulysses degree is independent of how FSDP shards the state: ``degree`` consecutive ranks are
one data-parallel rank, and get the same part of a batch. ``backend.ulysses`` says what becomes of
it when shard groups change: it is kept, or every shard group is one such rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.settings import VerlSettings
from nereus_core.errors import ConfigError

_KEYS = {
    "actor": "actor_rollout_ref.actor.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
"""Of each role's engine in verl's configuration."""
_MODELS = {"actor": "actor_rollout_ref.model", "critic": "critic.model"}


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Ranks that share each sequence of a role."""

    now: Mapping[str, int]
    """By role."""
    follows: bool = False
    """Whether each shard group is one sequence-parallel group."""

    @classmethod
    def of(cls, facts: WorkerFacts, settings: VerlSettings) -> Self:
        """Read the degrees of live engines.

        Raises:
            ConfigError: degrees are to follow shard groups and do not as the job starts, or cannot.
        """
        found = cls(
            {engine.role: engine.sequence_ranks for engine in facts.engines},
            settings.ulysses == "follow",
        )
        if found.follows:
            for engine in facts.engines:
                _check_follows(engine.role, engine.layout.tp, engine.sequence_ranks, engine.packs)
        return found

    def degree(self, role: str, shard_size: int) -> int:
        """Return the ranks that share a sequence where shard groups have this size."""
        return shard_size if self.follows else self.now.get(role, 1)


def _check_follows(role: str, shard_size: int, degree: int, packs: bool) -> None:
    if not packs:
        key = f"{_MODELS.get(role, _MODELS['actor'])}.use_remove_padding"
        raise ConfigError("backend.ulysses", f"follow needs {key}=true, as verl's Ulysses does")
    if shard_size != degree:
        raise ConfigError(
            "backend.ulysses",
            f"follow means that each shard group shares its sequences; the {role}'s shard groups "
            f"have {shard_size} ranks, of which {degree} share a sequence. Start with "
            f"{_KEYS[role]}.ulysses_sequence_parallel_size={shard_size}, or with "
            f"{_KEYS[role]}.fsdp_size={degree}",
        )


def shared_out(config: Any, ulysses: Ulysses, *, critic: bool, reference: bool) -> int:
    """Return what the ranks of every engine have to divide; its units, where degrees follow them.

    verl gives each data-parallel rank its part of a (mini-)batch and asserts that they fill whole
    micro-batches (workers/engine/utils.py, prepare_micro_batches), where those have a fixed size.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    each, batch = int(rollout.n), int(config.data.train_batch_size)
    dynamic, micro = actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu
    parts = [
        ("actor", int(actor.ppo_mini_batch_size), dynamic, micro),
        ("actor", batch, dynamic, rollout.log_prob_micro_batch_size_per_gpu),
    ]
    if reference:
        ref = config.actor_rollout_ref.ref
        micro = ref.get("log_prob_micro_batch_size_per_gpu")
        parts.append(("ref", batch, ref.get("log_prob_use_dynamic_bsz", False), micro))
    if critic:
        own, micro = config.critic, config.critic.ppo_micro_batch_size_per_gpu
        parts.append(("critic", int(own.ppo_mini_batch_size), own.use_dynamic_bsz, micro))
        forward = own.get("forward_micro_batch_size_per_gpu") or micro
        parts.append(("critic", batch, own.use_dynamic_bsz, forward))
    return math.gcd(
        *(
            prompts * each * ulysses.degree(role, 1) // (1 if dynamic or not micro else int(micro))
            for role, prompts, dynamic, micro in parts
        )
    )
