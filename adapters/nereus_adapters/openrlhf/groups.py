"""Groups: park a group of ranks, and seat it again in another number and layout.

OpenRLHF's `RayActorGroup` object stays and is changed in place, for its experience maker and its
trainer share it. Its ranks' processes stay too; ranks that are left over wait without a model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nereus_adapters.openrlhf import parking, ranks
from nereus_adapters.openrlhf.facts import REWARD_INFER
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.seats import Bundle
from nereus_adapters.ray_bundles import one_of
from nereus_adapters.ray_calls import ask, inside, outcome
from nereus_core.cluster import Device
from nereus_core.errors import StateDiffers, WaitTimeout
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage, Stage

SHARE = 0.2
"""Of a device, for an actor that Nereus starts: what OpenRLHF gives each of several models on one
device (`num_gpus_per_actor` in its `train_ppo_ray`)."""
_ARGS = {ACTOR_TRAIN: "actor", CRITIC_TRAIN: "critic", REF_INFER: "ref", REWARD_INFER: "reward"}


@dataclass(frozen=True, slots=True)
class Parked:
    """What a group has left in host memory; nothing for a stage whose weights never change."""

    shares: tuple[tuple[parking.Manifest, tuple[Any, ...]], ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of fp32 state."""
        return sum(told.num_bytes for told, _ in self.shares)

    @property
    def steps(self) -> dict[str, int]:
        """Counters, for a fingerprint."""
        return steps_of(self.shares[0][0].counters) if self.shares else {}


def steps_of(counters: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers among a group's counters."""
    return {k: int(counters[k]) for k in ("step", "global_steps", "skipped_steps")}


def hand_out(running: Running, stage: ModelStage) -> Parked:
    """Have every rank of a train stage put its part of the state into Ray's store.

    Raises:
        WaitTimeout, SeatDead: a rank does not answer; nothing has changed.
        PrimitiveError: gradients are in flight.
    """
    if stage.stage is not Stage.TRAIN:
        return Parked()
    handles, call_s = running.handles(stage), running.section.call_s
    told = ask(handles, parking.manifest, awaited=f"manifests of {stage}", timeout_s=call_s)
    shares = []
    for handle, manifest in zip(handles, told, strict=True):
        number = manifest.num_chunks
        call = handle.__ray_call__.options(num_returns=number)
        refs = call.remote(parking.handed_out, manifest) if number else []
        shares.append((manifest, tuple(parking.chunks_of(refs))))
    refs_of_all = [ref for _, refs in shares for ref in refs]
    _, late = ray.wait(refs_of_all, num_returns=len(refs_of_all), timeout=call_s, fetch_local=False)
    if late:
        raise WaitTimeout(f"{len(late)} of {len(refs_of_all)} objects of {stage}", call_s)
    return Parked(tuple(shares), parking.summed([m.digests for m in told]))


def vacate(running: Running, stage: ModelStage) -> None:
    """Free the memory of every rank of a stage; the processes stay."""
    timeout_s = running.section.call_s
    ask(running.handles(stage), ranks.leave, awaited=f"{stage} to free its memory",
        timeout_s=timeout_s)  # fmt: skip


def seat(running: Running, stage: ModelStage, parked: Parked) -> int:
    """Build a stage's group for the units alive, and let it take its state in.

    Returns:
        Bytes of state that ranks took in.

    Raises:
        WaitTimeout, SeatDead: a rank does not answer.
        StateDiffers: what arrived is not what was parked.
    """
    group, devices = running.groups[stage], running.devices_of(stage)
    tp, section = running.layout(stage).tp, running.section
    handles = _processes(running, stage, devices)
    (place,) = ask(handles[:1], ranks.rendezvous, awaited=f"rank 0 of {stage}",
                   timeout_s=section.start_s)  # fmt: skip
    _set_world(running.args, stage, len(handles), tp)
    strategy = _strategy(running, stage, len(handles), tp)
    joins = [
        inside(h, ranks.join, ranks.Post(r, len(handles), *place), strategy,
               *_init_arguments(running, stage))
        for r, h in enumerate(handles)
    ]  # fmt: skip
    outcome(joins, f"{stage} to build its model on {len(handles)} ranks", section.start_s)
    taken = 0
    if parked.shares:
        taken = sum(
            ask(handles, parking.taken_in, parked.shares, section.call_s,
                awaited=f"{stage} to take its state in", timeout_s=section.call_s)
        )  # fmt: skip
        _verify(running, stage, handles, parked)
    group._actor_handlers[:] = handles
    group.duplicate_actors = tp
    group._num_nodes, group._num_gpus_per_node = 1, len(handles)
    return taken


def _verify(running: Running, stage: ModelStage, handles: Sequence[Any], parked: Parked) -> None:
    call_s = running.section.call_s
    parts = ask(handles, parking.digests, awaited=f"digests of {stage}", timeout_s=call_s)
    found = parking.summed(parts)
    for key in sorted(found.keys() | parked.digests.keys()):
        if found.get(key) != parked.digests.get(key):
            raise StateDiffers(stage, key, found.get(key), parked.digests.get(key))


def _processes(running: Running, stage: ModelStage, devices: Sequence[Device]) -> list[Any]:
    """Return an actor for every device; starts those that are missing."""
    found = []
    for rank, device in enumerate(devices):
        if (stage, device) not in running.ranks:
            running.ranks[stage, device] = _start(running, stage, device, rank, len(devices))
        found.append(running.ranks[stage, device])
    return found


def _start(running: Running, stage: ModelStage, device: Device, rank: int, world: int) -> Any:
    kind = running.groups[stage].ray_actor_type
    # A rank that has left and was given all of the device still holds it; those that Nereus starts
    # and an engine that OpenRLHF started beside others have room together.
    for seat in [k for k in running.whole if k in running.ranks and k[1] == device]:
        if device not in running.devices_of(seat[0]):
            ray.kill(running.ranks.pop(seat))
            running.whole.discard(seat)
    bundle = running.bundles[device]
    if bundle.pg is None:
        bundle = running.bundles[device] = _reserved(device)
        outcome(bundle.pg.ready(), f"{device}, which an actor has left", running.section.start_s)
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=bundle.pg, placement_group_bundle_index=bundle.index
    )
    started = kind.options(num_cpus=SHARE, num_gpus=SHARE, scheduling_strategy=strategy)
    # The address is put right when the group is built; OpenRLHF looks for a free port without it.
    return started.remote(world, rank, "127.0.0.1", 1)


