"""Shard-level change: the full state is gathered on one rank and scattered in the new layout.

What is reproduced: the usual way to change a layout without a planner of bytes (gather the full
state dict on rank 0, as `get_model_state_dict(full_state_dict=True)` or FSDP's FULL_STATE_DICT do,
then `broadcast_from_rank0`/scatter the new shards); the sources call it the shard-level baseline.
Rank 0 receives what it does not hold, tensor by tensor, and then sends every other rank all that
its new shard consists of, whether it was there before or not.
"""

from __future__ import annotations

import torch
from paths.role import Role


def path(role: Role) -> None:
    """Gather on rank 0, scatter from it."""
    full = dict(role.state) if role.rank == 0 else {}

    def gather() -> None:
        for key, shape in role.shapes.items():
            owner = role.owner(key)
            if owner == 0:
                continue
            if role.rank == owner:
                role.send(role.state[key], 0)
            elif role.rank == 0:
                full[key] = role.group.recv(torch.empty(shape), owner)

    def scatter() -> None:
        for key, needers in role.needers.items():
            for needer in needers:
                if role.rank == 0 and needer != 0:
                    role.send(full[key], needer)
                elif role.rank == needer and needer != 0:
                    role.state[key] = role.group.recv(role.new(key), 0)
        if role.rank == 0:
            role.state = {key: full[key] for key in role.needed}

    role.timed("gather", gather)
    role.timed("scatter", scatter)
