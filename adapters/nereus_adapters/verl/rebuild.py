"""rebuild: leave a process group, join another, and build engines from the shards held here.

Runs inside verl's worker processes. The processes stay: what a restart would pay (imports,
contexts, compiled code) is paid once per job. Model files are not read: modules are built empty and
take their parameters from the state that is staged.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nereus_adapters.verl.facts import training_workers
from nereus_adapters.verl.filling import empty_models, restore_random, take_optimizer
from nereus_adapters.verl.pipeline import STAGES_FIELD
from nereus_adapters.verl.shards import staged
from nereus_core.errors import PrimitiveError

_OUTER = ("loss_fn", "base_sync_done", "layered_summon", "peft_merge")
"""What ``ActorRolloutRefWorker.init_model`` sets besides its engines."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a new process group meet."""

    address: str
    port: int
    ranks_on: Mapping[str, int]
    """How many by node."""
    timeout_s: float

    @property
    def world(self) -> int:
        """How many there are."""
        return sum(self.ranks_on.values())


@dataclass(frozen=True, slots=True)
class Seat:
    """One role of one rank: how its engine is sharded, and which staged state it takes."""

    role: str
    shard_size: int
    """Ranks that hold a copy."""
    stages: int
    """Of a pipeline, among which they hold it."""
    unit: str
    sequence_ranks: int
    """Ranks that share each sequence."""