def _reserved(device: Device) -> Bundle:
    """Ask for a device on which a single actor was that Ray placed without a group; does not wait.

    Of the node's devices Ray gives one that is free; its own name for a node is a resource there.
    """
    pg = placement_group([one_of(device.node)])
    return Bundle(pg, 0)


def kill(running: Running, stage: ModelStage) -> None:
    """End every process of a stage, whatever it is doing."""
    for key in [k for k in running.ranks if k[0] == stage]:
        ray.kill(running.ranks.pop(key))
        running.whole.discard(key)


def forget(running: Running, lost: Collection[Unit]) -> None:
    """End what ranks are left of units that a device took with it; waits for none."""
    for stage, device in [(unit.model_stage, d) for unit in lost for d in unit.devices]:
        if (rank := running.ranks.pop((stage, device), None)) is not None:
            ray.kill(rank)
            running.whole.discard((stage, device))


def retire(running: Running) -> None:
    """End processes that wait on devices which are to be left; Ray keeps their place."""
    for stage, device in [k for k in running.ranks if k[1] in running.leaving]:
        if device not in running.devices_of(stage):
            if running.bundles[device].pg is None:  # else whoever waits for a device gets it
                running.bundles[device] = _reserved(device)
            ray.kill(running.ranks.pop((stage, device)))
            running.whole.discard((stage, device))


def _set_world(args: Any, stage: ModelStage, world: int, tp: int) -> None:
    of_model = getattr(args, _ARGS[stage])
    of_model.num_nodes, of_model.num_gpus_per_node = 1, world
    if stage == ACTOR_TRAIN:  # the trainer's own: how its experience maker cuts batches
        args.ds.tensor_parallel_size = tp


def _strategy(running: Running, stage: ModelStage, world: int, tp: int) -> Any:
    """Copy the trainer's strategy for a group that is built in the middle of a job."""
    found = copy.deepcopy(running.trainer.strategy)
    found.args.ds.tensor_parallel_size = found.ds_tensor_parallel_size = tp
    _set_world(found.args, stage, world, tp)
    found.args.ckpt.load_enable = False  # the state comes from memory, not from a checkpoint
    return found


def _init_arguments(running: Running, stage: ModelStage) -> tuple[Any, ...]:
    args = running.args
    path = {
        CRITIC_TRAIN: args.critic.model_name_or_path,
        REWARD_INFER: args.reward.model_name_or_path,
    }.get(stage, args.actor.model_name_or_path)
    if stage == ACTOR_TRAIN:
        return path, running.max_steps, None  # engines are tied when all of them are there
    return (path, running.max_steps) if stage == CRITIC_TRAIN else (path,)
