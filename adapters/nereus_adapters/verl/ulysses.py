"""ulysses: how many ranks share each sequence, role by role: as configured, or as shard groups are.

verl's Ulysses degree is independent of how FSDP shards the state: ``degree`` consecutive ranks are
one data-parallel rank, and get the same part of a batch. ``backend.ulysses`` says what becomes of
it when shard groups change: it is kept, or every shard group is one such rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.settings import VerlSettings
from nereus_core.errors import ConfigError
from nereus_core.workload import TokenBudget

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
        if settings.ulysses == "follow" and settings.engine == "tp":
            raise ConfigError("backend.ulysses", "the tp engine shares no sequences; use keep")
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
            f"{_KEYS[role]}.fsdp_size={degree} (the old key beside it, "
            f"{_KEYS[role].rpartition('.')[0]}.ulysses_sequence_parallel_size, counts first where "
            "it is more than 1)",
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a role's engine over a (mini-)batch."""

    role: str
    prompts: int
    """In what is shared out among data-parallel ranks."""
    micro: int | None
    """Sequences of a micro-batch; None where they are cut by tokens, or not at all."""
    tokens: int | None
    """Tokens of a micro-batch for each rank that shares sequences; None where sequences count."""


def passes_of(config: Any, *, critic: bool, reference: bool) -> Iterator[Pass]:
    """Yield what verl's trainer asks of engines in a step."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    batch, tokens = int(config.data.train_batch_size), "ppo_max_token_len_per_gpu"
    micro, forward = "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"
    kept = "log_prob_max_token_len_per_gpu"

    def one(role: str, prompts: Any, dynamic: Any, sequences: Any, most: Any) -> Pass:
        if dynamic:
            return Pass(role, int(prompts), None, None if most is None else int(most))
        return Pass(role, int(prompts), int(sequences) if sequences else None, None)

    yield one(
        "actor", actor.ppo_mini_batch_size, actor.use_dynamic_bsz, actor.get(micro),
        actor.get(tokens),
    )  # fmt: skip
    yield one("actor", batch, actor.use_dynamic_bsz, rollout.get(forward), rollout.get(kept))
    if reference:
        ref = config.actor_rollout_ref.ref
        dynamic = ref.get("log_prob_use_dynamic_bsz", False)
        yield one("ref", batch, dynamic, ref.get(forward), ref.get(kept))
    if critic:
        own = config.critic
        yield one(
            "critic", own.ppo_mini_batch_size, own.use_dynamic_bsz, own.get(micro), own.get(tokens)
        )
        yield one(
            "critic", batch, own.use_dynamic_bsz,
            own.get("forward_micro_batch_size_per_gpu") or own.get(micro),
            own.get("forward_max_token_len_per_gpu") or own.get(tokens),
        )  # fmt: skip


def shared_out(passes: Iterable[Pass], each: int, ulysses: Ulysses) -> int:
    """Return what the ranks of every engine have to divide; its units, where degrees follow them.

    verl gives each data-parallel rank its part of a (mini-)batch and asserts that they fill whole
    micro-batches (workers/engine/utils.py, prepare_micro_batches), where those have a fixed size.

    Args:
        passes: In a step.
        each: Responses to a prompt.
        ulysses: Ranks that share each sequence.
    """
    return math.gcd(
        *(p.prompts * each * ulysses.degree(p.role, 1) // (p.micro or 1) for p in passes)
    )


def budgets(passes: Iterable[Pass]) -> dict[str, TokenBudget]:
    """Return the tokens of a micro-batch, by role, where verl cuts micro-batches by tokens.

    It asserts that the longest sequence goes into one (utils/seqlen_balancing.py,
    rearrange_micro_batches), times the ranks that share it.
    """
    found: dict[str, list[int]] = {}
    for one in passes:
        if one.tokens is not None:
            found.setdefault(one.role, []).append(one.tokens)
    return {role: TokenBudget(min(tokens), max(tokens)) for role, tokens in found.items()}
