"""resuming: a checkpoint that verl's FSDP engine saved on some ranks, read by any other number.

verl names its files after the number of ranks, and loads no other (verl#1377, #2265). Here every
rank reads, out of all files and through memory maps, the rows that it holds itself; nothing is
gathered and nothing is written. `load` runs inside verl's worker processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl.facts import training_workers
from nereus_adapters.verl.filling import take_optimizer
from nereus_adapters.verl.shards import Held, local, local_box
from nereus_core.cluster import Device
from nereus_core.errors import PrimitiveError
from nereus_core.state import Box

LOAD_S = 3600.0
"""For all ranks to read their parts from disk; chosen, not measured."""
_FIRST = re.compile(r"model_world_size_(\d+)_rank_0\.pt")
_STEP = "step"


def resume(trainer: Any, role: str, folder: Path) -> int | None:
    """Load one role's checkpoint where verl itself would find no file of its own.

    Args:
        trainer: verl's, with its workers; the session need not have begun.
        role: ``actor`` or ``critic``.
        folder: What verl would load, e.g. ``global_step_4/actor``.

    Returns:
        The number of ranks that saved it; None where verl loads it as ever.
    """
    workers = trainer.actor_rollout_wg.workers
    saved = sorted(int(m[1]) for f in folder.iterdir() if (m := _FIRST.fullmatch(f.name)))
    part = trainer.config.critic if role == "critic" else trainer.config.actor_rollout_ref.actor
    if len(workers) in saved or not saved or str(part.strategy) != "fsdp2":
        return None
    ranks = {Device("rank", rank): worker for rank, worker in enumerate(workers)}
    call_all(
        ranks, load, role, str(folder), saved[-1],
        awaited=f"the checkpoint {folder}", timeout_s=LOAD_S,
    )  # fmt: skip
    return saved[-1]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank saved of a tensor."""

    box: Box
    tensor: torch.Tensor


def load(worker: Any, role: str, folder: str, world: int) -> None:
    """Give this rank's engine its part of what ``world`` ranks saved."""
    engine = next(held.engine for name, held in training_workers(worker) if name == role)
    path, rank = Path(folder), int(engine.rank)
    models = [_read(path, "model", world, r) for r in range(world)]
    wanted = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    for name, tensor in wanted.items():
        if name in models[0]:
            pieces = [_piece(model[name], r) for r, model in enumerate(models)]
            fill(local(tensor), local_box(tensor), pieces, name)
        elif isinstance(tensor, torch.nn.Parameter):
            raise PrimitiveError(f"{path} holds no {name}: it is of another model.")
    del models
    extras = _read(path, "extra_state", world, rank % world)
    state = Held(role, {}, {}, {})
    if extras.get("lr_scheduler") is not None:
        state.extras["lr_scheduler"] = extras["lr_scheduler"]
    if engine.optimizer is not None:
        optimizers = [_read(path, "optim", world, r) for r in range(world)]
        _take_moments(engine, state, optimizers)
        take_optimizer(engine, state)
    if "rng" in extras:
        engine.checkpoint_manager.load_rng_state(extras["rng"])


def _take_moments(engine: Any, state: Held, saved: list[Mapping[str, Any]]) -> None:
    """Read moments, steps and hyper-parameters, by the place of each parameter in its group."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    own = engine.optimizer.param_groups
    state.extras["groups"] = [
        {k: v for k, v in group.items() if k != "params"} for group in saved[0]["param_groups"]
    ]
    for group, kept in zip(own, saved[0]["param_groups"], strict=True):
        for parameter, index in zip(group["params"], kept["params"], strict=True):
            if index not in saved[0]["state"]:
                continue  # it has not had a gradient yet
            name, box = names[id(parameter)], local_box(parameter)
            for slot, value in saved[0]["state"][index].items():
                if slot == _STEP:
                    state.counters[name] = float(value)
                    continue
                pieces = [_piece(part["state"][index][slot], r) for r, part in enumerate(saved)]
                room = torch.empty(box.shape, dtype=pieces[0].tensor.dtype)
                fill(room, box, pieces, f"{slot} of {name}")
                state.tensors[slot, name] = room
            state.boxes[name], state.shapes[name] = box, tuple(parameter.shape)


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

    Source: torch.distributed.tensor.Shard(0), which cuts as ``torch.chunk`` does (`shard_boxes`).
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(saved, DTensor):
        return Piece(Box((0,) * saved.dim(), tuple(saved.shape)), saved)
    # Not to_local(): this process need not be in the mesh that was saved.
    mine, offset = saved._local_tensor, [0] * saved.dim()
    ranks = saved.device_mesh.mesh
    place = (ranks == rank).nonzero()[0].tolist()
    for size, index, placement in zip(ranks.shape, place, saved.placements, strict=True):
        if placement.is_shard():
            rows = -(-saved.shape[placement.dim] // size)
            offset[placement.dim] = min(index * rows, saved.shape[placement.dim])
    return Piece(Box(tuple(offset), tuple(mine.shape)), mine)


def _read(folder: Path, kind: str, world: int, rank: int) -> Any:
    path = folder / f"{kind}_world_size_{world}_rank_{rank}.pt"
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
