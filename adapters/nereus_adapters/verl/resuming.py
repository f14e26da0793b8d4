"""resuming: a checkpoint that verl's FSDP engine saved on some ranks, read by any other number.

verl names its files after the number of ranks, and loads no other (verl#1377, #2265). Here every
rank reads, out of all files and through memory maps, the rows that it holds itself; nothing is
gathered and nothing is written. `load` and what it calls run inside verl's worker processes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl.facts import training_workers
from nereus_adapters.verl.filling import take_optimizer
from nereus_adapters.verl.shards import Held, local, local_box, no_step, not_adam
from nereus_adapters.verl.tensor_parallel import TENSOR_PARALLEL, VENDOR, VENDOR_KEY
from nereus_core.cluster import Device
from nereus_core.errors import PrimitiveError
from nereus_core.state import Box

_FIRST = re.compile(r"(?:model|optim|extra_state)_world_size_(\d+)_rank_0\.pt")
_LAST = "fsdp_config.json"
"""What verl writes beside each save, over the one before: ``world_size`` is of the last save.
Source: verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPConfig."""
_STEP = "step"


def saved_ranks(trainer: Any, role: str, folder: Path) -> int | None:
    """Say how many ranks saved a checkpoint that verl cannot load itself; None where it can.

    Args:
        trainer: verl's, with its workers; the session need not have begun. None is asked.
        role: ``actor`` or ``critic``.
        folder: What verl would load, e.g. ``global_step_4/actor``.

    Raises:
        PrimitiveError: the folder does not tell which of several sets of files counts.
    """
    part = trainer.config.critic if role == "critic" else trainer.config.actor_rollout_ref.actor
    if str(part.strategy) != "fsdp2" or not folder.is_dir():
        return None  # another engine's, or a remote folder, which verl copies first
    world = world_of(folder)
    if world is None or world != len(trainer.actor_rollout_wg.workers):
        return world
    # Tensor-parallel ranks, those that saved it or those there are, may be as many and cut
    # otherwise.
    own = os.environ.get(VENDOR_KEY) == VENDOR
    return world if own or saved_by_tensor_parallel(folder, world) else None


def saved_by_tensor_parallel(folder: Path, world: int) -> bool:
    """Whether ranks of the tp engine saved a folder: its first file names their mesh."""
    from torch.distributed.tensor import DTensor

    for kind in ("model", "optim"):
        if not (folder / f"{kind}_world_size_{world}_rank_0.pt").is_file():
            continue  # not asked for by checkpoint.save_contents
        found = _read(folder, kind, world, 0)
        slots = [found] if kind == "model" else [*found["state"].values()]
        tensors = (value for slot in slots for value in slot.values())
        meshes = (value.device_mesh for value in tensors if isinstance(value, DTensor))
        return any(TENSOR_PARALLEL in (mesh.mesh_dim_names or ()) for mesh in meshes)
    return False


def world_of(folder: Path) -> int | None:
    """Return the number of ranks that saved a folder last; None where there is nothing of verl's.

    Raises:
        PrimitiveError: as `saved_ranks` says.
    """
    sizes = sorted({int(m[1]) for f in folder.iterdir() if (m := _FIRST.fullmatch(f.name))})
    last = folder / _LAST
    if sizes and last.is_file():
        size = int(json.loads(last.read_text())["world_size"])
        if size not in sizes:
            raise PrimitiveError(
                f"{last} says that {size} ranks saved it, but there are files of {sizes} only."
            )
        return size
    if len(sizes) > 1:
        raise PrimitiveError(
            f"{folder} holds files of {sizes} ranks and no {_LAST}, which says whose are the last; "
            "move those of the others elsewhere."
        )
    return sizes[0] if sizes else None


def resume(trainer: Any, role: str, folder: Path, ranks: int, timeout_s: float) -> None:
    """Load one role's checkpoint that ``ranks`` ranks saved, on all ranks there are."""
    workers = enumerate(trainer.actor_rollout_wg.workers)
    call_all(
        {Device("rank", rank): worker for rank, worker in workers}, load, role, str(folder), ranks,
        awaited=f"the checkpoint {folder}", timeout_s=timeout_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank saved of a tensor."""

    box: Box
    tensor: torch.Tensor


def load(worker: Any, role: str, folder: str, world: int) -> None:
    """Give this rank's engine its part of what ``world`` ranks saved."""
    engine = next((held.engine for name, held in training_workers(worker) if name == role), None)
    if engine is None:
        raise PrimitiveError(f"this process has no engine of the {role}, which {folder} is for.")
    fill_engine(engine, role, Path(folder), world)


def fill_engine(engine: Any, role: str, path: Path, world: int) -> None:
    """Load what the job's ``checkpoint.load_contents`` asks for, and open no other file.

    Source of what depends on what: FSDPCheckpointManager.load_checkpoint.
    """
    manager = engine.checkpoint_manager
    if manager.should_load_model:
        _take_model(engine, path, world)
    if manager.should_load_optimizer:
        if engine.optimizer is None:
            raise PrimitiveError(f"checkpoint.load_contents has optimizer; the {role} has none.")
        take_optimizer(engine, _moments(engine, role, path, world))
    if manager.should_load_extra:
        extras = _read(path, "extra_state", world, int(engine.rank) % world)
        if "rng" in extras:
            manager.load_rng_state(extras["rng"])
        if extras["lr_scheduler"] is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(extras["lr_scheduler"])


def _take_model(engine: Any, path: Path, world: int) -> None:
    models = [_read(path, "model", world, r) for r in range(world)]
    wanted = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    for name, tensor in wanted.items():
        # A pipeline stage has saved its own layers alone.
        pieces = [_piece(model[name], r) for r, model in enumerate(models) if name in model]
        if pieces:
            fill(local(tensor), local_box(tensor), pieces, name)
        elif isinstance(tensor, torch.nn.Parameter):
            raise PrimitiveError(f"{path} holds no {name}: it is of another model.")


def _moments(engine: Any, role: str, path: Path, world: int) -> Held:
    """Read moments, steps and hyper-parameters."""
    saved = [_read(path, "optim", world, r) for r in range(world)]
    state = Held(role, {}, {}, {})
    state.extras["groups"] = [
        {k: v for k, v in group.items() if k != "params"} for group in saved[0]["param_groups"]
    ]
    ranks = [_by_name(engine, path, world, r, found) for r, found in enumerate(saved)]
    for name, parameter in engine.module.named_parameters():
        parts = {r: slots[name] for r, slots in enumerate(ranks) if name in slots}
        if not parts:
            continue  # it has not had a gradient yet
        box, first = local_box(parameter), next(iter(parts.values()))
        if _STEP not in first:
            raise no_step(name)
        for slot, value in first.items():
            if slot == _STEP:
                state.counters[name] = float(value)
                continue
            if not torch.is_tensor(value) or value.shape != parameter.shape:
                raise not_adam(slot, name)
            pieces = [_piece(part[slot], r) for r, part in parts.items()]
            room = torch.empty(box.shape, dtype=pieces[0].tensor.dtype)
            fill(room, box, pieces, f"{slot} of {name}")
            state.tensors[slot, name] = room
        state.boxes[name], state.shapes[name] = box, tuple(parameter.shape)
    return state


def _by_name(
    engine: Any, path: Path, world: int, rank: int, saved: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return what a rank saved of each parameter, which its file numbers by place in its groups."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    own = [[names[id(p)] for p in group["params"]] for group in engine.optimizer.param_groups]
    kept = [group["params"] for group in saved["param_groups"]]
    if len(own) == len(kept) == 1:
        whole = [*(getattr(engine, "shapes", None) or own[0])]
        own = [_saved_names(whole, len(kept[0]), path, world, rank)]
    if [len(group) for group in own] != [len(group) for group in kept]:
        raise PrimitiveError(
            f"{path}: rank {rank} saved groups of {[len(group) for group in kept]} parameters; "
            f"expected {[len(group) for group in own]}, or one group where there are stages."
        )
    state = saved["state"]
    return {
        name: state[index]
        for group, indices in zip(own, kept, strict=True)
        for name, index in zip(group, indices, strict=True)
        if index in state
    }


def _saved_names(whole: list[str], number: int, path: Path, world: int, rank: int) -> list[str]:
    """Return the names of the parameters that a rank saved, in their order.

    A pipeline stage has some of the whole model's; which, its file of the model says.
    """
    if number == len(whole):
        return whole
    try:
        here = set(_read(path, "model", world, rank))
    except FileNotFoundError as error:
        raise PrimitiveError(
            f"{path}: rank {rank} saved moments of {number} of {len(whole)} parameters, and "
            "no model file that says of which; save with checkpoint.save_contents=[model,...]."
        ) from error
    return [name for name in whole if name in here]


def fill(room: torch.Tensor, box: Box, pieces: list[Piece], what: str) -> None:
    """Copy a box out of the pieces that hold it; raises PrimitiveError where a part is missing."""
    missing = box.num_elements
    done: set[Box] = set()
    for piece in pieces:
        common = piece.box.intersect(box) if box.num_elements else None
        if common is None or common in done:
            continue  # an HSDP copy of what another rank has saved
        with torch.no_grad():
            room[common.within(box)].copy_(piece.tensor[common.within(piece.box)])
        done.add(common)
        missing -= common.num_elements
    if missing:
        raise PrimitiveError(f"{what}: {missing} elements of {box} are in no file.")


def _piece(saved: torch.Tensor, rank: int) -> Piece:
    """Say where in the whole tensor a rank's part lies, from the mesh that was saved with it.

    Source: torch.distributed.tensor.Shard(0), which cuts as ``torch.chunk`` does (`Cut.boxes`).
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(saved, DTensor):
        return Piece(Box((0,) * saved.dim(), tuple(saved.shape)), saved)
    # Not to_local(): this process need not be in the mesh that was saved.
    mine, mesh, offset = saved._local_tensor, saved.device_mesh, [0] * saved.dim()
    for size, index, placement in zip(
        mesh.shape, _place(mesh, rank), saved.placements, strict=True
    ):
        if placement.is_shard():
            rows = -(-saved.shape[placement.dim] // size)
            offset[placement.dim] = min(index * rows, saved.shape[placement.dim])
    return Piece(Box(tuple(offset), tuple(mine.shape)), mine)


def _place(mesh: Any, rank: int) -> list[int]:
    """Return where a rank lay in the mesh that was saved, along each of its dimensions."""
    names = mesh.mesh_dim_names or ()
    if TENSOR_PARALLEL in names:
        # A mesh of one stage tells this process's ranks in place of those of the saved stage. That
        # of the tp engine cuts along one dimension alone, whose ranks are consecutive.
        sizes = zip(names, mesh.shape, strict=True)
        return [rank % size if name == TENSOR_PARALLEL else 0 for name, size in sizes]
    return list((mesh.mesh == rank).nonzero()[0].tolist())


def _read(folder: Path, kind: str, world: int, rank: int) -> Any:
    path = folder / f"{kind}_world_size_{world}_rank_{rank}.pt"
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
