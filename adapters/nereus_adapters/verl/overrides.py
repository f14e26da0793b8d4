"""overrides: a plan as the overrides with which a user starts the same verl job on it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from nereus_adapters.verl.megatron import engine_config
from nereus_adapters.verl.standing import ROLES
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN

_FSDP = {
    "actor": "actor_rollout_ref.actor.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
_MEGATRON = {
    "actor": "actor_rollout_ref.actor.megatron",
    "ref": "actor_rollout_ref.ref.megatron",
    "critic": "critic.megatron",
}
_ROLLOUT = "actor_rollout_ref.rollout"
_STAGES = "++nereus.backend.pipeline_stages"


@dataclass(frozen=True, slots=True)
class Engine:
    """What of one role's engine says how a layout is spelled."""

    strategy: str
    """``fsdp2``, ``megatron`` ..."""
    num_layers: int


def overrides(
    current: Plan, wanted: Plan, engines: Mapping[str, Engine], *, follows: bool, own: bool = False
) -> tuple[str, ...]:
    """Return what a command line that starts one plan lacks to start another.

    Args:
        current: In force.
        wanted: To be spelled.
        engines: By role.
        follows: Whether ranks of a shard group share their sequences (``backend.ulysses``).
        own: Whether Nereus's own engine trains (``backend.engine=tp``).

    Raises:
        ValueError: verl has no words for it: nodes with different numbers of devices, or stages
            that its engine cannot cut.
    """
    there, then = (dict(_keys(plan, engines, follows, own)) for plan in (current, wanted))
    gone = {key.lstrip("+"): "null" for key in there if key not in then}
    new = {key: value for key, value in then.items() if there.get(key) != value}
    words = (f"{key}={value}" for key, value in {**new, **gone}.items())
    # A shell would take braces apart.
    return tuple(f"'{word}'" if "{" in word else word for word in words)


def _keys(
    plan: Plan, engines: Mapping[str, Engine], follows: bool, own: bool
) -> Iterator[tuple[str, str]]:
    pools = [("trainer", plan[ACTOR_TRAIN].devices)]
    if plan[ACTOR_GENERATE].devices != plan[ACTOR_TRAIN].devices:  # a pool of its own
        pools.append((_ROLLOUT, plan[ACTOR_GENERATE].devices))
    for prefix, devices in pools:
        yield f"{prefix}.nnodes", str(len({d.node for d in devices}))
        yield f"{prefix}.n_gpus_per_node", str(_per_node(devices))
    for role, stage in ROLES.items():
        if stage in plan and role in engines:
            yield from _engine_keys(role, plan[stage].layout, engines[role], follows)
    if own:
        stages = {role: plan[stage].layout.pp for role, stage in ROLES.items() if stage in plan}
        each = ",".join(f"{role}:{number}" for role, number in stages.items())
        yield _STAGES, f"{{{each}}}"
    layout = plan[ACTOR_GENERATE].layout
    yield f"{_ROLLOUT}.tensor_model_parallel_size", str(layout.tp)
    yield f"{_ROLLOUT}.pipeline_model_parallel_size", str(layout.pp)


def _engine_keys(
    role: str, layout: Layout, engine: Engine, follows: bool
) -> Iterator[tuple[str, str]]:
    if engine.strategy.startswith("fsdp"):
        yield f"{_FSDP[role]}.fsdp_size", str(layout.num_devices)
        if follows:
            yield f"{_FSDP[role]}.ulysses_sequence_parallel_size", str(layout.num_devices)
    elif engine.strategy == "megatron":
        for name, value in engine_config(layout, engine.num_layers).items():
            if not isinstance(value, dict):
                yield f"{_MEGATRON[role]}.{name}", str(value)
                continue
            for inner, number in value.items():  # a user's own, or not there yet
                yield f"++{_MEGATRON[role]}.{name}.{inner}", str(number)


def _per_node(devices: Collection[Device]) -> int:
    counts = set(Counter(device.node for device in devices).values())
    if len(counts) > 1:
        raise ValueError(f"nodes of {', '.join(map(str, sorted(counts)))} devices each")
    return counts.pop()