def meeting(worker: Any, ranks_on: Mapping[str, int], timeout_s: float) -> Meeting:
    """Offer a free port of this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return Meeting(_node(), port, ranks_on, timeout_s)


def recipe(worker: Any) -> dict[str, Any]:
    """Return what a process needs to build the same engines: configurations and loss functions."""
    known: dict[str, Any] | None = getattr(worker, "_nereus_recipe", None)
    if known is None:
        outer = _outer(worker)
        known = {
            "roles": {
                role: (trainer.config, trainer.loss_fn)
                for role, trainer in training_workers(worker)
            },
            "outer": {name: getattr(outer, name) for name in _OUTER if hasattr(outer, name)},
            "rollout": None if outer.rollout is None else outer.rollout.model_config,
        }
        worker._nereus_recipe = known
    return known


def adopt(worker: Any, known: dict[str, Any]) -> None:
    """Take over a recipe in a process that never built its engines."""
    worker._nereus_recipe = known
    for name, value in known["outer"].items():
        setattr(_outer(worker), name, value)


def park(worker: Any) -> None:
    """Drop engines and rollout adapter and leave the process group; staged states stay."""
    recipe(worker)
    for held in worker.worker_dict.values():
        if hasattr(held, "init_model"):
            held.actor = held.ref = held.rollout = None
            _forget_saved(held)
        else:
            held.engine = None
    _free()
    if dist.is_initialized():
        dist.destroy_process_group()


def join(worker: Any, rank: int, meet: Meeting, seats: tuple[Seat, ...]) -> None:
    """Be a rank of a new process group, with the engines that its seats say."""
    from verl.utils.device import get_device_name, get_nccl_backend

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(meet.world),
        RAY_LOCAL_WORLD_SIZE=str(meet.ranks_on[_node()]),  # which server of a replica is whose
        MASTER_ADDR=meet.address,
        MASTER_PORT=str(meet.port),
    )
    timeout = timedelta(seconds=meet.timeout_s)
    store = dist.TCPStore(meet.address, meet.port, meet.world, rank == 0, timeout)
    dist.init_process_group(
        backend=f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}",
        store=store,
        rank=rank,
        world_size=meet.world,
    )
    for held in (worker, *worker.worker_dict.values()):
        held._rank, held._world_size = rank, meet.world
    build(worker, seats)


def build(worker: Any, seats: tuple[Seat, ...]) -> None:
    """Build engines of some roles anew in the present process group, from staged states."""
    for seat in seats:
        config, loss = recipe(worker)["roles"][seat.role]
        object.__setattr__(config.engine_config, "fsdp_size", seat.shard_size)
        object.__setattr__(config.engine_config, STAGES_FIELD, seat.stages)
        config.engine_config.ulysses_sequence_parallel_size = seat.sequence_ranks
        outer = _outer(worker, seat.role) if seat.role in ("actor", "ref") else None
        _drop(worker, outer, seat.role)
        _free()
        kind = (
            type(worker.worker_dict[seat.role])
            if outer is None
            else getattr(outer, f"{seat.role}_worker_cls")
        )
        trainer = kind(config=config)
        state = staged(worker)[seat.unit]
        with empty_models(state, seat.unit):
            trainer.reset()
        take_optimizer(trainer.engine, state)
        if loss is not None:
            trainer.set_loss_fn(loss)
        if outer is not None:
            setattr(outer, seat.role, trainer)
            _forget_dispatch(outer, seat.role)
            outer.set_dispatch_collect(mesh_name=seat.role, **trainer.get_dispatch_collect())
        else:
            worker.worker_dict[seat.role] = trainer
    for seat in seats:  # the last word on random state: building engines draws numbers
        restore_random(staged(worker)[seat.unit])
    dist.barrier()


def serve(worker: Any, tp: int, replica_rank: int) -> None:
    """Point this rank's side of the weight synchronization at its rollout replica."""
    from omegaconf import open_dict
    from torch.distributed.device_mesh import init_device_mesh
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.device import get_device_name
    from verl.workers.rollout.base import get_rollout_class

    known, outer = recipe(worker), _outer(worker)
    with open_dict(outer.config):
        outer.config.rollout.tensor_model_parallel_size = tp
    config = omega_conf_to_dataclass(outer.config.rollout)
    old, outer.rollout = outer.rollout, None
    _leave(getattr(old, "device_mesh", None))
    mesh = init_device_mesh(
        get_device_name(),
        mesh_shape=(dist.get_world_size() // tp, tp, 1),
        mesh_dim_names=("dp", "infer_tp", "infer_pp"),
    )
    outer.rollout = get_rollout_class(config.name, config.mode)(
        config=config, model_config=known["rollout"], device_mesh=mesh, replica_rank=replica_rank
    )


def weight_engine(worker: Any, first: bool) -> None:
    """Build the actor's side of the checkpoint engine: who sends, and among whom, has changed."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.import_utils import import_external_libs

    outer = _outer(worker)
    config = omega_conf_to_dataclass(outer.config.rollout.checkpoint_engine)
    import_external_libs(config.custom_backend_module or None)  # a new process has not yet
    outer.checkpoint_engine = CheckpointEngineRegistry.new(
        config.backend,
        is_master=first,
        bucket_size=config.update_weights_bucket_megabytes << 20,
        **config.engine_kwargs.get(config.backend, {}),
    )


def _outer(worker: Any, role: str = "actor") -> Any:
    """Return the ActorRolloutRefWorker of a process that has a role."""
    for held in worker.worker_dict.values():
        if hasattr(held, "init_model") and role in held.role:
            return held
    raise PrimitiveError(f"this process has no {role} worker.")


def _drop(worker: Any, outer: Any, role: str) -> None:
    """Take a role's engine out and leave its process groups; nothing here refers to it after.

    It is out before anything can go wrong, so that another attempt finds none.
    """
    if outer is not None:
        held = getattr(outer, role, None)
        engine = getattr(held, "engine", None)
        setattr(outer, role, None)
        _forget_saved(outer)
    else:
        held = worker.worker_dict[role]
        engine, held.engine = getattr(held, "engine", None), None
    meshes = (getattr(engine, name, None) for name in ("device_mesh", "ulysses_device_mesh"))
    _leave(*meshes, group=getattr(engine, "return_group", None))


def _leave(*meshes: Any, group: Any = None) -> None:
    """Leave the process groups of meshes that nothing will use: on accelerators they hold memory.

    All ranks do, in the same order.
    """
    every = [g for mesh in meshes if mesh is not None for g in mesh.get_all_groups()]
    if group is not None:
        every.append(group)
    for one in {id(g): g for g in every}.values():
        if one is not dist.group.WORLD:
            dist.destroy_process_group(one)


def _forget_saved(outer: Any) -> None:
    """Drop copies of parameters that separate_async keeps from mini-batch to mini-batch.

    They are cut as the engine was; none is read again after the step that saved it.
    """
    getattr(outer, "cpu_saved_models", {}).clear()


def _forget_dispatch(outer: Any, role: str) -> None:
    tables: Mapping[str, Any] = outer.get_dispatch_collect()
    for table in tables.values():
        table.pop(role, None)


def _node() -> str:
    """Return the name of this node, as `worker_facts` says it."""
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")


def _free() -> None:
    from verl.utils.device import get_torch_device

    gc.collect()
    get_torch_device().empty_cache()
