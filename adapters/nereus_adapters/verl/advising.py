"""advising: what a user of a live job would set to start it on another plan."""

from __future__ import annotations

from typing import Any

from nereus_adapters.verl.overrides import Engine, overrides
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.standing import Ranks
from nereus_core.model import ModelSpec
from nereus_core.plan import Plan

ANSWER_S = 60.0
"""For a worker to say what engines it has. Chosen, not measured."""


def spelled(trainer: Any, current: Plan, wanted: Plan) -> str:
    """Return the overrides that lead from one plan to another, or why verl has none.

    Args:
        trainer: verl's PPOTrainer after its ``init()``.
        current: In force.
        wanted: To be spelled.
    """
    config = trainer.config
    parts = {"actor": config.actor_rollout_ref.actor, "critic": config.get("critic")}
    settings = VerlSettings.of(config.get("nereus", {}).get("backend", {}))
    workers = trainer.actor_rollout_wg.workers[:1]
    engines = {
        engine.role: Engine(
            str((parts.get(engine.role) or parts["actor"]).strategy),
            ModelSpec.from_hf_config(engine.hf_config, name=engine.role).num_layers,
        )
        for engine in Ranks.of(workers, ANSWER_S).facts[0].engines
    }
    follows = settings.ulysses == "follow"
    try:
        words = overrides(current, wanted, engines, follows=follows)
    except ValueError as error:
        return f"(verl has no overrides for it: {error})"
    if follows and int(parts["actor"].get("ulysses_sequence_parallel_size", 1)) > 1:
        # The old key, also the reference's default, counts before the engines' own where it is set.
        words += ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",)
    return " ".join(words)
