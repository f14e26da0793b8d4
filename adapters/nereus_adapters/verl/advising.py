"""advising: what a user of a job would set to start it on another plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_adapters.verl.overrides import Engine, overrides
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.standing import ROLES
from nereus_core.plan import Plan
from nereus_core.workload import Job

_OLD = "ulysses_sequence_parallel_size"


def spelled(config: Any, job: Job, backend: Mapping[str, Any], current: Plan, wanted: Plan) -> str:
    """Return the overrides that lead from one plan to another, or why verl has none.

    Args:
        config: verl's.
        job: What the adapter says of it.
        backend: Nereus's settings for verl.
        current: In force.
        wanted: To be spelled.
    """
    actor = config.actor_rollout_ref.actor
    parts = {"actor": actor, "ref": actor, "critic": config.get("critic")}
    engines = {
        role: Engine(str(parts[role].strategy), job.model(stage).num_layers)
        for role, stage in ROLES.items()
        if stage in wanted
    }
    settings = VerlSettings.of(backend)
    follows, own = settings.ulysses == "follow", settings.engine == "tp"
    try:
        words = overrides(current, wanted, engines, follows=follows, own=own)
    except ValueError as error:
        return f"(verl has no overrides for it: {error})"
    if follows:  # an old key beside an engine's own counts first where it is more than 1
        for role in ("actor", "ref"):
            if int(config.actor_rollout_ref.get(role, {}).get(_OLD, 1) or 1) > 1:
                words += (f"actor_rollout_ref.{role}.{_OLD}=1",)
    return " ".join(words)
