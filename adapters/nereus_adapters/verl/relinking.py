"""relinking: the epoch switch. One regroup, after which verl's trainer steps on the new units.

What has to change is worked out first. Where the ranks stay as they are, only the engines of the
stages that changed are built anew, in the process group there is. Where ranks come or go, all leave
the process group, and the members of the new one meet, build their engines from the shards that
each of them holds, and take their places in verl's own objects. Until all of that has worked the
old states stay staged, so that the old group can meet again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_adapters.ray_calls import call_all, gathered
from nereus_adapters.verl import rebuild
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.meshes import forget_meshes
from nereus_adapters.verl.rollouts import Rollouts
from nereus_adapters.verl.standing import ROLES, is_hybrid
from nereus_adapters.verl.ulysses import Ulysses
from nereus_core.cluster import Device
from nereus_core.errors import PlanError
from nereus_core.units import UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN

Assembly = Mapping[Device, tuple[rebuild.Seat, ...]]
"""What each rank, in order of rank, has to build."""


def assembly(
    units: UnitMap, order: Sequence[Device], ulysses: Ulysses
) -> dict[Device, tuple[rebuild.Seat, ...]]:
    """Give every rank of the trainers its seat in every role.

    Args:
        units: Alive.
        order: Devices in the order of ranks.
        ulysses: Ranks that share each sequence.

    Raises:
        PlanError: verl's trainers share their processes, so that all roles need the same devices,
            and shard groups are runs of consecutive ranks.
    """
    members = sorted({d for u in units.of(ACTOR_TRAIN) for d in u.devices}, key=order.index)
    seats: dict[Device, list[rebuild.Seat]] = {device: [] for device in members}
    for role in ("ref", "actor", "critic"):
        stage = ROLES[role]
        for unit in units.of(stage):
            size = len(unit.devices)
            first = members.index(unit.devices[0]) if unit.devices[0] in members else -1
            if first % size or tuple(members[first : first + size]) != unit.devices:
                ranks = ", ".join(map(str, members))
                raise PlanError([f"{unit} is no run of {size} of the ranks {ranks}"])
            degree = ulysses.degree(role, size)
            seat = rebuild.Seat(role, size, unit.layout.pp, str(unit.id), degree)
            for device in unit.devices:
                seats[device].append(seat)
    num_roles = {device: len(own) for device, own in seats.items()}
    if len(set(num_roles.values())) > 1:
        raise PlanError(["actor, critic and reference must hold the same devices"])
    return {device: tuple(own) for device, own in seats.items()}


def rewire(
    trainer: Any,
    fleet: Fleet,
    rollouts: Rollouts,
    old: Assembly,
    new: Assembly,
    units: UnitMap,
    timeout_s: float,
) -> None:
    """Bring ranks, engines and weight synchronization from one assembly to another.

    Where it raises, another call with the two exchanged brings the old assembly back: where ranks
    come or go, all of both part first, whatever they have reached; where they stay, every engine
    that differs is built again.
    """
    awaited = "verl's ranks to meet in a new process group"
    if tuple(old) != tuple(new):
        everybody = fleet.living({**old, **new})
        call_all(everybody, rebuild.park, awaited="verl's ranks to part", timeout_s=timeout_s)
        first = next(iter(new))
        meet = call_all(
            # Ranks that wait in vain give up in time to hear of what is done instead.
            fleet.workers([first]), rebuild.meeting, Counter(d.node for d in new), timeout_s / 2,
            awaited="a place to meet", timeout_s=timeout_s,
        )[first]  # fmt: skip
        call_all(
            fleet.workers(new), rebuild.join, awaited=awaited, timeout_s=timeout_s,
            each={device: (rank, meet, seats) for rank, (device, seats) in enumerate(new.items())},
        )  # fmt: skip
        call_all(
            fleet.workers(new), rebuild.weight_engine, awaited="checkpoint engines",
            timeout_s=timeout_s, each={device: (device == first,) for device in new},
        )  # fmt: skip
    else:
        changed = {
            device: (tuple(seat for seat in seats if seat not in old[device]),)
            for device, seats in new.items()
        }
        if any(seats for (seats,) in changed.values()):
            call_all(
                fleet.workers(new), rebuild.build, awaited="engines of another layout",
                timeout_s=timeout_s, each=changed,
            )  # fmt: skip
    # By a method of verl's own: these run on a thread of their own.
    told = {
        device: worker.execute_with_func_generator.remote(forget_meshes)
        for device, worker in fleet.workers(new).items()
    }
    gathered(told, awaited="old meshes to be forgotten", timeout_s=timeout_s)
    if is_hybrid(trainer):
        _serve(fleet, rollouts, new, units, timeout_s)


def _serve(
    fleet: Fleet, rollouts: Rollouts, new: Assembly, units: UnitMap, timeout_s: float
) -> None:
    """Point every trainer's side of the weight synchronization at the replica on its device."""
    serving = {
        d: (u.layout.tp, rollouts.rank_of(u.id))
        for u in units.of(ACTOR_GENERATE)
        for d in u.devices
    }
    if missing := [d for d in new if d not in serving]:
        raise PlanError([f"{missing[0]} trains and has no rollout replica to give its weights to"])
    call_all(
        fleet.workers(new), rebuild.serve, awaited="the rollout's side of the trainers",
        timeout_s=timeout_s, each={device: serving[device] for device in new},
    )  # fmt: skip


def repoint(trainer: Any, fleet: Fleet, members: Sequence[Device]) -> None:
    """Put worker groups of these ranks where verl's objects hold the old ones."""
    seats = [fleet.seat(device) for device in members]
    groups: dict[int, Any] = {}

    def renewed(old: Any, prefix: str) -> Any:
        if id(old) not in groups:
            new = old.from_detached(
                name_prefix=old.name_prefix,
                worker_names=[seat.name for seat in seats],
                worker_handles=[seat.worker for seat in seats],
                ray_cls_with_init=old.ray_cls_with_init,
            )
            for method in dir(new):
                if method.startswith(f"{prefix}_"):
                    setattr(new, method.removeprefix(f"{prefix}_"), getattr(new, method))
            groups[id(old)] = new
        return groups[id(old)]

    key = _actor_key(trainer.actor_rollout_wg)
    old_ref = getattr(trainer, "ref_policy_wg", None)
    old_actor = trainer.actor_rollout_wg
    trainer.actor_rollout_wg = renewed(old_actor, key)
    if old_ref is not None:  # a group of its own where verl gave it one
        trainer.ref_policy_wg = renewed(old_ref, "ref")
    if trainer.use_critic:
        trainer.critic_wg = renewed(trainer.critic_wg, "critic")
    trainer.llm_server_manager.worker_group = trainer.actor_rollout_wg
    trainer.checkpoint_manager.actor_wg = trainer.actor_rollout_wg
    if not is_hybrid(trainer):
        trainer.standalone_checkpoint_manager.actor_wg = trainer.actor_rollout_wg


def forget_dispatch(trainer: Any) -> None:
    """Let worker groups ask again which rank has which part of a batch."""
    for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg"):
        group = getattr(trainer, name, None)
        if group is not None:
            group._dispatch_info.clear()
            group._collect_info.clear()


def _actor_key(group: Any) -> str:
    for key in ("actor_rollout_ref", "actor_rollout", "actor"):
        if hasattr(group, f"{key}_init_model"):
            return key
    raise PlanError(["verl's worker group has no actor"])
